"""`python -m nsa`: what a report of a bug needs. With arguments: the program `nsa`, which then reads tokenizer.json."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

from . import __version__, describe_backends
from ._registration import _LIBRARY, ops


def installed(name: str) -> str:
    """The version of a package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def main() -> None:
    """Prints the report, or runs the program."""
    if len(sys.argv) > 1:
        from .train import run_program

        run_program(sys.argv[1:])
    print(f"nsa {__version__} ({_LIBRARY})")
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}, threads {torch.get_num_threads()}")
    print(f"transformers {installed('transformers')}")
    print(f"Python {platform.python_version()}, {platform.platform()}")
    print("\nBackends")
    print(describe_backends())
    print("\nInstruction sets")
    print(ops.describe_instruction_sets().rstrip())
    print("\nCUDA devices")
    print(ops.describe_devices().rstrip())
    print("\nEnvironment")
    own = sorted((n, v) for n, v in os.environ.items() if n.startswith(("NSA_", "OMP_", "CUDA_VISIBLE")))
    print("\n".join(f"{name}={value}" for name, value in own) or "nothing is set")


if __name__ == "__main__":
    main()
