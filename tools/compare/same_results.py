#!/usr/bin/env python3
"""Do two builds of libnsa give the same bits on the CPU? same_results.py BEFORE AFTER

BEFORE and AFTER are build folders. same_results.cpp is compiled with the tests of either's sources and linked with its
libnsa. It runs every operation on the grid of the tests, forward and backward, and decodes with a cache: by the oracle
and by the CPU backend with each instruction set. Ends with 1 and names the results that differ or are missing.
"""

import collections
import concurrent.futures
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

INSTRUCTION_SETS = ("portable", "avx2", "avx512", "avx512bf16", "neon", "neonbf16")
TESTS = ("support/outputs", "support/problem", "support/tensor", "support/tolerance")
TESTS += ("cpp/grid", "cpp/run_all", "cpp/under_test_cpu")


def program(build, folder):
    """Compiles the program for a build."""
    cache = (build / "CMakeCache.txt").read_text()
    tree = Path(re.search(r"CMAKE_HOME_DIRECTORY:INTERNAL=(.*)", cache)[1])
    compiler = re.search(r"CMAKE_CXX_COMPILER:\w+=(.*)", cache)[1]
    command = [compiler, "-std=c++20", "-O1", *(f"-I{tree / path}" for path in ("include", "src", "tests"))]
    sources = [Path(__file__).with_suffix(".cpp"), *(tree / f"tests/{name}.cpp" for name in TESTS)]
    objects = [folder / f"{source.stem}.o" for source in sources]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        calls = [[*command, "-c", source, "-o", object] for source, object in zip(sources, objects, strict=True)]
        list(pool.map(lambda call: subprocess.run(call, check=True), calls))
    library = build / "lib"
    # Builds of earlier commits export everything from libnsa itself.
    name = "nsa_internal" if (library / "libnsa_internal.so").exists() else "nsa"
    linked = ["-L", library, f"-Wl,-rpath,{library}", f"-l{name}", "-lgtest", "-o", folder / "program"]
    subprocess.run([*command, *objects, *linked], check=True)
    return folder / "program"


def results(program, backend, isa):
    """Name of a result -> its hashes (several may have one name); None if this CPU lacks the instruction set."""
    environment = os.environ | {"NSA_CPU_ISA": isa, "OMP_WAIT_POLICY": "passive"}
    run = subprocess.run([program, backend], env=environment, stdout=subprocess.PIPE, text=True)
    if run.returncode == 77:
        return None
    if run.returncode != 0:
        sys.exit(f"{program} {backend} with NSA_CPU_ISA={isa} ended with {run.returncode}")
    found = collections.defaultdict(list)
    for line in run.stdout.splitlines():
        name, hashed = line.rsplit(" ", 1)
        found[name].append(hashed)
    return found


def count(results):
    return sum(map(len, results.values()))


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    different = False
    with tempfile.TemporaryDirectory() as scratch:
        programs = []
        for name, build in zip(("before", "after"), sys.argv[1:], strict=True):
            folder = Path(scratch) / name
            folder.mkdir()
            programs.append(program(Path(build).resolve(), folder))
        for backend, isa in (("reference", "portable"), *(("cpu", isa) for isa in INSTRUCTION_SETS)):
            before, after = (results(program, backend, isa) for program in programs)
            label = isa if backend == "cpu" else backend
            if before is None or after is None:
                print(f"{label}: skipped, as this CPU lacks it")
                continue
            differ = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
            for name in differ:
                print(f"{label}: {name}")
            print(f"{label}: {count(before)} results before, {count(after)} after, {len(differ)} names differ")
            different |= bool(differ)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
