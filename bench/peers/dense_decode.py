"""Times one token of torch's dense attention on a GPU, to compare with bench/gpu/cuda_decode.cu.

    python bench/peers/dense_decode.py --contexts 8192,65536 --batch 32,8,1 --json FILE

H = 64, Hkv = 4, D = 128, bfloat16. Keys and values of a sequence are contiguous, which pages are not, and not copied
for the heads of a group: these are rows of one tile. Medians of replays of a graph in microseconds. Caches take turns
in a graph, so that none is in L2, and share its launch, where cuda_decode has one for each step.
The ways, of which the fastest counts:

    cudnn     cuDNN over all keys at once
    cudnnN    cuDNN over N splits of the keys, whose outputs torch merges
    flash     FlashAttention-2 with lengths on the device, which splits keys by itself
    flash3    FlashAttention-3 in the same way, where a package of it is installed
"""

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path

import torch

from dense import flash3_interface

sys.path.insert(0, str(Path(__file__).parents[1]))
from options import integers

HEADS, KV_HEADS, DIM = 64, 4, 128
TURNS = 256 << 20  # bytes of all caches
SPLITS = 4, 16, 64
WAYS = ["cudnn", *(f"cudnn{count}" for count in SPLITS), "flash", "flash3"]


def normal(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


class Step:
    """One token of `batch` sequences; consecutive steps use different caches."""

    def __init__(self, batch, context):
        self.batch, self.context = batch, context
        shape = (batch, context, KV_HEADS, DIM)
        self.caches = [
            (normal(*shape), normal(*shape)) for _ in range(-(-TURNS // (4 * batch * context * KV_HEADS * DIM)))
        ]
        self.q = normal(batch, KV_HEADS, HEADS // KV_HEADS, DIM)
        self.lengths = torch.full((batch,), context, device="cuda", dtype=torch.int32)
        self.first_query = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
        self.first_key = self.first_query * context

    def cudnn(self, k, v, count=1):
        parts = self.batch * count
        q = self.q if count == 1 else self.q.repeat_interleave(count, 0)
        k, v = (t.view(parts, self.context // count, KV_HEADS, DIM).transpose(1, 2) for t in (k, v))
        o, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, count > 1)[:2]
        if count == 1:
            return o
        shares = lse.view(self.batch, count, KV_HEADS, -1, 1).softmax(1)
        return (o.view(self.batch, count, KV_HEADS, -1, DIM) * shares).sum(1)

    def flash(self, k, v):
        q, k, v = self.q.flatten(1, 2), k.flatten(0, 1), v.flatten(0, 1)
        o = torch.ops.aten._flash_attention_forward(
            q, k, v, self.first_query, self.first_key, 1, self.context, 0.0, False, False, seqused_k=self.lengths
        )[0]
        return o.view_as(self.q)

    def flash3(self, k, v):
        o = flash3_interface().flash_attn_with_kvcache(
            self.q.flatten(1, 2)[:, None], k, v, cache_seqlens=self.lengths, causal=True
        )
        return (o[0] if isinstance(o, tuple) else o).view_as(self.q)

    def run(self, way, cache):
        if way.startswith("flash"):
            return getattr(self, way)(*cache)
        return self.cudnn(*cache, int(way.removeprefix("cudnn") or 1))

    def check(self):
        """All ways must give what the first one gives."""
        first = None
        for way in WAYS:
            try:
                o = self.run(way, self.caches[0]).float()
            except (RuntimeError, ImportError):
                continue
            first = o if first is None else first
            apart = (o - first).abs().max().item() / first.abs().max().item()
            if not apart < 0.02:
                raise SystemExit(f"{way}: {self.batch} x {self.context}: {apart:.3f} of the largest output apart")

    def time(self, way):
        """Microseconds of a call; None where torch refuses."""
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                self.run(way, self.caches[0])
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for cache in self.caches:
                    self.run(way, cache)
        except (RuntimeError, ImportError) as error:
            print(f"{way}: {str(error).splitlines()[0]}")
            return None
        times = []
        for _ in range(13):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1000 * begin.elapsed_time(end) / len(self.caches))
        return statistics.median(times[3:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=integers, default=[8192, 16384, 32768, 65536, 131072, 262144])
    parser.add_argument("--batch", type=integers, default=[32, 8, 1], help="numbers of sequences, comma-separated")
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    if any(context % SPLITS[-1] for context in options.contexts):
        parser.error(f"--contexts {options.contexts}: multiples of {SPLITS[-1]}, which is the most splits")
    result = {"problem": f"H={HEADS} Hkv={KV_HEADS} D={DIM} bfloat16, contiguous caches, torch {torch.__version__}"}
    result |= {"gpu": torch.cuda.get_device_name(), "unit": "us", "steps": []}
    for context, batch in itertools.product(options.contexts, options.batch):
        step = Step(batch, context)
        step.check()
        found = {way: step.time(way) for way in WAYS}
        del step
        torch.cuda.empty_cache()
        known = {way: us for way, us in found.items() if us}
        print(f"{batch:3} x {context:6}", *(f"{way} {us:.1f} us" for way, us in known.items()), flush=True)
        result["steps"].append({"batch": batch, "context": context, "us": found, "best": min(known, key=known.get)})
        if options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
