"""One step of generation, and chunked prefill, with a key/value cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ._arguments import checked
from ._registration import call, ops
from .cache import KVCache
from .config import CompressionWeights, NSAConfig
from .functional import BRANCHES, cosines_and_sines


@checked
def decode(
    q: Tensor,
    new_kv: Sequence[Tensor],
    gates: Tensor,
    cache: KVCache,
    weights_k: CompressionWeights,
    weights_v: CompressionWeights,
    cfg: NSAConfig,
    softmax_scale: float | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    num_new: Tensor | None = None,
    return_indices: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Appends m = 1 ... 16 new tokens per sequence, compresses the blocks that they complete, and attends.

    Query r of a sequence stands at cache_seqlens + r; the step then adds num_new to cache_seqlens. Room must have been
    reserved (`KVCache.reserve`). No gradient.

    Args:
        q: (B, m, H, Dk), rotated.
        new_kv: k_cmp (not rotated), v_cmp, k_slc (rotated), v_slc, k_swa (rotated), v_swa, each (B, m, Hkv, Dk or Dv).
        gates: (B, m, H, 3) as in `combine`.
        cache: is changed.
        weights_k, weights_v: of the compression function, as in `compress`.
        cfg: the cache's.
        softmax_scale: default 1 / sqrt(Dk).
        rope: cosines and sines, float32 (max_positions, Dk / 2) each: rotates compressed key i at position i*d. None:
            no rotation.
        num_new: int32 (B), 0 ... m; 0 is an idle row, for which nothing is read or written and o = 0. Default m.
        return_indices: also return the selected blocks, int32 (B, m, Hkv, topk).

    Returns:
        o (B, m, H, Dv), or (o, indices).

    Raises:
        TypeError: an argument is of another type. ValueError: it is not allowed. RuntimeError: other failures.
    """
    return _step(
        ops.decode, q, new_kv, gates, cache, weights_k, weights_v, cfg, softmax_scale, rope, num_new, return_indices
    )


@checked
def prefill(
    q: Tensor,
    new_kv: Sequence[Tensor],
    gates: Tensor,
    cache: KVCache,
    weights_k: CompressionWeights,
    weights_v: CompressionWeights,
    cfg: NSAConfig,
    softmax_scale: float | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    num_new: Tensor | None = None,
    return_indices: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`decode` for any m >= 1: a chunk of the prompt against what the cache holds. Arguments as there."""
    return _step(
        ops.prefill, q, new_kv, gates, cache, weights_k, weights_v, cfg, softmax_scale, rope, num_new, return_indices
    )


def _step(
    op: Callable,
    q: Tensor,
    new_kv: Sequence[Tensor],
    gates: Tensor,
    cache: KVCache,
    weights_k: CompressionWeights,
    weights_v: CompressionWeights,
    cfg: NSAConfig,
    softmax_scale: float | None,
    rope: tuple[Tensor, Tensor] | None,
    num_new: Tensor | None,
    return_indices: bool,
    imposed_indices: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    if len(new_kv) != len(BRANCHES):
        raise ValueError(f"new_kv: {len(new_kv)} tensors: must be {', '.join(BRANCHES)}")
    if cfg.as_list() != cache.cfg.as_list():
        raise ValueError(f"cfg = {cfg}: must be the cache's, {cache.cfg}")
    cos, sin = cosines_and_sines(rope)
    with torch.no_grad():
        o, indices = call(
            op,
            *(q, *new_kv, gates),
            *cache.tensors(),
            *weights_k.as_arguments(),
            *weights_v.as_arguments(),
            *(cfg.as_list(), softmax_scale, cos, sin, num_new, imposed_indices),
        )
    return (o, indices) if return_indices else o
