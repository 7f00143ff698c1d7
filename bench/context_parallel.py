#!/usr/bin/env python3
"""What each rank of a context-parallel sequence has to compute, played by one device, rank after rank.

    python bench/context_parallel.py --play 8 --tokens 1048576 --json played.json
    python bench/context_parallel.py --play 4 --tokens 4096 --heads 4 --kv-heads 2 --device cpu --dtype float32

A rank's part is one `nsa.nsa_attention` forward and backward for each of its chunks, with keys, values and compressed
keys [:, :end of the chunk] there already: no collective, no compression and no sum of gradients is in these times.
Inputs are random and batch 1. A warm-up call of every chunk comes first; of --repeats the medians count. GPU times are
between two events, and peak memory is torch's, keys and values of the whole included.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

import nsa
from nsa.parallel.layout import LAYOUTS, chunk_owners, divide

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def arguments():
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--play", type=int, required=True, metavar="N", help="ranks to play")
    parser.add_argument("--tokens", type=int, default=2**20, help="of the whole sequence (default %(default)s)")
    parser.add_argument("--layout", choices=LAYOUTS, default="head_tail")
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128, help="of keys and of values (default %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="*", help="play these only (default: all)")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    for name in ("play", "tokens", "heads", "kv_heads", "head_dim", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 1")
    if not options.ranks:
        options.ranks = list(range(options.play))
    if not all(0 <= rank < options.play for rank in options.ranks):
        parser.error(f"--ranks {options.ranks}: must be in 0 ... {options.play - 1}")
    return parser, options


def timed(device, function):
    """The result, and milliseconds."""
    if device.type != "cuda":
        begin = time.perf_counter()
        result = function()
        return result, 1000 * (time.perf_counter() - begin)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    result = function()
    end.record()
    end.synchronize()
    return result, start.elapsed_time(end)


def play(chunk, whole, queries, device):
    """Milliseconds of a chunk's forward and backward."""
    begin, end = chunk.rows
    q, gates, d_o = (t[:, : end - begin] for t in queries)
    k, v = (t[:, :end].detach().requires_grad_() for t in whole[:2])
    k_c, v_c = (t[:, : chunk.seen_blocks].detach().requires_grad_() for t in whole[2:])
    inputs = [q.detach().requires_grad_(), k, v, gates.detach().requires_grad_(), k_c, v_c]
    o, forward = timed(device, lambda: nsa.nsa_attention(*inputs[:4], k_c=k_c, v_c=v_c))
    _, backward = timed(device, lambda: torch.autograd.grad(o, inputs, d_o))
    return forward, backward


def main():
    """Plays the ranks and prints a line for each."""
    parser, options = arguments()
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    try:
        owners = chunk_owners(options.layout, options.play, None)
        chunks = divide(options.tokens, len(owners), nsa.NSAConfig(), None)
    except ValueError as error:
        parser.error(str(error))
    torch.manual_seed(0)

    def random(rows, heads, width):
        return torch.randn(1, rows, heads, width, device=device, dtype=dtype)

    size, dim = chunks[0].rows[1], options.head_dim
    k, v = (random(options.tokens, options.kv_heads, dim) for _ in range(2))
    whole = [k, v, *(nsa.compress(t, nsa.CompressionWeights("mean"), nsa.NSAConfig()) for t in (k, v))]
    gates = random(size, options.heads, 3).sigmoid()
    queries = [random(size, options.heads, dim), gates, random(size, options.heads, dim)]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}: {options.tokens} tokens, {options.play} ranks, {options.layout}, chunks of {size}, {options.dtype}")
    print(f"{'rank':>4} {'chunks':<16} {'forward ms':>11} {'backward ms':>12} {'peak GiB':>9}")
    ranks = []
    for rank in options.ranks:
        own = [i for i, owner in enumerate(owners) if owner == rank]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        sums = [0.0, 0.0]
        for i in own:
            play(chunks[i], whole, queries, device)
            times = [play(chunks[i], whole, queries, device) for _ in range(options.repeats)]
            for which in (0, 1):
                sums[which] += statistics.median(t[which] for t in times)
        peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
        ranks.append({"rank": rank, "chunks": own, "forward_ms": sums[0], "backward_ms": sums[1], "peak_gib": peak})
        shown = "-" if peak is None else f"{peak:.1f}"
        print(f"{rank:>4} {own!s:<16} {sums[0]:>11.1f} {sums[1]:>12.1f} {shown:>9}", flush=True)
    for which in ("forward_ms", "backward_ms"):
        times = [rank[which] for rank in ranks]
        print(f"{which}: slowest {max(times):.1f}, slowest / mean {max(times) / statistics.mean(times):.3f}")
    if options.json:
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        options.json.write_text(json.dumps({**settings, "device_name": name, "played": ranks}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
