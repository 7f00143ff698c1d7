"""Compares a cache in fp8 with one in bfloat16 on a CPU: bytes, time of a step, and difference of the outputs.

Both hold the same normal values, with scale 1. The difference of the outputs is its norm over the norm with bfloat16:
with each one's block selection, and with the same blocks for both. Usage: fp8_cache.py [--threads N]
"""

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path

import torch

import nsa

sys.path.insert(0, str(Path(__file__).parents[1]))
from options import integer

HEADS, KV_HEADS, DIM, QUERIES = 64, 4, 128, 16
CFG = nsa.NSAConfig()
DTYPES = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def filled(dtype: torch.dtype, length: int) -> nsa.KVCache:
    cache = nsa.KVCache(1, KV_HEADS, DIM, cfg=CFG, max_length=length + QUERIES, dtype=dtype, raw_dtype=torch.bfloat16)
    draw = torch.Generator().manual_seed(1)
    for tensor in cache.tensors()[:8]:
        tensor.copy_(torch.randn(tensor.shape, generator=draw).bfloat16())
    return cache


def new_tokens(count: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    sizes = [(HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM), (HEADS, 3)]
    return [torch.randn(1, count, *size, generator=draw).bfloat16() for size in sizes]


def milliseconds(cache: nsa.KVCache, length: int, new: list[torch.Tensor]) -> list[float]:
    times = []
    for _ in range(200):
        cache.cache_seqlens.fill_(length)
        start = time.perf_counter()
        nsa.decode(*new, cache)
        times.append(1e3 * (time.perf_counter() - start))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=integer, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    for length in (8192, 65536):
        caches = {name: filled(dtype, length) for name, dtype in DTYPES.items()}
        times: dict[str, list[float]] = {name: [] for name in caches}
        for _, (name, cache) in itertools.product(range(5), caches.items()):  # in turns: the machine is not alone
            times[name] += milliseconds(cache, length, new_tokens(1))
        results = {}
        for name, cache in caches.items():
            cache.cache_seqlens.fill_(length)
            size = sum(t.numel() * t.element_size() for t in cache.tensors()[:8])
            results[name] = nsa.decode(*new_tokens(QUERIES), cache, return_indices=True)
            shown = f"least {min(times[name]):.2f} ms, median {statistics.median(times[name]):.2f} ms"
            print(f"{length} tokens, {name}: {size / 1e6:.1f} MB, a step of one token {shown}")
        (o, chosen), (own, chosen_own) = results.values()
        caches["fp8"].cache_seqlens.fill_(length)
        given = nsa.decode(*new_tokens(QUERIES), caches["fp8"], indices=chosen)
        same = (chosen[..., :, None] == chosen_own[..., None, :]).any(-1).float().mean()
        errors = ", ".join(f"{(x.float() - o.float()).norm() / o.float().norm():.4f}" for x in (own, given))
        print(f"  {QUERIES} queries: difference with its own blocks, with the same: {errors}; blocks alike {same:.4f}")


if __name__ == "__main__":
    main()
