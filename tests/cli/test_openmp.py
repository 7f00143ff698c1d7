"""The program loads one OpenMP runtime, for torch and libnsa alike."""

import subprocess

from conftest import PROGRAM


def test_one_runtime():
    loaded = subprocess.run(["ldd", PROGRAM], capture_output=True, text=True, check=True).stdout
    runtimes = {line.split("=>")[1].split()[0] for line in loaded.splitlines() if "omp" in line.split()[0]}
    assert len(runtimes) == 1, runtimes
