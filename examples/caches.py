"""Generation with a KVCache: a prompt in chunks, steps, fork, rollback, rows of different lengths.

After any of these operations the results equal those of the layer over the full sequence.

    python examples/caches.py
"""

import torch
from torch import Tensor

import nsa

CFG = nsa.NSAConfig(kernel_size=16, kernel_stride=8, block_size=16, topk=6, window_size=48)


def compare(what: str, found: Tensor, expected: Tensor) -> None:
    """Prints the largest difference, and refuses one beyond rounding."""
    difference = (found - expected).abs().max().item()
    print(f"{what}: largest difference {difference:.1e}")
    assert difference < 1e-5, what


@torch.no_grad()
def main() -> None:
    """Runs the parts in order on one cache."""
    torch.manual_seed(0)
    layer = nsa.NativeSparseAttention(hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=32, cfg=CFG).eval()
    text, other = torch.randn(2, 1, 300, 64)  # hidden states of two texts
    whole = layer(text)

    # Two rows with pages of 16 tokens, of which 40 serve both.
    cache = layer.make_cache(batch_size=2, max_length=512, page_size=16, num_pages=40)

    def append(first: Tensor, second: Tensor | None = None) -> Tensor:
        """Appends to row 0, and to row 1 if it has any. The shorter row is padded; `num_new` says how many count."""
        rows = [first[0], first[0, :0] if second is None else second[0]]
        counts = [len(row) for row in rows]
        cache.reserve([old + new for old, new in zip(cache.cache_seqlens.tolist(), counts, strict=True)])
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        o = layer(padded, cache=cache, num_new=torch.tensor(counts, dtype=torch.int32))
        cache.check()  # raises if a row exceeded its capacity
        return o

    # Prefill: a prompt of 250 tokens in two chunks, in row 0; row 1 stays idle.
    chunks = [append(chunk)[:1] for chunk in text[:, :250].split(200, 1)]
    compare("prefill in two chunks", torch.cat(chunks, 1), whole[:, :250])

    # Decode: one token a step; up to 16 at once are one step, too.
    steps = [append(token)[:1] for token in text[:, 250:260].split(1, 1)]
    compare("ten steps of one token", torch.cat(steps, 1), whole[:, 250:260])
    compare("one step of eight tokens", append(text[:, 260:268])[:1], whole[:, 260:268])

    # Fork: row 1 becomes a copy of row 0. Full pages are shared, only the last one is copied.
    free = cache.free_pages
    cache.fork(parent=0, child=1)
    print(f"fork: {free - cache.free_pages} of the 17 pages of row 0 are copied")
    branch = torch.cat((text[:, :268], other[:, 268:276]), 1)  # the same beginning, another end
    both = append(text[:, 268:276], other[:, 268:276])
    compare("row 0 after the fork", both[:1], whole[:, 268:276])
    compare("row 1 after the fork", both[1:], layer(branch)[:, 268:])

    # Rollback: tokens that a draft proposed and that were refused; up to 32 can be taken back.
    cache.rollback(0, 270)
    compare("row 0 after a rollback", append(text[:, 270:275])[:1], whole[:, 270:275])

    # Another text in row 1. The rows have different lengths and take different numbers of new tokens.
    cache.release(1)
    both = append(text[:, 275:280], other[:, :100])
    compare("row 0, 5 new tokens", both[:1, :5], whole[:, 275:280])
    compare("row 1, 100 new tokens", both[1:], layer(other)[:, :100])
    print(f"lengths: {cache.cache_seqlens.tolist()}")


if __name__ == "__main__":
    main()
