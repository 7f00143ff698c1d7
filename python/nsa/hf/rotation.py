"""Rotations by positions that are not the tokens' numbers, as those of images in M-RoPE (three position axes)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..config import CompressionWeights, NSAConfig
from ..functional import compressed_cu_seqlens
from ..rotary import rotate, rows_within


def attention_by_token_tables(
    operations: ModuleType,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    *,
    cfg: NSAConfig,
    rope: tuple[Tensor, Tensor],
    weights_k: CompressionWeights,
    weights_v: CompressionWeights,
    k_slc: Tensor | None = None,
    v_slc: Tensor | None = None,
    k_swa: Tensor | None = None,
    v_swa: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    **options: Any,
) -> Any:
    """`native_sparse_attention` with a row of the tables for each token instead of each position.

    A compressed key is rotated as the first token of its block.

    Args:
        operations: `nsa.functional` or `nsa.reference`.
        rope: cosines and sines, float32 (B, S, D / 2); of packed tokens flattened.
    """
    cos, sin = rope if cu_seqlens_q is None else (table.flatten(0, 1) for table in rope)
    packed = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
    k_c = operations.compress(k, weights_k, cfg, cu_seqlens_q)
    v_c = operations.compress(v, weights_v, cfg, cu_seqlens_q)
    first = torch.arange(k_c.shape[-3], device=k.device) * cfg.kernel_stride
    if cu_seqlens_q is not None:
        number, sequence = rows_within(compressed_cu_seqlens(cu_seqlens_q, cfg), k_c.shape[0])
        first = (cu_seqlens_q[sequence] + number * cfg.kernel_stride).clamp(max=k.shape[0] - 1)
    k_c = rotate(k_c, cos.index_select(-2, first), sin.index_select(-2, first))
    q, k_slc = rotate(q, cos, sin), rotate(k if k_slc is None else k_slc, cos, sin)
    return operations.nsa_attention(
        *(q, k_slc, v if v_slc is None else v_slc, gates),
        k_c=k_c,
        v_c=v_c,
        cfg=cfg,
        k_swa=None if k_swa is None else rotate(k_swa, cos, sin),
        v_swa=v_swa,
        **packed,
        **options,
    )


@torch.inference_mode(False)  # a cache of that mode could be written only in it
@torch.no_grad()
def add_tokens(
    kept: tuple[Tensor, Tensor] | None, plain: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], at: Tensor
) -> tuple[Tensor, Tensor]:
    """Tables of the tokens of a cache, (B, positions, D / 2), as long as `plain`.

    Args:
        kept: tables of the tokens so far, which are changed; None: they were rotated by their numbers.
        plain: rows of positions that are the tokens' numbers, (positions, D / 2).
        new: rows of the new tokens, (B, m, D / 2).
        at: int64 (B, m), number of each new token in its row; the length of `plain` for none.
    """
    result = []
    for i, (rows, table) in enumerate(zip(new, plain, strict=True)):
        held = None if kept is None else kept[i]
        if held is None or held.shape[1] < table.shape[0]:
            longer = table.repeat(at.shape[0], 1, 1)
            if held is not None:
                longer[:, : held.shape[1]] = held
            held = longer
        padded = torch.cat((held, held[:, :1]), 1)  # with a row for what is no token
        held.copy_(padded.scatter_(1, at[..., None].expand_as(rows), rows)[:, :-1])
        result.append(held)
    return result[0], result[1]
