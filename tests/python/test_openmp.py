"""libnsa and torch share one OpenMP runtime, and so one pool of threads."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, nsa, torch

def threads():
    return len(os.listdir("/proc/self/task"))

def parallel_torch():
    torch.randn(1 << 22).exp_().sum()

def parallel_nsa():
    q, k, v = torch.randn(1, 512, 4, 64), torch.randn(1, 512, 1, 64), torch.randn(1, 512, 1, 64)
    nsa.sliding_window_attention(q, k, v, window_size=64)

torch.set_num_threads(3)
start = threads()
parallel_torch()
with_torch = threads()
parallel_nsa()
parallel_torch()
maps = open("/proc/self/maps").read().split()
runtimes = {name for name in maps if "libgomp" in name or "libomp" in name or "libiomp" in name}
print(len(runtimes), with_torch - start, threads() - start)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="reads /proc")
def test_one_runtime_and_one_pool():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    runtimes, with_torch, with_both = map(int, done.stdout.split())
    assert runtimes == 1
    assert with_torch == 2, "set_num_threads(3) adds two threads"
    assert with_both == with_torch, "libnsa runs on the threads that torch started"
