#!/usr/bin/env python3
"""Do the C++ tests notice planted faults?

Copies the sources to a scratch folder, checks that the tests pass there, then plants one fault at a time in the CPU
backend, rebuilds and runs the tests: each fault must make them fail. Writes docs/findings/reliability/mutants.md.

    tests/mutation/run.py [--keep] [--only NAME] [--check]
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "docs" / "findings" / "reliability" / "mutants.md"
KERNELS = "src/cpu/kernels/"
# The programs that check what the CPU backend computes, the quickest first.
TESTS = ["selection_test", "inputs_test", "isolation_test", "grid_test"]
# The faults are in code that is compiled once per instruction set: one of them is enough.
OPTIONS = ["-DNSA_BUILD_LM=OFF", "-DNSA_BUILD_TESTS=ON", "-DNSA_CPU_ISAS=portable", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"]


@dataclass
class Fault:
    """A fault as a replacement of source text that occurs exactly once."""

    name: str
    file: str
    old: str
    new: str


FAULTS = [
    Fault(
        "visibility off by one: a compression block is seen one token late",
        KERNELS + "visible.h",
        "cfg.num_compressed(t + 1)",
        "cfg.num_compressed(t)",
    ),
    Fault(
        "window off by one: one token short",
        KERNELS + "visible.h",
        "std::max<std::int64_t>(0, t + 1 - window)",
        "std::max<std::int64_t>(0, t + 2 - window)",
    ),
    Fault(
        "all overlap weights 1",
        KERNELS + "block_selector.cpp",
        """  for (std::int64_t i = begin; i < end; i += kWidth) {
    Vec sum{};
    for (std::int64_t b = 0; b < per_key_; ++b) sum += load(sums + i - b);
    store(strides + i - begin, sum);
  }
""",
        """  for (std::int64_t i = begin; i < end; ++i) {
    strides[i - begin] = sums[i];
    for (std::int64_t b = 1; b < per_key_ && i % per_block == 0; ++b) strides[i - begin] += sums[i - b];
  }
""",
    ),
    Fault(
        "tie order reversed: to the higher index",
        KERNELS + "block_selector.cpp",
        """  for (std::int64_t j = 0; j < n; ++j)
    if (ranks[j] > low || (ranks[j] == low && ties-- > 0))""",
        """  ties -= std::count(ranks, ranks + n, static_cast<std::int32_t>(low));
  for (std::int64_t j = 0; j < n; ++j)
    if (ranks[j] > low || (ranks[j] == low && ties++ >= 0))""",
    ),
    Fault(
        "a forced block dropped: the first of the local ones",
        KERNELS + "block_selector.cpp",
        "last = all ? candidates : candidates - cfg_.local_blocks;",
        "last = all ? candidates : candidates - cfg_.local_blocks + 1;",
    ),
    Fault(
        "one head missing from the group sum",
        KERNELS + "block_selector.cpp",
        "for (int h = 0; h < p.heads; ++h) sum = fma(",
        "for (int h = 0; h + 1 < p.heads; ++h) sum = fma(",
    ),
    Fault(
        "two gates swapped in nsa_attention",
        KERNELS + "nsa_forward.h",
        "gate[branch]",
        "gate[branch == kWindow ? branch : 1 - branch]",
    ),
    Fault(
        "two gates swapped in combine",
        KERNELS + "combine.cpp",
        "gx = to_float(g[0]), gy = to_float(g[1])",
        "gx = to_float(g[1]), gy = to_float(g[0])",
    ),
]


def stale() -> list[str]:
    """Faults that can no longer be planted, because the code they replace has changed."""
    counts = [(ROOT / fault.file).read_text().count(fault.old) for fault in FAULTS]
    return [
        f"{fault.name}: {fault.file} holds the text to replace {count} times, not once"
        for fault, count in zip(FAULTS, counts, strict=True)
        if count != 1
    ]


def copy_sources(scratch: Path) -> None:
    """What git tracks or would track, without what is built."""
    files = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard"], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    for name in files:
        if (ROOT / name).is_file():
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, scratch / name)


def build(scratch: Path) -> None:
    folder = scratch / "build"
    if not folder.exists():
        subprocess.run(["cmake", "-S", scratch, "-B", folder, "-G", "Ninja", *OPTIONS], check=True, capture_output=True)
    result = subprocess.run(["ninja", "-C", folder, *TESTS], capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"the sources do not build:\n{result.stdout[-4000:]}")


def run_tests(scratch: Path) -> dict[str, list[str]]:
    """The failed tests of the first program that fails."""
    for test in TESTS:
        result = subprocess.run(
            [scratch / "build" / "bin" / test, "--gtest_brief=1"],
            capture_output=True,
            text=True,
            check=False,
            timeout=1200,
            env={key: value for key, value in os.environ.items() if key != "NSA_CPU_ISA"},
        )
        names = re.findall(r"^\[  FAILED  \] ([\w/.]+)", result.stdout, re.MULTILINE)
        if result.returncode and not names:
            names = [f"{test} ended with {result.returncode}"]
        if result.returncode:
            return {test: names}
    return {}


def summary(failed: dict[str, list[str]]) -> str:
    if not failed:
        return "**nothing**"
    kinds = {}
    for test, names in failed.items():
        for name in names:
            # Suite/Class.Test/case -> Class.Test
            kind = name.split("/")[1] if name.count("/") > 1 else name
            kinds[test, kind] = kinds.get((test, kind), 0) + 1
    return ", ".join(f"{test}: {kind} ({count})" for (test, kind), count in kinds.items())


def plant(scratch: Path, fault: Fault) -> str:
    """Returns the text that was there."""
    path = scratch / fault.file
    text = path.read_text()
    path.write_text(text.replace(fault.old, fault.new))
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="keep the scratch folder")
    parser.add_argument("--only", default="", help="faults whose name contains this; writes no report")
    parser.add_argument("--check", action="store_true", help="only see whether every fault can be planted")
    arguments = parser.parse_args()
    if problems := stale():
        sys.exit("\n".join(problems))
    if arguments.check:
        return 0

    scratch = Path(tempfile.mkdtemp(prefix="nsa-mutation-"))
    rows, missed = [], []
    try:
        copy_sources(scratch)
        build(scratch)
        if failed := run_tests(scratch):
            sys.exit(f"the tests fail without any fault: {summary(failed)}")
        for fault in FAULTS:
            if arguments.only not in fault.name:
                continue
            start = time.monotonic()
            original = plant(scratch, fault)
            build(scratch)
            failed = run_tests(scratch)
            (scratch / fault.file).write_text(original)
            if not failed:
                missed.append(fault.name)
            rows.append(f"| {fault.name} | `{fault.file}` | {summary(failed)} |")
            print(f"{'caught' if failed else 'MISSED'} in {time.monotonic() - start:.0f} s: {fault.name}", flush=True)
    finally:
        if not arguments.keep:
            shutil.rmtree(scratch)
    if not arguments.only:
        REPORT.parent.mkdir(parents=True, exist_ok=True)
        REPORT.write_text(
            "# Planted faults\n\n"
            "`make mutation` plants these faults one at a time in a copy of the CPU backend, rebuilds it and runs the\n"
            "C++ tests that check what it computes, up to the first program that fails. Each has to make one fail. In\n"
            "brackets: how many cases failed.\n\n"
            "| fault | where | noticed by |\n|---|---|---|\n" + "\n".join(rows) + "\n"
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
