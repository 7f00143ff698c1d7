"""flash-linear-attention's function, with its meaning (read from fla.ops.nsa at 012a873).

It compresses by the mean over blocks of `block_size`, each visible once it is complete, and always selects the first
block, the query's own and the one before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._arguments import checked
from ..config import NSAConfig
from ..functional import (
    MEAN,
    compress,
    compressed_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)

__all__ = ["parallel_nsa"]


@checked
def parallel_nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cmp: Tensor | None = None,
    g_slc: Tensor | None = None,
    g_swa: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_counts: Tensor | int = 16,
    block_size: int = 64,
    window_size: int = 0,
    scale: float | None = None,
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """fla.ops.nsa.parallel_nsa for groups of any size, on the CPU too, with gradients for Sq < Sk too.

    Args:
        q: (B, Sq, H, Dk); queries are the last Sq of Sk positions.
        k, v: (B, Sk, Hkv, Dk) and (B, Sk, Hkv, Dv).
        g_cmp: (B, Sq, H), gates of the compressed branch. None: it adds nothing, and block_indices must be given.
        g_slc: likewise of the selected branch. None: it is not gated.
        g_swa: likewise of the window, required with window_size.
        block_indices: integers (B, Sq, Hkv, S), blocks to attend to instead of those that the scores select; negative
            ones are ignored.
        block_counts: S, how many blocks a query selects, at least 3; or integers (B, Sq, Hkv), of block_indices the
            first so many.
        block_size: tokens in a block, a positive multiple of 16.
        window_size: tokens of the sliding window, the query itself included; 0: none.
        scale: of the compressed and the selected scores, default 1 / sqrt(Dk), which the window always has.
        cu_seqlens: integers (N + 1), offsets of packed sequences with B = 1; or one for queries and one for keys.

    Returns:
        o: (B, Sq, H, Dv).

    Raises:
        ValueError: arguments that do not go together, or that an operation refuses.
    """
    for name, gate in (("g_cmp", g_cmp), ("g_slc", g_slc), ("g_swa", g_swa)):
        if gate is not None and q.dim() == 4 and gate.shape != q.shape[:3]:
            raise ValueError(f"{name}: {tuple(gate.shape)}: must be {tuple(q.shape[:3])}, (B, Sq, H)")
    if isinstance(block_counts, Tensor) and q.dim() == k.dim() == 4:
        expected = (*q.shape[:2], k.shape[2])
        if block_counts.shape != expected:
            given = tuple(block_counts.shape)
            raise ValueError(f"block_counts: {given}: must be {expected}, (B, Sq, Hkv), or a number")
    packed: dict[str, Any] = {}
    batched = cu_seqlens is None
    if cu_seqlens is not None:
        if q.shape[0] != 1:
            raise ValueError(f"q: {tuple(q.shape)}: must have a batch of 1 with cu_seqlens")
        offsets = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
        packed = {name: t.to(torch.int32) for name, t in zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=True)}
        q, k, v = q[0], k[0], v[0]
        g_cmp, g_slc, g_swa, block_indices = (None if t is None else t[0] for t in (g_cmp, g_slc, g_swa, block_indices))
        block_counts = block_counts[0] if isinstance(block_counts, Tensor) else block_counts
    if g_cmp is None and block_indices is None:
        raise ValueError("block_indices: not given: must be without g_cmp, which selects")
    if window_size and g_swa is None:
        raise ValueError(f"g_swa: not given: must be with window_size = {window_size}")
    o: Tensor | float = 0.0
    if g_cmp is not None:
        length: dict[str, Any] = {"seqlen_k": k.shape[1]} if batched else {}
        cfg = NSAConfig(block_size, block_size, block_size, topk=3)
        k_c, v_c = (compress(t, MEAN, cfg, packed.get("cu_seqlens_k")) for t in (k, v))
        o_cmp, lse = compressed_attention(q, k_c, v_c, cfg, scale, **length, **packed)
        o = o_cmp * g_cmp.unsqueeze(-1)
        if block_indices is None:

            def selected(count: int) -> Tensor:
                if count < 3:
                    raise ValueError(f"block_counts = {count}: must be >= 3, the blocks that are always selected")
                cfg = NSAConfig(block_size, block_size, block_size, topk=count)
                return select_blocks(q, k_c, lse, cfg, scale, **length, **packed)

            if isinstance(block_counts, Tensor):
                widest = max(3, int(block_counts.max()))
                block_indices = q.new_full((*block_counts.shape, widest), -1, dtype=torch.int32)
                for count in block_counts.unique().tolist():
                    chosen = torch.nn.functional.pad(selected(count), (0, widest - count), value=-1)
                    block_indices = torch.where(block_counts.unsqueeze(-1) == count, chosen, block_indices)
            else:
                block_indices = selected(block_counts)
            block_counts = 0
    assert block_indices is not None  # without g_cmp they are given
    if isinstance(block_counts, Tensor):
        kept = torch.arange(block_indices.shape[-1], device=q.device) < block_counts.unsqueeze(-1)
        block_indices = torch.where(kept, block_indices, -1)
    o_slc, _ = selected_attention(q, k, v, block_indices.to(torch.int32), block_size, scale, **packed)
    o = o + (o_slc if g_slc is None else o_slc * g_slc.unsqueeze(-1))
    if window_size and g_swa is not None:
        o_swa, _ = sliding_window_attention(q, k, v, window_size, **packed)
        o = o + o_swa * g_swa.unsqueeze(-1)
    return o if batched else o[None]
