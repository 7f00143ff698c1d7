#!/usr/bin/env python3
"""The GPU tests that together launch every kernel of a build, for compute-sanitizer.

    kernel_cases.py choose TRACES LIBRARY CASES     from a run of all tests: the cheapest that launch everything
    kernel_cases.py filter CASES PROGRAM KERNELS    as a --gtest_filter; KERNELS: auto or portable
    kernel_cases.py check TRACES LIBRARY            fails, with names, if a kernel was not launched

TRACES has a folder PROGRAM.KERNELS for every program run with NSA_CUDA_TRACE (tests/cuda/main.cpp), in it a file for
each test that names the kernels it launched, and PROGRAM.KERNELS[.SHARD].xml of GoogleTest.
"""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

# What is to be seen by the sanitizers whatever it launches: offsets on the device that are none, and warps that wait
# for the count of copies.
ALWAYS = {
    "auto": re.compile(r"Packed\.OffsetsThatAreNoneLeadNowhere|/Ahead\."),
    "portable": re.compile(r"Packed\.OffsetsThatAreNoneLeadNowhere"),
}
# Thousands of launches, or long sequences: hours under a sanitizer.
TOO_LONG = re.compile(
    r"EverySplit|TokenByToken|ChunkedPrefill|Ragged|Rollback|StoredInParts|EveryKernel|ManyCandidates"
    r"|DecodeSteps(?!\.Fork)"
)


def built(library):
    """Names of the kernels in the machine code of a library."""
    listing = subprocess.check_output(["cuobjdump", "-res-usage", library], text=True, stderr=subprocess.STDOUT)
    return set(re.findall(r"Function (\w+):", listing))


def traces(folder):
    """(program, kernels, test) -> names of kernels."""
    found = {}
    for run in sorted(path for path in Path(folder).iterdir() if path.is_dir()):
        program, kernels = run.name.rsplit(".", 1)
        for file in run.iterdir():
            found[program, kernels, file.name.replace("+", "/")] = set(file.read_text().split())
    return found


def seconds(folder):
    times = {}
    for file in Path(folder).glob("*.xml"):
        program, kernels = file.stem.split(".")[:2]
        for case in ElementTree.parse(file).iter("testcase"):
            times[program, kernels, f"{case.get('classname')}.{case.get('name')}"] = float(case.get("time", 0))
    return times


def choose(folder, library):
    """A greedy cover of all kernels."""
    kernels, times = built(library), seconds(folder)
    wanted = {case: names & kernels for case, names in traces(folder).items() if not TOO_LONG.search(case[2])}
    chosen = [case for case in wanted if ALWAYS[case[1]].search(case[2])]
    open_ = set().union(*wanted.values())
    while open_:
        best = max(wanted, key=lambda case: len(wanted[case] & open_) / (0.02 + times.get(case, 1)))
        chosen.append(best)
        open_ -= wanted[best]
    cases = {}
    for program, which, test in sorted(chosen):
        cases.setdefault(program, {}).setdefault(which, []).append(test)
    launched = set().union(*traces(folder).values())
    return {"kernels": len(kernels), "launched": len(kernels & launched), "cases": cases}


def main():
    command, *arguments = sys.argv[1:]
    if command == "choose":
        folder, library, path = arguments
        found = choose(folder, library)
        Path(path).write_text(json.dumps(found, indent=1) + "\n")
        count = sum(len(tests) for program in found["cases"].values() for tests in program.values())
        print(f"{count} cases launch {found['launched']} of {found['kernels']} kernels")
        command, arguments = "check", [folder, library]
    if command == "filter":
        path, program, kernels = arguments
        print(":".join(json.loads(Path(path).read_text())["cases"].get(program, {}).get(kernels, [])))
    if command == "check":
        folder, library = arguments
        missing = sorted(built(library) - set().union(set(), *traces(folder).values()))
        for name in missing:
            print("never launched:", name)
        return 1 if missing else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
