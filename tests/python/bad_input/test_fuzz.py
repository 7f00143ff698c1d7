"""Broken calls of every public function and operator: a result as with the same values in clean memory and as
nsa.reference has it, or one of the errors that the documents name. Never a crash, another exception, a changed argument
after a refusal, or ten seconds of CPU time.

hypothesis makes up the cases; a worker (adversarial_calls.py) that may crash runs them. NSA_ADVERSARIAL=1 tries more.
"""

from __future__ import annotations

import collections
import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import adversarial_calls

CASES = 4000 if os.environ.get("NSA_ADVERSARIAL") == "1" else 500
LIMIT = 120.0  # s without an answer, also where other work runs
CATALOGUE = adversarial_calls.catalogue()


class Worker:
    """A process that is started again after a crash."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.errors = tempfile.TemporaryFile("w+")
        self.limit = LIMIT

    def start(self) -> subprocess.Popen[str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "NSA_BACKEND": "cpu"}
        command = [sys.executable, Path(adversarial_calls.__file__)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environment
        )
        assert self.answer(process, 120) == "ready\n"
        return process

    def answer(self, process: subprocess.Popen[str], limit: float) -> str | None:
        """A line of the process, "" if it has ended, None if it took too long."""
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], limit)
        return process.stdout.readline() if ready else None

    def run(self, case: dict[str, object]) -> tuple[str, str]:
        if self.process is None:
            self.process = self.start()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        line = self.answer(self.process, self.limit)
        if line:
            outcome, text = json.loads(line)
            return outcome, text
        code = self.stop()
        self.errors.seek(0)
        end = self.errors.read()[-3000:]
        self.errors.truncate(0)
        return ("slow", f"more than {self.limit} s") if line is None else ("crash", f"exit code {code}\n{end}")

    def stop(self) -> int:
        process, self.process = self.process, None
        if process is None:
            return 0
        process.kill()
        return process.wait()


@st.composite
def cases(draw: st.DrawFn) -> dict[str, object]:
    name = draw(st.sampled_from(list(CATALOGUE)))
    changes = []
    count = draw(st.sampled_from((1, 1, 1, 2, 3)))
    places = st.lists(st.sampled_from(CATALOGUE[name]), min_size=1, max_size=count, unique_by=lambda place: str(place))
    for path, what in draw(places):
        kind = draw(st.sampled_from(adversarial_calls.KINDS[what]))
        changes.append([path, kind, draw(st.integers(0, 5039))])
    return {"call": name, "changes": changes, "threads": draw(st.sampled_from((1, 1, 1, 2)))}


@pytest.fixture(scope="module")
def worker():
    worker = Worker()
    yield worker
    worker.stop()


def test_worker_finds_faults(worker):
    """What the worker is trusted with: a crash, a hang and an error of another kind are seen as such."""
    assert worker.run({"call": "combine", "changes": [], "threads": 1}) == ("taken", "as nsa.reference")
    assert worker.run({"call": "combine", "changes": [[["gates"], "rank", 0]], "threads": 1})[0] == "refused"
    injected = {"crash": "crash", "error": "wrong", "write": "wrong", "bits": "wrong"}
    for what, outcome in injected.items():
        assert worker.run({"call": f"injected {what}", "changes": [], "threads": 1})[0] == outcome, what
    assert worker.run({"call": "injected work", "changes": [], "threads": 1, "seconds": 0.2})[0] == "slow"
    worker.limit = 2.0
    assert worker.run({"call": "injected hang", "changes": [], "threads": 1})[0] == "slow"
    worker.limit = LIMIT


def test_broken_calls(worker):
    counts: collections.Counter[str] = collections.Counter()

    @settings(
        max_examples=CASES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases())
    def check(case):
        outcome, text = worker.run(case)
        counts[outcome] += 1
        assert outcome in ("taken", "refused", "not made"), f"{json.dumps(case)}\n{outcome}: {text}"

    check()
    print(dict(counts))
    assert counts["taken"] > CASES / 10 and counts["refused"] > CASES / 4, counts
