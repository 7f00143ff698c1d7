"""bench/scale/train_ranks.py: the speed of several ranks, and a run that resumes after a rank was killed."""

import json
import os
import subprocess
import sys

import pytest

from conftest import PROGRAM, ROOT, TINY

BENCH = ROOT / "bench/scale/train_ranks.py"
RUN = [*TINY, "--layers", "2", "--threads", "1"]
LIMIT = 600  # s, for what takes twenty where no other work runs


def bench(*arguments):
    given = {"NSA_PROGRAM": PROGRAM, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": 1, "NSA_DEVICE": "cpu"}
    given = os.environ | {name: str(value) for name, value in given.items()}
    command = [sys.executable, str(BENCH), *map(str, arguments)]
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=LIMIT)


def test_speed(corpus, tmp_path):
    """Two ranks have the weights of one."""
    found = []
    for ranks in (1, 2):
        file = tmp_path / f"{ranks}.json"
        train = ["--data", corpus, "--steps", 24, "--grad-accum", 2, *RUN]
        done = bench("speed", "--ranks", ranks, "--out", tmp_path / str(ranks), "--json", file, "--", *train)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(json.loads(file.read_text()))
    assert [run["ranks"] for run in found] == [1, 2]
    for run in found:
        assert (
            run["steps"] == 24 and run["grad_accum"] == 2 and len(run["losses"]) == 6 and run["tokens_per_second"] > 0
        )
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]


def test_kill(corpus, tmp_path):
    file = tmp_path / "killed.json"
    train = ["--data", corpus, "--steps", 400, "--save-every", 20, *RUN, "--eval-every", 0]
    done = bench("kill", "--ranks", 2, "--at", 40, "--out", tmp_path / "runs", "--json", file, "--", *train)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["same_weights"] and [run["victim"] for run in found["runs"]] == [0, 1]
    for run in found["runs"]:
        assert run["code"] != 0 and 0 < run["seconds_until_said"] < 15 and "resume with --resume" in run["said"]
        assert run["end"]["step"] == 400 and run["left_running"] == []


@pytest.mark.parametrize("arguments, message", (
    (("kill", "--ranks", 1, "--out", "new"), "--ranks 1: must be at least 2"),
    (("speed", "--ranks", 1, "--out", "full"), "must be empty"),
))  # fmt: skip
def test_refused(arguments, message, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    *others, folder = arguments
    done = bench(*others, tmp_path / folder)
    assert done.returncode != 0 and message in done.stderr
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["file"]
