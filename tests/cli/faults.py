"""Runs the program with one injected fault (tests/fault_injection/faults.cpp) or with little memory."""

import os
import re
import resource
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from conftest import PROGRAM

LIBRARY = PROGRAM.resolve().parents[1] / "lib" / "libnsa_faults.so"
ADVERSARIAL = os.environ.get("NSA_ADVERSARIAL") == "1"  # `make adversarial`: every case instead of one of each kind
# A process cannot be preloaded into where a sanitizer must come first.
needs_library = pytest.mark.skipif(not LIBRARY.exists(), reason=f"{LIBRARY} is not built")

EINTR, EIO, EACCES, EMFILE, ENOSPC = "4", "5", "13", "24", "28"
FULL = "-28"  # ENOSPC, and from there on


@dataclass(frozen=True)
class Call:
    """One call of the program on a file below the folder: its number from 1 on."""

    number: int
    name: str
    path: str
    source: str = ""  # of rename

    @property
    def site(self):
        """The same for calls that differ in the process or the step alone."""
        return self.name, re.sub(r"\d+\.tmp$", "tmp", re.sub(r"optimizer-\d+", "optimizer-N", self.path))


def start(arguments, environment=None, limit=None, **options):
    """The program as a process. `limit`: bytes of address space."""
    environment = {**os.environ, "NSA_DEVICE": "cpu", "OMP_NUM_THREADS": "1", **(environment or {})}
    if limit is not None:
        options["preexec_fn"] = lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "errors": "replace", **options}
    return subprocess.Popen([PROGRAM, *map(str, arguments)], stdin=subprocess.DEVNULL, env=environment, **options)


def run(arguments, environment=None, **options):
    """The finished process's exit code and what it said on stderr."""
    with start(arguments, environment, **options) as process:
        _, errors = process.communicate(timeout=300)
    return process.returncode, errors or ""


def run_with_fault(arguments, under, log, number=0, action=""):
    """The exit code, what was said on stderr, and the calls up to the end."""
    environment = {"LD_PRELOAD": str(LIBRARY), "NSA_FAULTS_UNDER": str(under), "NSA_FAULTS_LOG": str(log),
                   "NSA_FAULTS_AT": str(number), "NSA_FAULTS_DO": action}  # fmt: skip
    code, errors = run(arguments, environment)
    lines = [line.split("\t") for line in log.read_text().splitlines()] if log.exists() else []
    return code, errors, [Call(int(number), *rest) for number, *rest in lines]


def one_line(errors):
    """The message of a program that failed: one line, and no sign of a crash."""
    assert "terminate" not in errors and "internal error" not in errors, errors
    messages = [line for line in re.split(r"[\r\n]", errors) if line.startswith("nsa: ")]
    assert len(messages) == 1, errors
    return messages[0]


def killed(code):
    return code == -signal.SIGKILL


def for_each(check, cases):
    """Runs check(case) for all cases, as many at a time as cores, and fails with every one that failed."""

    def outcome(case):
        try:
            check(case)
        except Exception as error:
            return f"{case}: {error!r}"[:1500]

    with ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as pool:
        failures = [failure for failure in pool.map(outcome, cases) if failure]
    assert not failures, f"{len(failures)} of {len(cases)} cases failed:\n" + "\n".join(failures[:20])
