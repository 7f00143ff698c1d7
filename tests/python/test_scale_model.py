"""bench/scale_model.py recomputes by hand, and refuses what does not fit; bench/collectives.py writes what it reads."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest

from torchrun import torchrun

ROOT = Path(__file__).parents[2]
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
PLAYED = {
    "heads": 16,
    "kv_heads": 2,
    "head_dim": 64,
    "dtype": "bfloat16",
    "layout": "head_tail",
    "play": 2,
    "ranks": [0, 1],
    "tokens": 1000000,
    "played": [
        {"forward_ms": 1000 * seconds(1e6, 2) * share, "backward_ms": 3000 * seconds(1e6, 2) * share}
        for share in (0.5, 1.0)
    ],
}


@pytest.fixture
def model(tmp_path):
    def run(*options, bench=BENCH, played=PLAYED, fabrics=("here:10:100:4", "net:20:10")):
        for name, result in (("bench", bench), ("played", played)):
            (tmp_path / name).write_text(json.dumps(result))
        command = [sys.executable, str(ROOT / "bench/scale_model.py"), "--bench", str(tmp_path / "bench")]
        command += ["--played", str(tmp_path / "played"), "--tokens", "800000", *options]
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
    """Each measurement has a line: the two lengths that are long enough and the played one, of both passes."""
    _, printed, _ = model("--from", "100000")
    lines = [cells(line) for line in printed[2:8]]
    assert [line[:2] for line in lines[:3]] == [["100000", "1"], ["200000", "1"], ["1000000", "1 that plays 2"]]
    assert [line[5].lstrip("+-") for line in lines] == ["0 %"] * 6 and printed[8] == ""
    slow = copy.deepcopy(PLAYED)
    slow["played"][1]["forward_ms"] *= 1.5
    _, printed, _ = model("--from", "100000", played=slow)
    found = [int(cells(line)[5].removesuffix(" %")) for line in printed[2:5]]
    assert found[0] < 0 < found[1] and found[2] < 0 and max(map(abs, found)) < 40


def test_collectives(model, tmp_path):
    file = tmp_path / "collectives.json"
    printed = torchrun(
        3, ROOT / "bench/collectives.py", "--sizes", "0.01,0.1", "--ranks", "2", "--repeats", "2", "--json", file
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
        ({"heads": 32}, "heads = 32 of played ranks: must be the bench's 16"),
        ({"layout": "contiguous"}, "played ranks: must be all ranks of the layout head_tail"),
        ({"ranks": [1]}, "played ranks: must be all ranks of the layout head_tail"),
    ):
        code, _, told = model(played=PLAYED | change)
        assert code == 2 and message in told
    for fabrics, message in (
        ((), "--fabric or --collectives: must be given"),
        (("net:1",), "net:1: must be NAME:LATENCY_us:GB/s[:most GPUs]"),
        (("net:1:0",), "net:1:0: latency must be at least 0, bandwidth above 0"),
    ):
        code, _, told = model(fabrics=fabrics)
        assert code == 2 and message in told
    code, _, told = model("--from", "200000", played=PLAYED | {"tokens": 200000, "play": 1, "ranks": [0]})
    assert code == 2 and "must be of at least two sizes" in told


def test_the_guide_has_its_tables():
    guide = (ROOT / "docs/guide/scale.md").read_text(encoding="utf-8")
    (line,) = (line for line in guide.splitlines() if line.startswith("    python bench/scale_model.py "))
    command = [sys.executable, *line.split()[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    tables = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(tables) > 20 and [line for line in tables if line not in guide.splitlines()] == []
