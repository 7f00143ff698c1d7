#!python
"""The command `nsa` that pip installs: runs the program that was built with the package, or that NSA_PROGRAM names."""

import importlib.util
import os
import sys
from pathlib import Path


def main() -> None:
    found = importlib.util.find_spec("nsa")  # imports neither the package nor torch
    built = Path(found.origin).parent / "bin" / "nsa" if found and found.origin else Path("bin/nsa")
    program = os.environ.get("NSA_PROGRAM") or str(built)
    try:
        os.execv(program, [program, *sys.argv[1:]])
    except OSError as error:
        sys.exit(
            f"nsa: {program}: {os.strerror(error.errno or 0)}; in a checkout, build the program into the package by "
            "`NSA_LM=1 pip install --no-build-isolation .`, or by `make program` and name it in NSA_PROGRAM"
        )


main()
