"""The calls into the rest of the package that sparse models make."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache import KVCache
from ..compression import CompressionFunction, initial_compression_weights
from ..config import CompressionWeights, NSAConfig
from ..decoding import decode, prefill
from ..functional import native_sparse_attention


def attend(inputs, weights, cfg: NSAConfig, tables, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
    """inputs: q, k_cmp, v_cmp, k_slc, v_slc, k_swa, v_swa, gates, batched or packed, not rotated."""
    packed = {} if cu_seqlens is None else {"cu_seqlens_q": cu_seqlens, "max_seqlen_q": max_seqlen}
    return native_sparse_attention(cfg=cfg, rope=tables, **_named(inputs, weights), **packed)


def decode_step(inputs, cache: KVCache, weights, tables, num_new: Tensor | None, prefill: bool):
    """inputs as for `attend`, (B, m, ...), the tokens of each row in front."""
    step = _prefill if prefill else decode
    return step(cache=cache, rope=tables, num_new=num_new, **_named(inputs, weights))


_prefill = prefill


def _named(inputs, weights) -> dict[str, Tensor | CompressionWeights]:
    names = ("q", "k", "v", "k_slc", "v_slc", "k_swa", "v_swa", "gates", "weights_k", "weights_v")
    return dict(zip(names, (*inputs, *weights), strict=True))


def weights_of(phi: CompressionFunction, dtype: torch.dtype) -> CompressionWeights:
    return phi(dtype)


def initial_weights(phi: CompressionFunction) -> CompressionWeights:
    """What a phi with parameters starts from, drawn from torch's generator."""
    sets, kernel_size, head_dim = phi.pe.shape
    hidden = phi.w1.shape[2] if phi.kind == "mlp" else None
    return initial_compression_weights(phi.kind, kernel_size, head_dim, sets, hidden)


def rows_of(cache: KVCache, rows: Tensor, max_length: int) -> KVCache:
    """A cache whose row b continues row rows[b], with room for max_length tokens."""
    pages = cache.k_slc, cache.v_slc, cache.k_c, cache.v_c
    new = KVCache(
        *(len(rows), pages[0].shape[2], pages[0].shape[3], pages[1].shape[3], cache.cfg),
        max_length=max_length,
        dtype=pages[0].dtype,
        device=pages[0].device,
    )
    tables = (cache.block_table, cache.block_table, cache.block_table_c, cache.block_table_c)
    own = (new.block_table, new.block_table, new.block_table_c, new.block_table_c)
    for old, table, store, place in zip(pages, tables, new.tensors()[:4], own, strict=True):
        store[place[:, 0].long(), : old.shape[1]] = old[table[rows.to(table.device), 0].long()]
    for old, store in zip(cache.tensors()[4:9], new.tensors()[4:9], strict=True):
        store.copy_(old[rows.to(old.device)])
    new._longest = [cache._longest[row] for row in rows.tolist()]
    return new


def forget(cache: KVCache, count: int | Tensor) -> None:
    """Shortens every row by `count` tokens, one number or (B)."""
    lengths = (cache.cache_seqlens - count).tolist()
    for row, length in enumerate(lengths):
        cache._check_going_back("sequence", row, length)
    for row, length in enumerate(lengths):
        cache.rollback(row, length)
