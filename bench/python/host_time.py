"""Microseconds of host time from a Python call to the backend's first work, by layer of the way, on the CPU.

    python bench/python/host_time.py [--repeats 40] [--calls 200] [--json FILE]

Sequences have no tokens: the library validates a call, chooses the backend and returns, so that nothing is computed
(a decode step has one token). Each row is the way from there inwards; the difference to the row below is what its layer
costs. One thread, the least of the repeats, taking turns; each is the mean of that many calls.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.autograd import Function

import nsa
import nsa.serving
from nsa._registration import call, ops

sys.path.insert(0, str(Path(__file__).parents[1]))
from options import integer


class Nothing(Function):
    """An empty autograd node with eight inputs: torch's own overhead."""

    @staticmethod
    def forward(ctx, *tensors):
        return tensors[0].new_empty(tensors[0].shape)

    @staticmethod
    def backward(ctx, d_out):
        return (d_out,) * 8


def tensors(tokens, grad):
    """q, k, v, gates, k_c, v_c."""
    shapes = ((tokens, 2, 16), (tokens, 1, 16), (tokens, 1, 16), (tokens, 2, 3), (0, 1, 16), (0, 1, 16))
    return [torch.rand(1, *shape, requires_grad=grad) for shape in shapes]


def ways():
    """Names and calls, from the outermost layer inwards."""
    cfg, settings = nsa.NSAConfig(), ([32, 16, 64, 16, 1, 2, 512], None)
    q, k, v, gates, k_c, v_c = tensors(0, False)
    phi = ("mean", None, None, None, None, None)
    whole = (q, k, v, k, v, k, v, gates)
    rest = (None, None, 0, 0, None)
    layer_arguments = (*whole, *phi, *phi, *settings, None, None, 0.0, 0, *rest, False, False, False)
    attention_arguments = (q, k_c, v_c, k, v, k, v, gates, *settings, 0.0, 0, *rest, False, False)
    operators = {
        "native_sparse_attention": (lambda f: lambda: f(q, k, v, gates, cfg=cfg), layer_arguments),
        "nsa_attention": (lambda f: lambda: f(q, k, v, gates, k_c=k_c, v_c=v_c, cfg=cfg), attention_arguments),
    }
    found = {}
    for name, (with_arguments, arguments) in operators.items():
        function, operator = getattr(nsa, name), getattr(ops, name)
        found[f"{name}"] = with_arguments(function)
        found[f"{name}: without checks of types"] = with_arguments(function.__wrapped__)
        found[f"{name}: the operator, as eager code calls it"] = lambda o=operator, a=arguments: call(o, *a)
        found[f"{name}: the operator's kernel"] = lambda o=operator.default, a=arguments: below(o, a)
    leaves = tensors(0, True)
    d_o = torch.rand(1, 0, 2, 16)

    def attend():
        return nsa.native_sparse_attention(*leaves[:4], cfg=cfg)

    def attend_compressed():
        return nsa.nsa_attention(*leaves[:4], k_c=leaves[4], v_c=leaves[5], cfg=cfg)

    eight = [tensors(0, True)[0] for _ in range(8)]
    for name, forward, inputs in (
        ("native_sparse_attention", attend, leaves[:4]),
        ("nsa_attention", attend_compressed, leaves),
    ):
        found[f"{name}, gradients"] = forward
        found[f"{name}, gradients and backward"] = lambda f=forward, i=inputs: torch.autograd.grad(f(), i, d_o)
    found["autograd.Function without work"] = lambda: Nothing.apply(*eight)
    found["autograd.Function without work, and backward"] = lambda: torch.autograd.grad(
        Nothing.apply(*eight), eight, d_o
    )
    found["decode"] = step(cfg)
    found["decode_paged"] = paged_step(cfg)
    return found


def below(operator, arguments):
    """Past torch.library's autograd."""
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def step(cfg):
    """A decode step of one idle row: nothing is read, written or attended to."""
    cache = nsa.KVCache(1, 1, 16, cfg=cfg, max_length=64)
    cache.reserve(1)
    q, k, v, gates, *_ = tensors(1, False)
    idle = torch.zeros(1, dtype=torch.int32)
    return lambda: nsa.decode(q, k, v, gates, cache, num_new=idle)


def paged_step(cfg):
    """A step of an engine's layer with one row of padding; its scheduler made the rest."""
    layer = nsa.serving.allocate(cfg, 1, 16, page_size=64, num_pages=1, num_pages_c=1, num_slots=1)
    q, k, v, gates = (t[0] for t in tensors(1, False)[:4])
    table = torch.zeros(1, 1, dtype=torch.int32)
    rest = {"query_start_loc": torch.zeros(2, dtype=torch.int32), "seq_lens": torch.zeros(1, dtype=torch.int32)}
    rest |= {"block_table": table, "block_table_c": table, "overflow": torch.zeros(1, dtype=torch.int32)}
    out = torch.empty_like(q)
    return lambda: nsa.serving.decode_paged(q, k, v, gates, layer, cfg=cfg, out=out, **rest)


def measure(found, repeats, calls):
    """The least microseconds of each, taking turns."""
    best = dict.fromkeys(found, float("inf"))
    for _ in range(repeats):
        for name, work in found.items():
            begin = time.perf_counter()
            for _ in range(calls):
                work()
            best[name] = min(best[name], 1e6 * (time.perf_counter() - begin) / calls)
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=integer, default=40)
    parser.add_argument("--calls", type=integer, default=200)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    times = measure(ways(), options.repeats, options.calls)
    for name, microseconds in times.items():
        print(f"{name:<62} {microseconds:8.2f}")
    if options.json:
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        commit = os.environ.get("COMMIT") or subprocess.run(git, capture_output=True, text=True).stdout.strip()
        about = {
            "command": f"bench/python/host_time.py --repeats {options.repeats} --calls {options.calls}",
            "commit": commit,
        }
        about |= {"date": f"{datetime.date.today()}", "torch": torch.__version__, "python": platform.python_version()}
        options.json.write_text(json.dumps(about | {"unit": "microseconds", "times": times}, indent=1) + "\n")


if __name__ == "__main__":
    main()
