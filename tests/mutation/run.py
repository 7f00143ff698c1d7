#!/usr/bin/env python3
"""Mutation testing: do the C++ tests catch every mutant?

Copies the sources to a scratch folder, checks that the tests pass there, then applies one mutant at a time to the CPU
backend, rebuilds and runs the tests. Each mutant must make them fail. Writes docs/findings/reliability/mutants.md.

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
# The mutants are in code that is compiled once per instruction set: one set is enough.
OPTIONS = ["-DNSA_BUILD_LM=OFF", "-DNSA_BUILD_TESTS=ON", "-DNSA_CPU_ISAS=portable", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"]


@dataclass
class Mutant:
    """A mutant as a replacement of source text that occurs exactly once."""

    name: str
    file: str
    old: str
    new: str


MUTANTS = [
    Mutant(
        "visibility off by one: a compression block is seen one token late",
        KERNELS + "visible.h",
        "cfg.num_compressed(t + 1)",
        "cfg.num_compressed(t)",
    ),
    Mutant(
        "window off by one: one token short",
        KERNELS + "visible.h",
        "std::max<std::int64_t>(0, t + 1 - window)",
        "std::max<std::int64_t>(0, t + 2 - window)",
    ),
    Mutant(
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
    Mutant(
        "tie order reversed: to the higher index",
        KERNELS + "block_selector.cpp",
        """  for (std::int64_t j = 0; j < n; ++j)
    if (ranks[j] > low || (ranks[j] == low && ties-- > 0))""",
        """  ties -= std::count(ranks, ranks + n, static_cast<std::int32_t>(low));
  for (std::int64_t j = 0; j < n; ++j)
    if (ranks[j] > low || (ranks[j] == low && ties++ >= 0))""",
    ),
    Mutant(
        "a forced block dropped: the first of the local ones",
        KERNELS + "block_selector.cpp",
        "last = all ? candidates : candidates - cfg_.local_blocks;",
        "last = all ? candidates : candidates - cfg_.local_blocks + 1;",
    ),
    Mutant(
        "one head missing from the group sum",
        KERNELS + "block_selector.cpp",
        "for (int h = 0; h < p.heads; ++h) sum = fma(",
        "for (int h = 0; h + 1 < p.heads; ++h) sum = fma(",
    ),
    Mutant(
        "two gates swapped in nsa_attention",
        KERNELS + "nsa_forward.h",
        "gate[branch]",
        "gate[branch == kWindow ? branch : 1 - branch]",
    ),
    Mutant(
        "two gates swapped in combine",
        KERNELS + "combine.cpp",
        "gx = to_float(g[0]), gy = to_float(g[1])",
        "gx = to_float(g[1]), gy = to_float(g[0])",
    ),
]


def stale() -> list[str]:
    """Mutants that no longer apply, because the code they replace has changed."""
    counts = [(ROOT / mutant.file).read_text().count(mutant.old) for mutant in MUTANTS]
    return [
        f"{mutant.name}: {mutant.file} holds the text to replace {count} times, not once"
        for mutant, count in zip(MUTANTS, counts, strict=True)
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


def mutate(scratch: Path, mutant: Mutant) -> str:
    """Applies the mutant; returns the original text."""
    path = scratch / mutant.file
    text = path.read_text()
    path.write_text(text.replace(mutant.old, mutant.new))
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="keep the scratch folder")
    parser.add_argument("--only", default="", help="run mutants whose name contains this; writes no report")
    parser.add_argument("--check", action="store_true", help="check only that every mutant applies")
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
            sys.exit(f"the tests fail without a mutant: {summary(failed)}")
        for mutant in MUTANTS:
            if arguments.only not in mutant.name:
                continue
            start = time.monotonic()
            original = mutate(scratch, mutant)
            build(scratch)
            failed = run_tests(scratch)
            (scratch / mutant.file).write_text(original)
            if not failed:
                missed.append(mutant.name)
            rows.append(f"| {mutant.name} | `{mutant.file}` | {summary(failed)} |")
            print(f"{'caught' if failed else 'MISSED'} in {time.monotonic() - start:.0f} s: {mutant.name}", flush=True)
    finally:
        if not arguments.keep:
            shutil.rmtree(scratch)
    if not arguments.only:
        REPORT.parent.mkdir(parents=True, exist_ok=True)
        REPORT.write_text(
            "# Mutants\n\n"
            "`make mutation` applies these mutants one at a time to a copy of the CPU backend, rebuilds it and runs\n"
            "the C++ tests of its results, up to the first program that fails. Each mutant must make one fail.\n"
            "The number of failed cases is in brackets.\n\n"
            "| mutant | file | caught by |\n|---|---|---|\n" + "\n".join(rows) + "\n"
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
