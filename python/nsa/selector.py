"""The selector loss: trains the block selector, because block selection has no gradient.

The loss is KL(attention || importances) over the selection blocks that are neither forced nor in the future, both
normalised. It is a mean over queries, weighted by their attention mass in these blocks. The importances rank the blocks
in block selection. The attention is the mass that the selected branch would give each block if it attended to all past
tokens. `nsa train --selector-loss` uses the same loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, pad

from ._arguments import checked
from .config import CompressionWeights, NSAConfig
from .functional import compress
from .rotary import rotate

_TINY = 1e-20
Rope = tuple[Tensor, Tensor]


@checked
def selector_loss(model: nn.Module) -> Tensor:
    """Sum of the selector losses of the layers with selector_queries > 0, from their last forward.

    Add it, with a weight, to the training loss (see `NativeSparseAttention`). With a weight of 0.1:

        loss = lm_loss + 0.1 * nsa.selector_loss(model)

    Each forward has its own loss: with micro-batches, call this once after each.

    Returns:
        A scalar, float32 (float64 for such layers), on the device of the first layer. Its gradient reaches phi of keys
        and, if the branches have separate keys, the keys of the compressed branch and the layers below.

    Raises:
        ValueError: no layer has selector_queries > 0, or one has not run in training mode with gradients.
        TypeError: model is no module.
    """
    layers = {name: m for name, m in model.named_modules() if getattr(m, "selector_queries", 0)}
    if not layers:
        raise ValueError("model: no NativeSparseAttention in it has selector_queries > 0: must be set in at least one")
    losses = []
    for name, module in layers.items():
        if not isinstance(loss := module.selector_loss, Tensor):
            raise ValueError(
                f"model: {name or 'it'} has no selector loss: its last forward must be one in training mode, with "
                "gradients (in activation checkpointing: use_reentrant=False) and without a cache"
            )
        phi = list(module.phi_k.parameters())
        if phi and not any(parameter.requires_grad for parameter in phi):
            warnings.warn(
                f"model: {name or 'it'}: phi_k is frozen, so that the selector loss does not train it: must have "
                "requires_grad; with PEFT: modules_to_save=['phi_k', 'phi_v']",
                stacklevel=3,
            )
        losses.append(loss)
    return torch.stack([loss.to(losses[0].device) for loss in losses]).sum()


def sampled_divergence(
    q: Tensor,
    k_cmp: Tensor,
    k_slc: Tensor,
    weights: CompressionWeights,
    cfg: NSAConfig,
    rope: Rope | None,
    num_queries: int,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    lengths: Tensor | None = None,
    compress: Callable[..., Tensor] = compress,
) -> Tensor:
    """The mean divergence, over KV heads, of up to `num_queries` queries of one of the sequences, drawn by torch.

    A sequence is drawn by how many queries with a choice it has, the queries evenly over these. A device is not waited
    for, nor are shapes read from it: the keys are `max_seqlen` rows, of which those past the sequence are not seen.

    Args:
        q: (B, S, H, D) or packed (total, H, D), k_cmp and k_slc likewise with Hkv heads, none of them rotated. q and
            k_slc get no gradient.
        weights: phi of keys, in k_cmp's dtype.
        rope: cosines and sines (positions, R / 2), or (B, S, R / 2) of each token.
        cu_seqlens: int32 (batch + 1) of packed sequences.
        max_seqlen: an upper bound of their lengths, default the total.
        lengths: number of first rows that count in each packed sequence, integers (batch); default: all.
        compress: `nsa.compress`, or that of nsa.reference.

    Returns:
        float32 or float64, a scalar; 0 if no query has more blocks than it selects.
    """
    if cu_seqlens is None:
        batch, longest = q.shape[:2]
        cu_seqlens = torch.arange(batch + 1, device=q.device) * longest
        q, k_cmp, k_slc = (t.flatten(0, 1) for t in (q, k_cmp, k_slc))
    else:
        longest = q.shape[0] if max_seqlen is None else min(max_seqlen, q.shape[0])
        longest = longest if rope is None or rope[0].dim() == 3 else min(longest, rope[0].shape[0])
    first = max(cfg.topk * cfg.block_size, cfg.kernel_size)  # the first query with more blocks than it selects
    if longest <= first or cu_seqlens.shape[0] < 2:
        return q.new_zeros((), dtype=_wide(q.dtype))
    last_row = q.shape[0] - 1
    lengths = cu_seqlens.diff() if lengths is None else lengths
    begin, positions, shares = _draw(cu_seqlens, lengths, first, longest, min(num_queries, longest - first))
    at_keys = (begin + torch.arange(longest, device=q.device)).clamp(0, last_row)
    q = q.detach()[(begin + positions).clamp(0, last_row)]
    k_cmp, k_slc = k_cmp[at_keys], k_slc.detach()[at_keys]
    if rope is not None:
        rope = cos, sin = _of_sequence(rope, at_keys)
        q, k_slc = rotate(q, cos[positions], sin[positions]), rotate(k_slc, cos, sin)
    k_c = compress(k_cmp[None], weights, cfg)[0]
    return divergence(q, k_c, k_slc, positions, shares.to(_wide(q.dtype)), cfg, rope)


def divergence(
    q: Tensor, k_c: Tensor, k_slc: Tensor, positions: Tensor, shares: Tensor, cfg: NSAConfig, rope: Rope | None
) -> Tensor:
    """KL(attention || importances), a mean over queries and KV heads: float32 or float64, a scalar.

    Args:
        q: (T, H, D) at int64 `positions` (T) with more blocks than they select; rotated, detached by the caller.
        k_c: (n, Hkv, D), compressed keys of the sequence, not rotated; they get the gradient.
        k_slc: (S, Hkv, D), keys of the sequence, rotated.
        shares: (T), weight of each query, in addition to its attention mass in blocks that are not forced.
        rope: cosines and sines (S, R / 2).
    """
    stride, blocks = cfg.kernel_stride, -(-k_slc.shape[0] // cfg.block_size)
    with torch.autocast(q.device.type, enabled=False):
        k_c = k_c.to(_wide(k_c.dtype))
        ends = torch.arange(k_c.shape[0], device=q.device) * stride + (cfg.kernel_size - 1)
        if rope is not None:
            k_c = rotate(k_c, *(table[: k_c.shape[0] * stride : stride] for table in rope))
        with torch.no_grad():
            attention = _group_attention(q, k_slc, torch.arange(k_slc.shape[0], device=q.device), positions)
            attention = _sum_over(attention, cfg.block_size, blocks)
        importances = _group_attention(q, k_c, ends, positions)
        if (behind := cfg.kernel_size // stride - 1) > 0:  # a compressed key gives a share to each stride it covers
            importances = pad(importances, (behind, behind)).unfold(-1, behind + 1, 1).sum(-1)
        importances = _sum_over(importances, cfg.block_size // stride, blocks)

        block = torch.arange(blocks, device=q.device)
        own = (positions // cfg.block_size)[:, None]
        ineligible = (block < cfg.init_blocks) | (block > own - cfg.local_blocks)  # forced or later

        attention, importances = (masses.masked_fill(ineligible, 0) for masses in (attention, importances))
        mass, total = (masses.sum(-1, keepdim=True).clamp_min(_TINY) for masses in (attention, importances))
        found = (importances / total).clamp_min(_TINY).log()
        each = kl_div(found, attention / mass, reduction="none").sum(-1)  # (Hkv, T)
        weights = shares * mass.squeeze(-1)
        return (each * weights / weights.sum(-1, keepdim=True).clamp_min(_TINY)).sum(-1).mean()


def block_mask(indices: Tensor, blocks: int) -> Tensor:
    """bool (..., blocks): which of a sequence's blocks are in rows of indices (..., n); others count as none."""
    numbers = indices.long()
    numbers = numbers.where((numbers >= 0) & (numbers < blocks), blocks)
    mask = torch.zeros(*indices.shape[:-1], blocks + 1, dtype=torch.bool, device=indices.device)
    return mask.scatter_(-1, numbers, True)[..., :-1]


def _draw(begins: Tensor, lengths: Tensor, first: int, longest: int, wanted: int) -> tuple[Tensor, Tensor, Tensor]:
    """Begin of a drawn sequence, positions of `wanted` queries in it, and the weight of each in the mean.

    If fewer queries have more blocks than they select, all of them are drawn; the rest have weight 0.
    """
    random = torch.rand(1 + wanted, dtype=torch.float64, device=lengths.device)
    choices = (lengths.long() - first).clamp(min=0)
    tickets = choices.cumsum(0)
    ticket = (random[:1] * tickets[-1]).long()
    drawn = torch.searchsorted(tickets, ticket, right=True).clamp(max=choices.shape[0] - 1)
    begin, count = begins[drawn], choices[drawn]  # (1)
    number = torch.arange(wanted, device=lengths.device)
    kept = count.clamp(1, wanted)
    low, high = number * count // kept, (number + 1) * count // kept
    positions = first + low + ((high - low) * random[1:]).long()
    shares = (number < count) / kept
    return begin, positions.clamp(max=longest - 1), shares


def _of_sequence(rope: Rope, rows: Tensor) -> Rope:
    """Tables of the positions of a sequence, which is `rows` of the flattened batch."""
    if rope[0].dim() == 2:
        return rope[0][: rows.shape[0]], rope[1][: rows.shape[0]]
    return rope[0].flatten(0, 1)[rows], rope[1].flatten(0, 1)[rows]


def _group_attention(q: Tensor, k: Tensor, seen_from: Tensor, positions: Tensor) -> Tensor:
    """Attention of queries (T, H, D) to keys (n, Hkv, D), visible from `seen_from` on, by KV head: (Hkv, T, n)."""
    (count, heads, dim), (keys, kv_heads, _) = q.shape, k.shape
    q = (q.to(_wide(q.dtype)) * dim**-0.5).view(count, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    scores = q.reshape(kv_heads, -1, dim) @ k.to(q.dtype).permute(1, 2, 0)
    scores = scores.view(kv_heads, -1, count, keys)
    return scores.masked_fill(seen_from > positions[:, None], -torch.inf).softmax(-1).sum(1)


def _sum_over(masses: Tensor, size: int, blocks: int) -> Tensor:
    """Sums each `size` elements of the last dimension, padded with zeros: (..., blocks)."""
    if behind := blocks * size - masses.shape[-1]:
        masses = pad(masses, (0, behind))
    return masses.reshape(*masses.shape[:-1], blocks, size).sum(-1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
