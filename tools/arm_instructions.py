#!/usr/bin/env python3
"""How many instructions do AArch64's kernels spend on a multiply-add? arm_instructions.py BUILD

Reads the disassembly of the sets neon and neonbf16 in a build folder. A tile of R rows and C vectors needs R * C
multiply-adds, C loads of B and R of A a step. Prints the inner loops of each kernel: tiles, their instructions over
that count, for tiles of 12 multiply-adds or more. Ends with 1 if one is above 1.3. Loops that prefetch are left out:
they run until the next block is on its way, and the plain loop takes over.
"""

import collections
import re
import subprocess
import sys
from pathlib import Path

MULTIPLY_ADD = ("fmla", "bfdot")
MIN_SIZE, MAX_RATIO = 12, 1.3
INSTRUCTION = re.compile(r"^ *([0-9a-f]+):\t(\S+)(?:\t(.*))?$")


def inner_loops(text):
    """The instructions, as (name, operands), of each loop that has no other branch in it."""
    address_of_last_branch, seen = -1, []
    for line in text.splitlines():
        match = INSTRUCTION.match(line)
        if not match:
            seen, address_of_last_branch = ([], -1) if line.endswith(">:") else (seen, address_of_last_branch)
            continue
        address, name, operands = int(match[1], 16), match[2], match[3] or ""
        seen.append((address, name, operands))
        if not (name == "b" or name.startswith(("b.", "cb", "tb"))):
            continue
        target = int(re.search(r"\b([0-9a-f]+) <", operands)[1], 16)
        if address_of_last_branch < target <= address:
            yield [(n, o) for a, n, o in seen if a >= target]
        address_of_last_branch = address


def tiles(object_file):
    """(rows, vectors) of a tile -> the instructions of each of its loops."""
    dump = ["aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", object_file]
    found = collections.defaultdict(list)
    for loop in inner_loops(subprocess.run(dump, check=True, capture_output=True, text=True).stdout):
        lanes = [operands.endswith("[0]") for name, operands in loop if name in MULTIPLY_ADD]
        rows = sum(len(re.findall(r"\bs\d+", operands)) for name, operands in loop if name in ("ldr", "ldur", "ldp"))
        if rows and all(lanes) and len(lanes) >= MIN_SIZE:  # sums of other kinds multiply no lanes
            found[rows, len(lanes) // rows].append(len(loop))
    return found


def main():
    (build,) = sys.argv[1:]
    ratios = []
    for isa in ("neon", "neonbf16"):
        for file in sorted((Path(build) / f"src/cpu/CMakeFiles/nsa_kernels_{isa}.dir/kernels").glob("*.o")):
            for (rows, vectors), lengths in sorted(tiles(file).items(), reverse=True):
                implied = rows * vectors + rows + vectors
                ratios.append(max(lengths) / implied)
                print(f"{isa:9}{file.name:28}{rows} x {vectors}: {len(lengths):2} loops of at most {max(lengths)} "
                      f"instructions, {ratios[-1]:.2f} of the tile's {implied}")  # fmt: skip
    print(f"largest ratio: {max(ratios, default=0):.2f}, allowed {MAX_RATIO}")
    return 0 if ratios and max(ratios) <= MAX_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
