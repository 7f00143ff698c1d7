#!/usr/bin/env python3
"""Runs tests that compare bits under each instruction set of torch and of libnsa that this processor has.

Otherwise the processor at hand decides whether a test notices results that depend on torch's vector code. `make test`
runs torch's newest set and libnsa's fastest, so the others run here: torch's oldest with libnsa's oldest, and so on.
The tests are those marked `bits` that are not `slow`.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
ATEN = ("default", "avx2", "avx512")  # from the oldest to the newest, as the values of ATEN_CPU_CAPABILITY
LIBNSA = ("portable", "neon", "neonbf16", "avx2", "avx512", "avx512bf16")  # those of NSA_CPU_ISA
# Without the reference backend, which has no instruction sets, and without four ranks, which share two cores.
SELECTED = ("-m", "bits and not slow", "-k", "not (reference or [4- or -4])")
TWO = ["-n", "2", "--dist", "loadfile"]  # as in tools/test.sh
SUITES = (["tests/python"], ["tests/hf"], ["tests/cli/test_resume.py", "tests/cli/test_ranks.py"])


def available() -> tuple[list[str], list[str], str]:
    """The sets of torch and of libnsa, as their own code finds them on this processor; the one that libnsa chooses."""
    import torch

    import nsa  # noqa: F401

    best = torch.backends.cpu.get_cpu_capability().lower()
    newest = max((i for i, name in enumerate(ATEN) if best.startswith(name)), default=0)
    described = torch.ops.nsa.describe_instruction_sets()
    libnsa = [name for name in LIBNSA if f"{name}: available\n" in described]
    return list(ATEN[: newest + 1]), libnsa, re.search(r"^chosen: (\w+)", described, re.M)[1]


def flags() -> set[str]:
    """Of this processor, as Linux reports them."""
    file = Path("/proc/cpuinfo")
    found = re.search(r"^flags\s*:(.*)$", file.read_text(), re.M) if file.exists() else None
    return set(found[1].split()) if found else set()


def run(aten: str, libnsa: str) -> bool:
    """Whether the tests pass under these two."""
    names = {"ATEN_CPU_CAPABILITY": aten, "NSA_CPU_ISA": libnsa, "OMP_WAIT_POLICY": "passive"}
    print(f"== ATEN_CPU_CAPABILITY={aten} NSA_CPU_ISA={libnsa}", flush=True)
    begin, passed = time.monotonic(), True
    for suite in SUITES:
        if "tests/hf" in suite and sys.version_info < (3, 11):  # as transformers wants
            continue
        command = [sys.executable, *"-m pytest -q -r fE".split(), *SELECTED, *TWO, *suite]
        passed &= subprocess.run(command, cwd=ROOT, env=os.environ | names, check=False).returncode == 0
    print(f"{'passed' if passed else 'FAILED'} in {time.monotonic() - begin:.0f} s", flush=True)
    return passed


def main() -> int:
    """Runs the pairs one by one, and prints which sets are left out and why."""
    for name in ("ATEN_CPU_CAPABILITY", "NSA_CPU_ISA"):
        os.environ.pop(name, None)
    aten, libnsa, chosen = available()
    if aten[-1] == "avx512" and not {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags():
        sys.exit("torch chooses AVX-512 code, which /proc/cpuinfo does not list")
    for variable, every, usable in (("ATEN_CPU_CAPABILITY", ATEN, aten), ("NSA_CPU_ISA", LIBNSA, libnsa)):
        for name in sorted({*every} - {*usable}, key=every.index):
            print(f"skipped, not on this processor or not built: {variable}={name}")
    count = max(len(aten), len(libnsa))
    pairs = [(aten[min(i, len(aten) - 1)], libnsa[min(i, len(libnsa) - 1)]) for i in range(count)]
    usual = (aten[-1], chosen)
    pairs.remove(usual)
    print("skipped, run by make test: ATEN_CPU_CAPABILITY={} NSA_CPU_ISA={}".format(*usual))
    return 0 if all([run(*pair) for pair in pairs]) else 1


if __name__ == "__main__":
    sys.exit(main())
