"""bench/check.py tells slower rows and refuses what cannot be compared; numbers that measuring programs refuse."""

import copy
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def row(op, length, seconds, **more):
    return {
        "op": op,
        "variant": "mean",
        "length": length,
        "seconds": seconds,
        "judged": True,
        "extrapolated": False,
        **more,
    }


OLD = {
    "kind": "nsa-bench",
    "machine": {"backend": "cpu", "cpu": "A", "threads": 2, "torch": "2.11.0"},
    "settings": {"dtype": "bfloat16", "topk": 16, "repeats": 3},
    "results": [row("forward", 1024, 0.1), row("forward", 2048, 0.2), row("compress", 1024, 0.01)],
}


@pytest.fixture
def check(tmp_path):
    def run(new, *options):
        for name, result in (("new", new), ("old", OLD)):
            (tmp_path / name).write_text(result if isinstance(result, str) else json.dumps(result))
        files = [str(tmp_path / name) for name in ("new", "old")]
        command = [sys.executable, str(ROOT / "bench/check.py"), *files, *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout.splitlines(), done.stderr.replace(str(tmp_path) + "/", "")

    return run


def changed(**seconds_of_first):
    new = copy.deepcopy(OLD)
    new["results"][0] |= seconds_of_first
    return new


@pytest.mark.parametrize("seconds, options, code", [
    (0.1, (), 0), (0.05, (), 0), (0.109, (), 0), (0.111, (), 1), (0.111, ("--tolerance", "20"), 0),
    (0.101, ("--tolerance", "0"), 1),
])  # fmt: skip
def test_tolerance(check, seconds, options, code):
    found, printed, told = check(changed(seconds=seconds), *options)
    assert (found, told) == (code, "")
    assert [line.endswith("slower") for line in printed[1:-1]] == [code == 1, False, False]
    assert printed[1].split()[:6] == [
        "forward",
        "mean",
        "1024",
        "100.000",
        f"{seconds * 1e3:.3f}",
        f"{seconds / 0.1:.2f}",
    ]


def test_rows_of_one_file_and_disturbed_ones(check):
    new = changed(seconds=9, judged=False)
    new["results"][1] |= {"seconds": 9, "extrapolated": True}
    new["results"].append(row("combine", 1024, 1))
    code, printed, _ = check(new)
    assert code == 0 and len(printed) == 3
    assert printed[-1] == "1 rows, 0 slower by more than 10 %; 3 in one file only"


def test_a_newer_torch_is_compared(check):
    new = copy.deepcopy(OLD)
    new["machine"]["torch"], new["settings"]["repeats"] = "2.12.0", 7
    assert check(new)[0] == 0


@pytest.mark.parametrize("part, name, told", [
    ("machine", "cpu", "cpu = other, stored A"),
    ("settings", "dtype", "dtype = other, stored bfloat16"),
    ("settings", "selection", "selection = other, stored None"),
])  # fmt: skip
def test_others_are_refused(check, part, name, told):
    new = copy.deepcopy(OLD)
    new[part][name] = "other"
    assert check(new) == (2, [], f"new: not comparable: {told}\n")


@pytest.mark.parametrize("new, told", [
    ("{", "new: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)\n"),
    ("[]", "new: not a result of nsa bench --json\n"),
    ({**OLD, "results": []}, "new: no row in common with old\n"),
])  # fmt: skip
def test_what_is_no_result_is_refused(check, new, told):
    assert check(new) == (2, [], told)


PROGRAMS = "host_time", "fp8_cache", "dense_decode", "peers", "generate_speed", "llama_cpp", "train_ranks"


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_that_are_refused(name, monkeypatch, capsys):
    (program,) = (ROOT / "bench").rglob(f"{name}.py")
    monkeypatch.syspath_prepend(str(program.parent))
    taken = re.findall(r'"(--[\w-]+)", type=(integer|integers|amount)\b', program.read_text(encoding="utf-8"))
    assert taken
    for option, kind in taken:
        for text in ("-3", "nan", "inf", "x", "1,-1"):
            monkeypatch.setattr(sys, "argv", [str(program), option, text])
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(str(program), run_name="__main__")
            told = capsys.readouterr().err.splitlines()[-1]
            refused = text.split(",")[-1] if kind == "integers" else text
            assert ended.value.code == 2 and f"argument {option}: {refused}: must be " in told


def test_every_number_has_a_range():
    programs = {*(ROOT / "bench").rglob("*.py"), *(ROOT / "examples").glob("*.py")} - {ROOT / "bench/check.py"}
    assert [p.name for p in programs if re.search(r"type=(int|float|lambda)\b", p.read_text(encoding="utf-8"))] == []


def test_host_time_runs():
    """Its rows call operators by their schemas, which change."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench/python/host_time.py"), "--repeats", "1", "--calls", "1"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and re.search(r"^decode_paged +\d+\.\d+$", done.stdout, re.MULTILINE), done.stderr
