"""libnsa and torch share one OpenMP runtime, and so one pool of threads."""

import os
import subprocess
import sys

import pytest
import torch

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


FORKED = """
import os, torch, nsa

torch.set_num_threads(3)
q, k, v = torch.randn(1, 512, 4, 16), torch.randn(1, 512, 1, 16), torch.randn(1, 512, 1, 16)
gates = torch.rand(1, 512, 4, 3)
cfg = nsa.NSAConfig(kernel_size=8, kernel_stride=4, block_size=16, topk=4, window_size=20)

def call():
    inputs = [t.clone().requires_grad_() for t in (q, k, v, gates)]
    o = nsa.native_sparse_attention(*inputs, cfg=cfg)
    return [o, *torch.autograd.grad(o, inputs, torch.ones_like(o))]

def matches():
    return all(torch.equal(a, b) for a, b in zip(call(), expected, strict=True))

expected = call()
torch.randn(1 << 20).exp_()  # torch has used the pool, too
child = os.fork()
if child == 0:
    os._exit(0 if matches() and matches() else 1)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), matches())
"""


@pytest.mark.bits
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_that_fork_made_computes_the_same_bits():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "True"]


FLUSHED = """
import torch, nsa

q, k = torch.randn(1, 512, 4, 16), torch.randn(1, 512, 1, 16)
v = 1e-20 * torch.randn(1, 512, 1, 16)
gates = torch.rand(1, 512, 4, 3)
cfg = nsa.NSAConfig(kernel_size=8, kernel_stride=4, block_size=16, topk=4, window_size=20)

def call(threads):
    torch.set_num_threads(threads)
    inputs = [t.clone().requires_grad_() for t in (q, k, v, gates)]
    o = nsa.native_sparse_attention(*inputs, cfg=cfg)
    results = [o, *torch.autograd.grad(o, inputs, torch.full_like(o, 1e-20))]
    return torch.cat([t.detach().flatten() for t in results]).view(torch.int32)  # in that mode 1e-40 equals 0

kept = call(3)  # starts the threads
assert torch.set_flush_denormal(True)
flushed = call(1)
assert not torch.equal(kept, flushed), "no subnormal number on the way"
for threads in (2, 3):
    assert torch.equal(call(threads), flushed), threads
torch.set_flush_denormal(False)
assert torch.equal(call(3), kept), "threads keep the mode"
"""


@pytest.mark.bits
@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="no such mode")
def test_threads_round_and_flush_as_their_caller():
    done = subprocess.run([sys.executable, "-c", FLUSHED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
