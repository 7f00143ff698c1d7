"""bench/models/llama.py, at sizes for a CPU."""

import importlib.util
import json
import math
from pathlib import Path

import pytest

import nsa

SCRIPT = Path(__file__).parents[2] / "bench" / "models" / "llama.py"


@pytest.fixture(scope="module")
def llama():
    spec = importlib.util.spec_from_file_location("bench_llama", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(llama, *options):
    return llama.Run(llama.arguments(["--device", "cpu", "--shape", "tiny", *map(str, options)])).everything()


@pytest.mark.slow
@pytest.mark.bits
def test_its_figures(llama, tmp_path):
    file = tmp_path / "llama.json"
    assert run(llama, "--lengths", "40,150", "--repeats", "1", "--json", file) == 0
    found = json.loads(file.read_text())
    assert found["commit"] and found["date"] and "--json" not in found["command"]
    assert found["command"].startswith("python bench/models/llama.py --device cpu --shape tiny --lengths 40,150")
    assert set(found["prefill"]) == set(found["train"]) == {"40", "150"}
    assert set(found["decode"]) == {"40x1", "40x8", "150x1", "150x8"}
    for part in ("prefill", "train", "decode"):
        for figures in found[part].values():
            for model in ("dense", "nsa", "layers"):
                assert 0 < figures[model]["least_ms"] <= figures[model]["ms"] <= figures[model]["most_ms"] < math.inf
    assert all(figures["same_bits"] for figures in found["prefill"].values())
    for dtype in ("bfloat16", "float32"):
        for part in ("forward", "prefill_and_steps"):
            equal = found["equal"][dtype][part]
            assert equal["within"] and 0 < equal["cpu"] <= equal["bound"]


def test_wrong_result_and_failure_are_reported(llama, tmp_path, monkeypatch, capsys):
    file = tmp_path / "llama.json"
    real = nsa.native_sparse_attention

    def wrong(*arguments, **options):
        found = real(*arguments, **options)
        return (1.5 * found[0], found[1]) if options["return_indices"] else 1.5 * found

    monkeypatch.setattr("nsa.functional.native_sparse_attention", wrong)
    monkeypatch.setattr(llama, "training_step", lambda *_: 1 / 0)
    monkeypatch.setattr(llama, "DTYPES", ("float32",))
    assert run(llama, "--lengths", "40", "--parts", "equal,train", "--json", file) == 1
    told = capsys.readouterr().out.split("FAILED:")[1]
    assert "equal float32: not within the bound" in told and "train 40: ZeroDivisionError" in told
    found = json.loads(file.read_text())
    assert not found["equal"]["float32"]["forward"]["within"] and "ZeroDivisionError" in found["train"]["40"]["error"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lengths", "0"), "--lengths: 0: must be an integer of at least 1"),
        (("--batches", "1,x"), "--batches: x: must be an integer of at least 1"),
        (("--parts", "prefill,nothing"), "--parts nothing: must be among prefill"),
        (("--parts", "graph"), "--parts graph: needs --device cuda"),
        (("--repeats", "-1"), "--repeats: -1: must be an integer of at least 0"),
    ],
)
def test_its_options_refused(llama, capsys, options, message):
    with pytest.raises(SystemExit) as ended:
        run(llama, *options)
    assert ended.value.code == 2 and message in capsys.readouterr().err
