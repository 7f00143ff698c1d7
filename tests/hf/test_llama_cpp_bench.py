"""bench/models/llama_cpp.py with programs that only print."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "models" / "llama_cpp.py"
NSA = """
import json, sys
context = len(open(sys.argv[sys.argv.index("--ids") + 1]).read().split())
report = {"prefill_seconds": context / 100, "decode_seconds": 0.5}
json.dump(report, open(sys.argv[sys.argv.index("--json") + 1], "w"))
"""
LLAMA_CPP = """
import sys
from pathlib import Path
runs = Path(__file__).with_name("runs")
count = len(runs.read_text()) if runs.exists() else 0
runs.write_text("." * (count + 1))
print("build: 1\\n" + '{"n_kv_max": 2048, "pp": 8, "speed_pp": %d, "speed_tg": %d}' % (50 + count, 10 * count))
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """The script, run on models that are there already."""
    work, folder = tmp_path / "work", tmp_path / "bin"
    for path in (work / "dense", work / "sparse", work / "bf16.gguf", folder):
        path.mkdir(parents=True)
    programs = {"nsa": NSA, "llama-batched-bench": LLAMA_CPP}

    def run(*options, **replaced):
        for name, text in (programs | replaced).items():
            (folder / name).write_text(f"#!{sys.executable}\n{text}")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("NSA_PROGRAM", str(folder / "nsa"))
        given = [work, "--llama-cpp", folder, "--engines", "sparse,bf16", "--contexts", "8", "--tokens", 6,
                 "--json", tmp_path / "found.json", *options]  # fmt: skip
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, given)])
        spec = importlib.util.spec_from_file_location("bench_llama_cpp", SCRIPT)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(module.time, "sleep", lambda _: None)
        module.others_during = lambda action: (action(), others.pop(0) if others else 0)
        module.main()
        found = json.loads((tmp_path / "found.json").read_text())
        return found | {"rows": {(row["engine"], row["context"]): row for row in found["rows"]}}

    others = []
    run.others = others
    return run


def test_medians_of_the_runs_by_engine_and_context(bench):
    found = bench("--contexts", "16,8", "--repeats", 3)
    assert list(found["rows"]) == [("sparse", 8), ("bf16", 8), ("sparse", 16), ("bf16", 16)]
    for context in (8, 16):  # 8 and 16 tokens at 100 a second, and 5 steps in half a second
        row = found["rows"]["sparse", context]
        assert (row["prompt"], row["generation"], len(row["runs"])) == (100, 10, 3)
    assert [run["generation"] for run in found["rows"]["bf16", 8]["runs"]] == [0, 10, 20]
    assert (found["rows"]["bf16", 16]["prompt"], found["rows"]["bf16", 16]["generation"]) == (54, 40)
    assert found["cpu"] and found["date"] and "found.json" not in found["command"]


def test_later_runs_are_added(bench):
    first, second = bench(), bench("--contexts", "8,16")
    assert second["command"].splitlines()[0] == first["command"] and len(second["command"].splitlines()) == 2
    assert [len(row["runs"]) for row in second["rows"].values()] == [2, 2, 1, 1]


def test_failures_and_the_limit_are_recorded(bench):
    programs = {
        "nsa": "raise SystemExit('first line\\nout of memory')",
        "llama-batched-bench": "import time\ntime.sleep(60)",
    }
    found = bench("--limit", 3, **programs)
    assert found["rows"]["sparse", 8]["runs"] == [{"error": "out of memory"}]
    (slow,) = found["rows"]["bf16", 8]["runs"]
    assert re.fullmatch("not done in [0-3] s", slow["error"])


def test_a_disturbed_run_is_repeated_and_does_not_count(bench):
    bench.others += [0, 0.6, 0, 0, 0.3, 0.1, 0.2]  # before and during a run, in turn; twice before the last
    found = bench("--max-others", 0.2)
    assert [run["others"] for run in found["rows"]["sparse", 8]["runs"]] == [0.6, 0.2]
    assert found["rows"]["sparse", 8]["generation"] == 10


def test_an_unknown_engine_is_refused(bench, capsys):
    with pytest.raises(SystemExit) as ended:
        bench("--engines", "sparse,q8")
    assert ended.value.code == 2 and "--engines q8: must be among sparse, dense" in capsys.readouterr().err
