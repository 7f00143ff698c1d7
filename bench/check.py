#!/usr/bin/env python3
"""Compares a result of `nsa bench --json` with a stored one; exit code 1 if a row became slower.

    build/bin/nsa bench --dtype bfloat16 --json new.json
    python3 bench/check.py new.json bench/results/bench_bfloat16.json

A row is an operation at a length. Rows that only one of the files has are counted, extrapolated and disturbed ones are
left out. Results of another machine or of other settings are refused (exit code 2): their ratio says nothing of the
code.
"""

import argparse
import json
import sys
from pathlib import Path

# Of `machine` and `settings`, what may differ between two results that are compared.
FREE = {"repeats", "torch", "driver", "cuda", "cudnn"}


class Refused(Exception):
    """Files that cannot be compared."""


def read(path):
    """The result of nsa bench in a file."""
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{path}: {error}") from None
    if not isinstance(result, dict) or result.get("kind") != "nsa-bench":
        raise Refused(f"{path}: not a result of nsa bench --json")
    return result


def differences(new, old):
    """Differences of machine and settings, as text."""
    for part in ("machine", "settings"):
        for name in sorted((new[part].keys() | old[part].keys()) - FREE):
            values = new[part].get(name), old[part].get(name)
            if values[0] != values[1]:
                yield f"{name} = {values[0]}, stored {values[1]}"


def rows(result):
    """Seconds by (operation, variant, length, the stage's whole) of the rows that were measured undisturbed."""
    return {
        (row["op"], row["variant"], row["length"], row.get("part_of", "")): row["seconds"]
        for row in result["results"]
        if row["judged"] and not row["extrapolated"]
    }


def compare(new_path, old_path, tolerance):
    """Prints old, new and ratio of each row; returns how many are slower."""
    new, old = read(new_path), read(old_path)
    others = list(differences(new, old))
    if others:
        raise Refused(f"{new_path}: not comparable: {'; '.join(others)}")
    times, stored = rows(new), rows(old)
    common = [row for row in stored if row in times]
    if not common:
        raise Refused(f"{new_path}: no row in common with {old_path}")
    slower = 0
    print(f"{'operation':42} {'length':>8} {'old ms':>12} {'new ms':>12} {'new/old':>8}")
    for row in common:
        op, variant, length, whole = row
        ratio = times[row] / stored[row]
        mark = "  slower" if ratio > 1 + tolerance / 100 else ""
        slower += bool(mark)
        name = " ".join(filter(None, (f"{whole} |" if whole else "", op, variant)))
        print(f"{name:42} {length:8} {stored[row] * 1e3:12.3f} {times[row] * 1e3:12.3f} {ratio:8.2f}{mark}")
    alone = len(times) + len(stored) - 2 * len(common)
    print(f"{len(common)} rows, {slower} slower by more than {tolerance:g} %; {alone} in one file only")
    return slower


def main():
    """Reads the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("new", help="result of nsa bench --json")
    parser.add_argument("old", help="stored result, a bench_*.json of bench/results")
    parser.add_argument("--tolerance", type=float, default=10, help="percent that a row may be slower (%(default)g)")
    arguments = parser.parse_args()
    if not arguments.tolerance >= 0:
        parser.error(f"--tolerance = {arguments.tolerance:g}: must be at least 0")
    try:
        return 1 if compare(arguments.new, arguments.old, arguments.tolerance) else 0
    except Refused as refused:
        print(refused, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
