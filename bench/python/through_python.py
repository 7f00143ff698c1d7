#!/usr/bin/env python3
"""Overhead of calling attention from Python rather than C++, on one GPU.

    python bench/python/through_python.py --stages build-gpu/bin/cuda_stages --json bench/results/through_python.json

Compares `nsa.nsa_attention` and its gradients with bench/gpu/cuda_stages.cu end to end: B = 1, H = 64, Hkv = 4, D =
128, bfloat16, defaults, given model-like blocks. L2 is flushed before each call. In mode `busy` the device has more
than a millisecond of queued work, so host time does not count. In mode `idle` the host first waits for the device, so
its time until the first launch counts. Times are medians between two events. C++ and Python alternate; the result is
the median of the rounds.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import nsa

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = str(ROOT / "bench"), str(ROOT / "bench" / "peers")

from options import integer, integers  # noqa: E402

from peers import PROGRAM, commit_of, given_blocks  # noqa: E402

HEADS, KV_HEADS, DIM = 64, 4, 128
PATTERN = "model-like"
WAYS = ("busy", "idle")


class Through:
    """Calls through Python of one length."""

    def __init__(self, program, length, flush):
        torch.manual_seed(0)
        blocks = nsa.NSAConfig().num_compressed(length)

        def leaf(rows, heads, dim=DIM):
            return torch.randn(1, rows, heads, dim, device="cuda").to(torch.bfloat16).requires_grad_()

        gates = torch.rand(1, length, HEADS, 3, device="cuda").to(torch.bfloat16).requires_grad_()
        self.positional = [leaf(length, HEADS), leaf(length, KV_HEADS), leaf(length, KV_HEADS), gates]
        self.named = {name: leaf(blocks, KV_HEADS) for name in ("k_c", "v_c")}
        self.named |= {name: leaf(length, KV_HEADS) for name in ("k_swa", "v_swa")}
        self.leaves = [*self.positional, *self.named.values()]
        self.indices = given_blocks(program, PATTERN, length, KV_HEADS)[0][None].cuda()
        self.d_o = torch.randn(1, length, HEADS, DIM, device="cuda").to(torch.bfloat16)
        self.flush = flush

    def call(self, way):
        """Milliseconds of the forward, of the backward, of both."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        for _ in range(16 if way == "busy" else 1):
            self.flush.zero_()
        if way == "idle":
            torch.cuda.synchronize()
        events[0].record()
        o = nsa.nsa_attention(*self.positional, **self.named, indices=self.indices)
        events[1].record()
        torch.autograd.grad(o, self.leaves, self.d_o)
        events[2].record()
        torch.cuda.synchronize()
        return tuple(events[a].elapsed_time(events[b]) for a, b in ((0, 1), (1, 2), (0, 2)))

    def medians(self, way, repeats):
        self.call(way), self.call(way)
        return [statistics.median(times) for times in zip(*(self.call(way) for _ in range(repeats)), strict=True)]


def through_cpp(program, lengths, way):
    """{length: [forward, backward, both]} of cuda_stages, which times the two apart."""
    options = ["--idle"] if way == "idle" else []
    command = [program, *options, "--only", "nsa_attention", *map(str, lengths)]
    found, rows = {}, {}
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if head := re.match(r"S = (\d+)", line):
            rows = found.setdefault(int(head[1]), {})
        elif row := re.match(r"  (\S.*?) +([0-9.]+) ms +workspace", line):
            rows[row[1]] = float(row[2])
    both = {
        length: [r[f"{name}, {PATTERN}"] for name in ("nsa_attention", "nsa_attention backward")]
        for length, r in found.items()
    }
    return {length: [*pair, sum(pair)] for length, pair in both.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--stages", type=Path, required=True, metavar="PROGRAM", help="built program of bench/gpu/cuda_stages.cu"
    )
    parser.add_argument("--program", type=Path, default=PROGRAM, help="the program nsa, which chooses the blocks")
    parser.add_argument("--lengths", type=integers, default="4096,8192,65536")
    parser.add_argument("--repeats", type=integer, default=15, help="calls from Python in a round")
    parser.add_argument("--turns", type=integer, default=3)
    parser.add_argument("--json", type=Path, help="file for the results, rewritten after every round")
    options = parser.parse_args()
    if not options.program.is_file():
        parser.error(f"--program: there is no file {options.program}")
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing to time")
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu, driver = subprocess.check_output(query, text=True).splitlines()[0].split(", ")
    about = {
        "gpu": gpu,
        "driver": driver,
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": os.environ.get("COMMIT") or commit_of(ROOT),
        "torch": torch.__version__,
        "problem": f"B = 1, H = {HEADS}, Hkv = {KV_HEADS}, D = {DIM}, bfloat16, defaults, {PATTERN} blocks",
        "unit": "ms",
    }
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    found = {length: {way: {"cpp": [], "python": []} for way in WAYS} for length in options.lengths}
    for turn in range(options.turns):
        for way in WAYS:
            for length, times in through_cpp(options.stages, options.lengths, way).items():
                found[length][way]["cpp"].append(times)
        for length in options.lengths:
            calls = Through(options.program, length, flush)
            for way in WAYS:
                found[length][way]["python"].append(calls.medians(way, options.repeats))
            del calls
            torch.cuda.empty_cache()
        print(f"turn {turn + 1}: forward, backward, both in ms")
        rows = {}
        for length, ways in found.items():
            for way, turns in ways.items():
                cpp, python = ([statistics.median(t) for t in zip(*turns[k], strict=True)] for k in ("cpp", "python"))
                row = {"cpp": cpp, "python": python, "ratio": python[2] / cpp[2]}
                rows.setdefault(length, {})[way] = row
                texts = (" ".join(f"{ms:7.3f}" for ms in times) for times in (cpp, python))
                print(f"  {length:6} {way}: C++ {next(texts)}, Python {next(texts)}, ratio {row['ratio']:.3f}")
        sys.stdout.flush()
        if options.json:
            options.json.write_text(json.dumps({**about, "lengths": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
