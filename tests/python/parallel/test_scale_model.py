"""bench/scale/scale_model.py recomputes by hand, and refuses what does not fit; bench/scale/collectives.py writes what
it reads; tools/scale.py makes the guide of it."""

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchrun import torchrun

ROOT = Path(__file__).parents[3]
# A forward of S tokens takes A S + B S^2, the backward three times that.
A, B = 1e-6, 4e-12
SETTINGS = {"num_heads": 16, "num_kv_heads": 2, "head_dim": 64, "dtype": "bfloat16", "v_head_dim": 64}


def seconds(length, gpus=1):
    return (A * length + B * length**2) / gpus


def row(op, length, time):
    return {"op": op, "variant": "mlp", "length": length, "seconds": time, "extrapolated": False}


BENCH = {
    "settings": SETTINGS | {"kernel_stride": 16, "phi": "mlp"},
    "results": [row("forward", n, seconds(n)) for n in (1000, 100000, 200000)]
    + [row("forward_backward", n, 4 * seconds(n)) for n in (1000, 100000, 200000)]
    + [row("forward", 400000, 1.0) | {"extrapolated": True}],
}
SIMULATED = {
    "heads": 16,
    "kv_heads": 2,
    "head_dim": 64,
    "dtype": "bfloat16",
    "layout": "head_tail",
    "simulated_ranks": 2,
    "ranks": [0, 1],
    "tokens": 1000000,
    "times": [
        {"forward_ms": 1000 * seconds(1e6, 2) * share, "backward_ms": 3000 * seconds(1e6, 2) * share}
        for share in (0.5, 1.0)
    ],
}


@pytest.fixture
def model(tmp_path):
    def run(*options, bench=BENCH, simulated=SIMULATED, fabrics=("here:10:100:4", "net:20:10")):
        for name, result in (("bench", bench), ("simulated", simulated)):
            (tmp_path / name).write_text(json.dumps(result))
        command = [sys.executable, str(ROOT / "bench/scale/scale_model.py"), "--bench", str(tmp_path / "bench")]
        command += ["--simulated", str(tmp_path / "simulated"), "--tokens", "800000", *options]
        command += [part for fabric in fabrics for part in ("--fabric", fabric)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout.splitlines(), done.stderr

    return run


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("reduction, width", (("all_to_all", 2), ("reduce_scatter", 4)))
def test_by_hand(model, reduction, width):
    code, printed, told = model("--gpus", "2,8", "--reduction", reduction)
    assert (code, told) == (0, "")
    # 0.8 s + 2.56 s forward, three times that backward.
    two, eight = map(cells, printed[-2:])
    assert two[:3] == ["2", "1680.0", "5040.0"] and eight[:3] == ["8", "420.0", "1260.0"]
    # A token's keys and values: 2 heads x 128 = 256 numbers; compressed ones a sixteenth more.
    received = 800000 * 256 * (1 + 1 / 16) / 2
    total = 6.720 + 3 * 10e-6 + received * (2 + 2 + width) / 100e9
    assert two[3:5] == [f"{1000 * total:.1f}", f"{6.72 / total:.2f}"]
    total = 1.680 + 7 * 3 * 20e-6 + received / 4 * 7 * (2 + 2 + width) / 10e9
    assert eight[3:] == ["", "", f"{1000 * total:.1f}", f"{1.68 / total:.2f}"]


def test_errors(model):
    """Each measurement has a line: the two lengths that are long enough and the simulated one, of both passes."""
    _, printed, _ = model("--from", "100000")
    lines = [cells(line) for line in printed[2:8]]
    assert [line[:2] for line in lines[:3]] == [["100000", "1"], ["200000", "1"], ["1000000", "1 simulating 2"]]
    assert [line[5].lstrip("+-") for line in lines] == ["0 %"] * 6 and printed[8] == ""
    slow = copy.deepcopy(SIMULATED)
    slow["times"][1]["forward_ms"] *= 1.5
    _, printed, _ = model("--from", "100000", simulated=slow)
    found = [int(cells(line)[5].removesuffix(" %")) for line in printed[2:5]]
    assert found[0] < 0 < found[1] and found[2] < 0 and max(map(abs, found)) < 40


def test_collectives(model, tmp_path):
    file = tmp_path / "collectives.json"
    printed = torchrun(
        3, ROOT / "bench/scale/collectives.py", "--sizes", "0.01,0.1", "--ranks", "2", "--repeats", "2", "--json", file
    )
    found = json.loads(file.read_text())
    assert found["backend"] == "gloo" and found["device_name"] == "CPU"
    rows = [(row["ranks"], row["collective"], row["bytes"]) for row in found["collectives"]]
    sizes = {2: (5240, 52428), 3: (2 * 3492, 2 * 34952)}
    names = ("all_gather", "all_to_all", "reduce_scatter")
    assert rows == [(ranks, name, size) for ranks in (2, 3) for size in sizes[ranks] for name in names]
    assert all(0 < row["seconds"] < 5 for row in found["collectives"]) and len(printed.splitlines()) == len(rows)
    # Of one rank count and two sizes the fit is exact.
    found["collectives"] = [
        {"collective": name, "ranks": 3, "bytes": size, "seconds": 2 * 1e-5 + size / 1e8}
        for name in names
        for size in (1000, 1000000)
    ]
    file.write_text(json.dumps(found))
    code, printed, told = model("--gpus", "3", "--collectives", str(file), fabrics=("same:10:0.1",))
    assert (code, told) == (0, "") and "gloo, CPU: 6 collectives, largest error 0 %" in printed
    assert cells(printed[-1])[3:5] == cells(printed[-1])[5:]


def test_picture(model, tmp_path):
    pytest.importorskip("matplotlib")
    assert model("--picture", str(tmp_path / "scale.png"))[0] == 0
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


def test_refused(model):
    for change, message in (
        ({"heads": 32}, "heads = 32 of simulated ranks: must be the bench's 16"),
        ({"layout": "contiguous"}, "simulated ranks: must be all ranks of the layout head_tail"),
        ({"ranks": [1]}, "simulated ranks: must be all ranks of the layout head_tail"),
    ):
        code, _, told = model(simulated=SIMULATED | change)
        assert code == 2 and message in told
    for fabrics, message in (
        ((), "--fabric, --collectives or --measured: must be given"),
        (("net:1",), "net:1: must be NAME:LATENCY_us:GB/s[:most GPUs]"),
        (("net:1:0",), "net:1:0: latency must be at least 0, bandwidth above 0"),
        (("net:nan:1",), "net:nan:1: latency must be at least 0, bandwidth above 0"),
        (("net:1:1:inf",), "--fabric: inf: must be an integer of at least 1"),
    ):
        code, _, told = model(fabrics=fabrics)
        assert code == 2 and message in told
    code, _, told = model(
        "--from", "200000", simulated=SIMULATED | {"tokens": 200000, "simulated_ranks": 1, "ranks": [0]}
    )
    assert code == 2 and "must be of at least two sizes" in told


# ----------------------------------------------------------------------------------------------------------- the guide


def collectives(latency, bandwidth):
    return [
        {"collective": name, "ranks": 2, "bytes": size, "seconds": latency + size / bandwidth}
        for name in ("all_gather", "all_to_all", "reduce_scatter")
        for size in (1000000, 100000000)
    ]


def times(tokens, alone=None):
    row = {"tokens": tokens, "layout": "head_tail", "kv_heads_at_once": 4, "forward_ms": 100.0, "backward_ms": 300.0}
    row |= {"recomputed_backward_ms": 410.0, "waited_ms": 1.5, "peak_gib": 12.25}
    row["attention_alone"] = {"forward_ms": 98.0, "backward_ms": 290.0}
    differences = dict.fromkeys(("o", "d_k"), 0.003)
    row["sampled"] = {
        "rows": 16,
        "difference": differences,
        "blocks_differ": 1,
        "largest_gap": 1e-3,
        "within_bounds": True,
    }
    if alone:
        row |= {"alone": alone, "vs_one_gpu": {"difference": differences, "within_bounds": True}}
    return row


def result():
    """As tools/gpu.sh scale writes it."""
    other = {"tokens": 65536, "layout": "contiguous", "kv_heads_at_once": 4, "forward_ms": 140.0, "backward_ms": 400.0}
    problem = {"heads": 64, "kv_heads": 4, "head_dim": 128, "dtype": "bfloat16"}
    rows = [times(65536, {"forward_ms": 190.0, "backward_ms": 570.0}), times(2**20), other]
    together = {"forward_ms_of_ranks": [90.0, 100.0], "backward_ms_of_ranks": [300.0, 292.0]}
    rows[0] |= together
    lost = {"what": "2097152 tokens, head_tail, 4 KV heads at once", "why": "150.0 s were over"}
    equal = {"o": True, "d_k": True}
    bits = {"tokens": 65536, "layout": "head_tail", "dtype": "float16", "chunks": 16, "runs": 20}
    train = {
        "parameters": 3e8,
        "context": 32768,
        "grad_accum": 2,
        "steps": 80,
        "weights_sha256": "a",
        "losses": [2.0, 1.0],
    }
    runs = [
        {"victim": 0, "seconds_until_said": 6.25, "seconds_until_torchrun_ended": 7.5, "resumed": 0},
        {"victim": 1, "seconds_until_said": None, "seconds_until_torchrun_ended": 31.0, "resumed": 1},
    ]
    found = {
        "collectives": {"backend": "nccl", "device_name": "GPU", "collectives": collectives(1e-5, 2e11)},
        "context_parallel": {**problem, "rows": rows, "not_run": [lost]},
        "bits": {"rows": [{**bits, "same_in_all_runs": True, "as_one_rank": equal}]},
        "train_one": {**train, "tokens_per_second": 100000.0},
        "train_all": {**train, "tokens_per_second": 194000.0},
        "train_long_all": {"losses": [5.5, 4.25], "tokens_per_second": 300000.0},
        "killed": {"ranks": 2, "runs": runs},
    }
    stage = {"outcome": "passed", "seconds": 9, "command": "x examples/train_long.py --cp 2 --out y"}
    stages = {name: {**stage, "result": value} for name, value in found.items()}
    stages["killed"]["outcome"] = "failed"
    stages["parallel"] = {**stage, "tests": {"passed": 70, "failed": 1, "skipped": 20}}
    about = {"gpu": "GPU", "gpus": 2, "driver": "1.2", "commit": "abc", "date": "2026-01-02"}
    return about | {"command": "tools/gpu.sh scale", "stages": stages}


@pytest.fixture
def page(tmp_path):
    """tools/scale.py on a folder with these results of several GPUs."""
    results, guide = tmp_path / "results", tmp_path / "docs/guide/scale.md"
    for folder in (results, guide.parent, tmp_path / "docs/images"):
        folder.mkdir(parents=True)
    for name in ("bench_random.json", "simulated_ranks.json"):
        shutil.copy(ROOT / "bench/results" / name, results)
    guide.write_text("By hand.\n<!-- From here on written by tools/scale.py from bench/results. -->\nold\n")

    def run(*options, **found):
        for name, one in found.items():
            (results / f"{name}.json").write_text(json.dumps(one))
        command = [
            sys.executable,
            str(ROOT / "tools/scale.py"),
            "--results",
            str(results),
            "--page",
            str(guide),
            *options,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return done.returncode, guide.read_text(), done.stdout + done.stderr

    return run


def test_the_guide_is_written(page, tmp_path):
    pytest.importorskip("matplotlib")
    assert page("--check")[0] == 1
    code, text, told = page(scale_x2=result())
    assert (code, told) == (0, "") and text.startswith("By hand.\n") and "old" not in text
    assert (tmp_path / "docs/images/scale.png").exists() and page("--check")[0] == 0
    lines = [cells(line) for line in text.splitlines() if line.startswith("|")]
    # (190 + 570) / 2 / 400 of efficiency, 400 - 388 exposed; rank by rank 760 / 2 / 392, (392 - 388) / 392
    two = ["0.950 (0.969)", "3.0 % (1.0 %)"]
    assert ["65536", "head_tail", "4", "100.0", "300.0", "410.0", *two, "1.5", "12.2"] in lines
    assert ["1048576", "head_tail", "4", "100.0", "300.0", "410.0", "", "3.0 %", "1.5", "12.2"] in lines
    assert ["65536", "contiguous", "4", "140.0", "400.0", "", "", "", "", ""] in lines
    # 100 MB in 10 us + 0.5 ms
    assert ["2", "100.0", "196.1", "196.1", "196.1"] in lines
    measured = [line for line in lines if line[:2] == ["1048576", "2"] and len(line) == 6]
    assert [line[2] for line in measured] == ["forward", "backward", "backward, forward again"]
    prose = " ".join(text.split())
    for said in (
        "GPU, driver 1.2, 2026-01-02, commit abc, `tools/gpu.sh scale`.",
        "32 sampled queries, and",
        "The same bits in 20 runs of 65536 tokens in 16 chunks; as on one rank: o, d_k (head_tail float16).",
        "2097152 tokens, head_tail, 4 KV heads at once: not run, 150.0 s were over.",
        "194,000 on 2: efficiency 0.970, equal weights after 80 steps.",
        "`train_long.py --cp 2` on 2: 300,000 tokens/s. Nats per byte: 5.500 in step 1, 4.250 in step 2.",
        "Rank 0 of 2 killed: another rank reported it after 6.2 s, torchrun ended after 7.5 s; `--resume` completed",
        "Rank 1 of 2 killed: another rank reported nothing, torchrun ended after 31.0 s; `--resume` failed.",
        "Tests of context parallelism over NCCL: 70 passed, 1 failed, 20 skipped.",
        "killed: failed.",
        "Not run: 4, 8 GPUs",
        "are those measured on 2 x GPU",
    ):
        assert said in prose, said


def test_both_passes_of_a_rank_together(page):
    pytest.importorskip("matplotlib")
    found = result()
    for row in found["stages"]["context_parallel"]["result"]["rows"]:
        row["both_ms"] = 390.0
        for part in (row.get("alone"), row.get("attention_alone")):
            if part:
                part["both_ms"] = part["forward_ms"] + part["backward_ms"] - 1
    found["stages"]["train_all"]["result"] |= {"weights_sha256": "b", "losses": [2.0, 1.01]}
    _, text, _ = page(scale_x2=found)
    lines = [cells(line) for line in text.splitlines() if line.startswith("|")]
    # 759 / 2 / 390, (390 - 387) / 390
    assert ["65536", "head_tail", "4", "100.0", "300.0", "410.0", "0.973", "0.8 %", "1.5", "12.2"] in lines
    prose = " ".join(text.split())
    assert "different weights after 80 steps, losses within 1.0e-02." in prose
    found["stages"]["train_all"]["result"] |= {"steps": 200}
    assert "medians over 80 and 200 steps." in " ".join(page(scale_x2=found)[1].split())


def test_the_guide_of_a_run_that_was_cut_off(page):
    pytest.importorskip("matplotlib")
    cut = result()
    for name in ("context_parallel", "bits", "collectives", "train_all"):
        cut["stages"][name] = {"outcome": "failed", "seconds": 60, "command": "x"}
    code, text, told = page(scale_x2=cut)
    assert (code, told) == (0, "") and "- context_parallel: failed." in text and "train_long.py" in text


def test_the_guide_of_another_problem(page):
    other = result()
    other["stages"]["context_parallel"]["result"]["heads"] = 32
    code, _, told = page(scale_x2=other)
    assert code == 1 and "heads = 32 of 2 x GPU: must be the bench's 64" in told


def test_the_guide_is_up_to_date():
    done = subprocess.run([sys.executable, str(ROOT / "tools/scale.py"), "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
