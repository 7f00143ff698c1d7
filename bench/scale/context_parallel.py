#!/usr/bin/env python3
"""Times context parallelism: the ranks of torchrun, or ranks that one device simulates one after the other.

    torchrun --nproc-per-node 2 bench/scale/context_parallel.py --tokens 65536,262144,1048576 --json ranks.json
    torchrun --nproc-per-node 2 bench/scale/context_parallel.py --at-once 4,1,2 --tokens 65536,524288 --json heads.json
    torchrun --nproc-per-node 2 bench/scale/context_parallel.py --bits 20 --chunks 16 --tokens 65536 --json bits.json
    python bench/scale/context_parallel.py --simulated-ranks 8 --tokens 1048576 --json simulated.json
    python bench/scale/context_parallel.py --simulated-ranks 4 --tokens 4096 --heads 4 --kv-heads 2 --device cpu \
        --dtype float32

Inputs are random and batch 1; phi is the mean, and all branches have the same keys and values. GPU times are between
two events, and peak memory is torch's.

Under torchrun a row is a length, a layout and a number of KV heads that are gathered at once: forward and backward of
`nsa.parallel.native_sparse_attention`, the medians of --repeats on the slowest rank, fewer where they take more than
three seconds, and how long the device waits for collectives in them, the slower rank included (waited_ms). both_ms is
forward and backward of the same rank together. Rows of head_tail also have:
- attention_alone: the rank's `nsa_attention` calls with all keys local. The rest of the end-to-end time counts as
  exposed communication: collectives, but also compression, copies and sums.
Rows of all KV heads at once also have:
- recomputed_backward_ms: a backward that runs the forward again (activation checkpointing).
- alone: each device with the global sequence, up to --alone tokens; vs_one_gpu: difference of the results.
- sampled: --rows queries of each chunk compared with float64 (sampled_rows.py).
Where the default on a GPU is another number of KV heads, it has a row. The longest sequence has a row of the other
layout too, and one of single KV heads. Rows that do not fit into memory or into --seconds are
listed in not_run. Results are written after each row; the exit code is 1 where one is out of bounds.

With --at-once each length has a row for each of these numbers of KV heads, in head_tail, with attention_alone of calls
of as many heads, and whether the results have the bits of the first row (same_bits).

With --bits RUNS the results of as many runs are compared bit by bit, and with one rank's of as many --chunks, in both
layouts; on GPUs in bfloat16 and float16.

A simulated rank calls the forward and backward of `nsa.nsa_attention` for each of its chunks. Keys, values and
compressed keys up to the end of the chunk are given: the times contain no collective, compression or sum of gradients.
Each chunk has one warm-up call; times are the medians of --repeats calls.
"""

import argparse
import json
import os
import statistics
import sys
from functools import partial
from pathlib import Path

import torch

import nsa
from nsa.parallel.layout import LAYOUTS, chunk_owners, divide
from timing import DTYPES, device_name, median_of, time_chunk

sys.path.insert(0, str(Path(__file__).parents[1]))
from options import amount, integer, integers


def arguments():
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--simulated-ranks", type=integer, metavar="N", help="ranks to simulate on one device (default: run torchrun's)"
    )
    parser.add_argument(
        "--tokens", type=integers, default=str(2**20), help="sequence lengths, tokens (default %(default)s)"
    )
    parser.add_argument(
        "--layout", choices=LAYOUTS, default="head_tail", help="layout of simulated ranks (default %(default)s)"
    )
    parser.add_argument("--heads", type=integer, default=64)
    parser.add_argument("--kv-heads", type=integer, default=4)
    parser.add_argument(
        "--head-dim", type=integer, default=128, help="head dimension of keys and values (default %(default)s)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=integer, default=5)
    parser.add_argument(
        "--ranks", type=partial(integer, least=0), nargs="*", help="simulated ranks to time (default: all)"
    )
    parser.add_argument(
        "--alone",
        type=partial(integer, least=0),
        default=2**19,
        help="maximum length that one device runs too, tokens (%(default)s)",
    )
    parser.add_argument(
        "--rows",
        type=partial(integer, least=0),
        default=4,
        help="queries per chunk to compare with float64 (default %(default)s; 0: none)",
    )
    parser.add_argument(
        "--seconds",
        type=amount,
        default=600,
        help="time limit after which no row starts, seconds (default %(default)s)",
    )
    parser.add_argument(
        "--at-once",
        type=integers,
        default=[],
        metavar="N,N",
        help="numbers of KV heads gathered at once, a row for each",
    )
    parser.add_argument(
        "--bits",
        type=partial(integer, least=0),
        default=0,
        metavar="RUNS",
        help="number of runs whose bits are compared",
    )
    parser.add_argument("--chunks", type=integer, default=16, help="number of chunks in --bits (default %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    for at_once in options.at_once:
        if options.kv_heads % at_once:
            parser.error(f"--at-once {at_once}: must divide the {options.kv_heads} KV heads")
    if options.simulated_ranks is None and "RANK" not in os.environ:
        parser.error("--simulated-ranks: must be given where torchrun does not start the ranks")
    if options.simulated_ranks is None:
        return parser, options
    if len(options.tokens) > 1:
        parser.error("--tokens: must be one length with --simulated-ranks")
    (options.tokens,) = options.tokens
    if not options.ranks:
        options.ranks = list(range(options.simulated_ranks))
    if not all(0 <= rank < options.simulated_ranks for rank in options.ranks):
        parser.error(f"--ranks {options.ranks}: must be in 0 ... {options.simulated_ranks - 1}")
    return parser, options


def simulate_ranks(parser, options):
    """Times each simulated rank and prints a line for it."""
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    try:
        owners = chunk_owners(options.layout, options.simulated_ranks, None)
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
    name = device_name(device)
    settings = f"{options.tokens} tokens, {options.simulated_ranks} ranks, {options.layout}, chunks of {size}"
    print(f"{name}: {settings}, {options.dtype}")
    print(f"{'rank':>4} {'chunks':<16} {'forward ms':>11} {'backward ms':>12} {'peak GiB':>9}")
    ranks = []
    for rank in options.ranks:
        own = [i for i, owner in enumerate(owners) if owner == rank]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        sums = [0.0, 0.0]
        for i in own:
            medians = median_of(partial(time_chunk, chunks[i], whole, queries, device), options.repeats)
            sums = [total + one for total, one in zip(sums, medians, strict=True)]
        peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
        ranks.append({"rank": rank, "chunks": own, "forward_ms": sums[0], "backward_ms": sums[1], "peak_gib": peak})
        shown = "-" if peak is None else f"{peak:.1f}"
        print(f"{rank:>4} {own!s:<16} {sums[0]:>11.1f} {sums[1]:>12.1f} {shown:>9}", flush=True)
    for which in ("forward_ms", "backward_ms"):
        times = [rank[which] for rank in ranks]
        print(f"{which}: slowest {max(times):.1f}, slowest / mean {max(times) / statistics.mean(times):.3f}")
    if options.json:
        names = (
            "simulated_ranks",
            "tokens",
            "layout",
            "heads",
            "kv_heads",
            "head_dim",
            "dtype",
            "device",
            "repeats",
            "ranks",
        )
        settings = {key: getattr(options, key) for key in names}
        options.json.write_text(json.dumps({**settings, "device_name": name, "times": ranks}, indent=1) + "\n")
    return 0


def main():
    """Simulates ranks, or runs as one of torchrun's."""
    parser, options = arguments()
    if options.simulated_ranks is not None:
        return simulate_ranks(parser, options)
    import context_ranks

    return context_ranks.main(options)


if __name__ == "__main__":
    sys.exit(main())
