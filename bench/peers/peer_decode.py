"""Times flash_nsa's decode step on a GPU, to compare with bench/gpu/cuda_decode.cu.

    python bench/peers/peer_decode.py FOLDER --steps 32x65536,1x65536 --json FILE

FOLDER holds github.com/mdy666/Scalable-Flash-Native-Sparse-Attention. It needs the packages triton and einops.

H = 64, Hkv = 4, D = 128, bfloat16, default hyperparameters, pages of 128 that are shuffled, compression by the mean,
which is all that it has. The lengths are those of --steps and stand still; for multiples of the stride every replay
completes a compression block of each sequence, for which it reads 32 tokens. Medians of replays of a graph in
microseconds; before each 192 MB are read. The host waits for no replay, so that it is ahead. Before all of it the
output is compared with float32 in plain torch.
"""

import argparse
import importlib
import json
import statistics
import sys
from pathlib import Path

import torch

from peers import BLOCK, INIT, KERNEL, LOCAL, STRIDE, TOPN, WINDOW, FlashNsa, Problem

PROBLEM = Problem(64, 4, 128, 128)
PAGE = 128
REPLAYS = 48
CONTEXTS = (65536, 32768, 8192, 16384, 131072, 262144)
CHECKED = 2, 2048  # sequences, tokens
BOUND = 5e-3  # of the relative error of bfloat16 and of scores in float16


def numbered(pages, count):
    """Pool slots of tokens 0 ... count - 1, (B, count)."""
    token = torch.arange(count, device=pages.device)
    return pages.long()[:, token // PAGE] * PAGE + token % PAGE


class Step:
    """One token of `batch` sequences that have `length` with it."""

    def __init__(self, batch, length):
        heads, kv_heads, dim, _ = PROBLEM
        self.length, self.compressed = length, (length - KERNEL) // STRIDE + 1
        counts = -(-length // PAGE), -(-self.compressed // PAGE)
        pages = torch.randperm(batch * sum(counts), device="cuda").int().view(batch, -1)
        self.pages, self.compressed_pages = (t.contiguous() for t in pages.split(counts, 1))

        def normal(*shape):
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        self.k, self.v = (normal(pages.numel(), PAGE, kv_heads, dim) for _ in range(2))
        for cache in (self.k, self.v):
            rows = cache.flatten(0, 1)
            for to, tokens in zip(numbered(self.compressed_pages, self.compressed), self.tokens(cache), strict=True):
                rows[to] = tokens.unfold(0, KERNEL, STRIDE).float().mean(-1).bfloat16()
        self.q, self.gates = normal(batch, heads, dim), normal(batch, heads, 3)
        self.lengths = torch.full((batch,), length, device="cuda", dtype=torch.int32)
        none = torch.full((batch,), -1, device="cuda", dtype=torch.int32)
        completes = (length - KERNEL) % STRIDE == 0
        self.new_slots = numbered(self.compressed_pages, self.compressed)[:, -1].int() if completes else none
        self.decode = importlib.import_module("flash_nsa.inference").nsa_decode

    def tokens(self, cache):
        """(B, tokens, heads, D)."""
        return cache.flatten(0, 1)[numbered(self.pages, self.length)]

    def run(self):
        return self.decode(
            self.q,
            self.k,
            self.v,
            self.gates,
            self.lengths,
            self.pages,
            self.new_slots,
            self.compressed_pages,
            fixed_y_maxlen=self.length // STRIDE,
            fixed_num_slc_blocks=-(-self.length // BLOCK),
            kernel_size=KERNEL,
            stride=STRIDE,
            block_size=BLOCK,
            top_n=TOPN,
            num_init_blocks=INIT,
            num_local_blocks=LOCAL,
            window_size=WINDOW,
            sm_scale=PROBLEM.scale,
        )

    def reference(self):
        """In float32. Its window has WINDOW + 1 tokens."""
        q = self.q.float().unflatten(1, (PROBLEM.kv_heads, -1))

        def attend(k, v, seen):
            scores = torch.einsum("bkgd,bnkd->bkgn", q, k.float()) * PROBLEM.scale
            shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            return torch.einsum("bkgn,bnkd->bkgd", shares, v.float()).flatten(1, 2), shares

        k, v = self.tokens(self.k), self.tokens(self.v)
        at = numbered(self.compressed_pages, self.compressed)
        everything = torch.ones((), device="cuda", dtype=torch.bool)
        o_cmp, shares = attend(self.k.flatten(0, 1)[at], self.v.flatten(0, 1)[at], everything)
        token = torch.arange(self.length, device="cuda")
        begin = torch.arange(self.compressed, device="cuda") * STRIDE
        block = torch.arange(-(-self.length // BLOCK), device="cuda") * BLOCK
        # Of how many strides of a compression block lie in a selection block.
        first = (begin[:, None, None] + torch.arange(0, KERNEL, STRIDE, device="cuda")[:, None]) // BLOCK * BLOCK
        score = shares.sum(2) @ (first == block).sum(1).float()
        score[..., :INIT] = score[..., len(block) - LOCAL :] = torch.inf
        chosen = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, score.topk(min(TOPN, len(block))).indices, True)
        o_slc, _ = attend(k, v, chosen[..., token // BLOCK][:, :, None])
        o_swa, _ = attend(k, v, token >= self.length - 1 - WINDOW)
        gates = self.gates.float().sigmoid()
        return sum(gates[..., i, None] * o for i, o in enumerate((o_cmp, o_slc, o_swa)))

    def time(self):
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()  # tables and caches are there
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        other = torch.zeros(48 << 20, device="cuda")
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)]
        for begin, end in marks:
            other.sum()
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(1000 * begin.elapsed_time(end) for begin, end in marks)


def sizes(text):
    pairs = [tuple(int(number) for number in pair.split("x")) for pair in text.split(",")]
    if any(len(pair) != 2 or pair[0] < 1 or pair[1] <= KERNEL for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text}: SEQUENCESxTOKENS, from 1 and {KERNEL + 1} on, with commas")
    return pairs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--steps",
        type=sizes,
        default=",".join(f"{batch}x{context}" for context in CONTEXTS for batch in (32, 1, 8)),
        help="steps as SEQUENCESxTOKENS, comma-separated (default: 32, 1 and 8 of 8192 ... 262144)",
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    if not (options.folder / "flash_nsa" / "inference").is_dir():
        parser.error(f"{options.folder}: must hold flash_nsa/inference")
    commit = options.folder / "COMMIT"
    FlashNsa(options.folder, PROBLEM)
    torch.manual_seed(0)
    checked = Step(*CHECKED)
    expected = checked.reference()
    apart = ((checked.run() - expected).norm() / expected.norm()).item()
    if not apart < BOUND:
        sys.exit(f"flash_nsa: {apart:.4f} apart from float32, at most {BOUND}")
    result = {"problem": "H=64 Hkv=4 D=128 bfloat16, means, pages of 128", "unit": "us", "apart": apart, "steps": []}
    result |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    result |= {"flash_nsa": commit.read_text().strip()} if commit.exists() else {}
    for batch, context in options.steps:
        us = Step(batch, context).time()
        torch.cuda.empty_cache()
        print(f"{batch:3} x {context:6} {us:.1f} us", flush=True)
        result["steps"].append({"batch": batch, "context": context, "us": us})
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
