"""A few queries of a long sequence in float64: output, block selection, and every gradient they cause.

bench/scale/context_ranks.py compares a sequence that several GPUs share with these, as no oracle could compute all of
it. phi is the mean, and all branches have the same keys and values.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import nsa


@dataclass
class Row:
    """A query, and what it was given and what came of it on the device."""

    position: int
    q: Tensor  # (H, D)
    gates: Tensor  # (H, 3)
    d_o: Tensor  # (H, D)
    indices: Tensor  # (Hkv, n)


@dataclass
class Found:
    """Float32 results: o and dq (rows, H, D), d_gates (rows, H, 3) of the rows; dk and dv (tokens, Hkv, D) of all.

    blocks_differ: number of selected blocks that are not among the best. largest_gap: largest relative difference by
    which the worst selected block is less important than the best other one.
    """

    o: Tensor
    d_q: Tensor
    d_gates: Tensor
    d_k: Tensor
    d_v: Tensor
    blocks_differ: int
    largest_gap: float


def squeezed(t: Tensor, cfg: nsa.NSAConfig) -> Tensor:
    """(tokens, D) -> (blocks, D)"""
    return t.unfold(0, cfg.kernel_size, cfg.kernel_stride).mean(-1)


def seen_tokens(position: int, indices: Tensor, cfg: nsa.NSAConfig) -> tuple[Tensor, Tensor]:
    """Those of the chosen blocks, and those of the window."""
    everything = torch.arange(position + 1, device=indices.device)
    chosen = torch.isin(everything // cfg.block_size, indices[indices >= 0])
    return everything[chosen], everything[max(0, position + 1 - cfg.window_size) :]


def importances(p: Tensor, blocks: int, cfg: nsa.NSAConfig) -> Tensor:
    """Importance of each selection block, from the probabilities (heads, compressed keys) of a query group (eq. 9)."""
    total = p.new_zeros(blocks)
    strides = torch.arange(p.shape[1], device=p.device)
    for i in range(cfg.kernel_size // cfg.kernel_stride):
        total.index_add_(0, (strides + i) * cfg.kernel_stride // cfg.block_size, p.sum(0))
    return total


def compare_choice(importance: Tensor, indices: Tensor, position: int, cfg: nsa.NSAConfig) -> tuple[int, float]:
    """Number of selected blocks that are not among the best, and the gap (as in Found)."""
    own = position // cfg.block_size
    blocks = torch.arange(own + 1, device=importance.device)
    forced = (blocks < cfg.init_blocks) | (blocks > own - cfg.local_blocks)
    chosen = torch.isin(blocks, indices[indices >= 0])
    expected = min(cfg.topk, own + 1)
    if int(chosen.sum()) != expected or bool((forced & ~chosen).any()):
        return expected, float("inf")
    free, left = importance[chosen & ~forced], importance[~chosen]
    if not len(free) or not len(left):
        return 0, 0.0
    worst, best = float(free.min()), float(left.max())
    return int((free < best).sum()), max(0.0, best - worst) / max(best, 1e-300)


def by_oracle(rows: list[Row], k: Tensor, v: Tensor, cfg: nsa.NSAConfig) -> Found:
    """Results of the rows in float64, with the blocks that the device selected; k and v (tokens, Hkv, D)."""
    heads, dim = rows[0].q.shape
    kv_heads = k.shape[1]
    ratio, scale = heads // kv_heads, dim**-0.5
    o, d_q = (torch.zeros(len(rows), heads, v.shape[2], dtype=torch.float64, device=k.device) for _ in range(2))
    d_gates = torch.zeros(len(rows), heads, 3, dtype=torch.float64, device=k.device)
    d_k, d_v = (torch.zeros(t.shape, dtype=torch.float32, device=k.device) for t in (k, v))
    differ, gap = 0, 0.0
    for head in range(kv_heads):
        keys, values = (t[:, head].double().requires_grad_() for t in (k, v))
        squeezed_keys, squeezed_values = squeezed(keys, cfg), squeezed(values, cfg)
        of_head = slice(head * ratio, (head + 1) * ratio)
        total, inputs = torch.zeros((), dtype=torch.float64, device=k.device), []
        for i, row in enumerate(rows):
            q, gates = (t[of_head].double().requires_grad_() for t in (row.q, row.gates))
            count = cfg.num_compressed(row.position + 1)
            chosen, window = seen_tokens(row.position, row.indices[head], cfg)
            branches = (
                (squeezed_keys[:count], squeezed_values[:count]),
                (keys[chosen], values[chosen]),
                (keys[window], values[window]),
            )
            out = torch.zeros_like(q[:, : v.shape[2]])
            for branch, (some_keys, some_values) in enumerate(branches):
                if not len(some_keys):
                    continue
                p = torch.softmax(q @ some_keys.T * scale, -1)
                out = out + gates[:, branch, None] * (p @ some_values)
                if branch == 0:
                    importance = importances(p.detach(), -(-k.shape[0] // cfg.block_size), cfg)
                    worse, by = compare_choice(
                        importance[: row.position // cfg.block_size + 1], row.indices[head], row.position, cfg
                    )
                    differ, gap = differ + worse, max(gap, by)
            o[i, of_head] = out.detach()
            total = total + (out * row.d_o[of_head].double()).sum()
            inputs += [q, gates]
        found = torch.autograd.grad(total, [*inputs, keys, values])
        for i in range(len(rows)):
            d_q[i, of_head], d_gates[i, of_head] = found[2 * i], found[2 * i + 1]
        d_k[:, head], d_v[:, head] = found[-2], found[-1]
    return Found(o, d_q, d_gates, d_k, d_v, differ, gap)
