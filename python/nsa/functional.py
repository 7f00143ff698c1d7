"""The operations of Native Sparse Attention, single and end to end, with autograd.

Shapes: batched (B, S, heads, D), or packed (total, heads, D) with int32 `cu_seqlens_q` (and `cu_seqlens_k`, if keys and
queries differ in length) of length batch + 1. H query heads share Hkv key/value heads. Any strides with a contiguous
last dimension. q, k, v and gates of one call share a dtype: float32 or bfloat16, on a GPU float16 too (float64 with
NSA_BACKEND=reference). All tensors of a call are on one device; on a GPU it runs on torch's current stream.
Query i of Sq has position t = i + Sk - Sq. A query that sees no key gets o = 0 and lse = -inf.

`max_seqlen_q` and `max_seqlen_k` are upper bounds of the lengths in tokens (default: the totals); `softmax_scale`
defaults to 1 / sqrt(Dk). Equal inputs give bitwise equal results, with any number of threads
(`torch.set_num_threads`).

Every function raises TypeError for an argument of another type than annotated and ValueError for one that is not
allowed, naming it, and RuntimeError for other failures.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from ._arguments import check_offsets, checked
from ._registration import call, needs_gradient, ops
from .config import CompressionWeights, NSAConfig
from .rotary import check_positions, rotate_inputs, rows_within

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from . import _options

PAPER = NSAConfig()
MEAN = CompressionWeights("mean")


@checked
def compress(k: Tensor, weights: CompressionWeights, cfg: NSAConfig, cu_seqlens: Tensor | None = None) -> Tensor:
    """Compresses every block of kernel_size tokens into one key or value: out[i] = phi(k[i*d : i*d + l] + pe) (eq. 7).

    Args:
        k: (B, S, Hkv, D) or (total, Hkv, D), keys (not rotated) or values.
        weights: of phi, see CompressionWeights.
        cfg: kernel_size l and kernel_stride d are used.
        cu_seqlens: int32 (batch + 1) for packed sequences; blocks never cross the end of one.

    Returns:
        (B, N_c(S), Hkv, D); or packed (total // d, Hkv, D), the sequences' compressed tokens at the offsets
        `compressed_cu_seqlens`, the rows past the last one zero.
    """
    if cu_seqlens is not None:
        check_offsets(cu_seqlens)
    return call(ops.compress, k, *weights.as_arguments(), cfg.as_list(), cu_seqlens)


@checked
def compressed_cu_seqlens(cu_seqlens: Tensor, cfg: NSAConfig) -> Tensor:
    """Offsets of the sequences in the packed result of `compress`, int32 (batch + 1), like cu_seqlens."""
    check_offsets(cu_seqlens)
    return call(ops.compressed_cu_seqlens, cu_seqlens, cfg.as_list())


@checked
def compressed_attention(
    q: Tensor,
    k_c: Tensor,
    v_c: Tensor,
    cfg: NSAConfig,
    softmax_scale: float | None = None,
    seqlen_k: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention to compressed tokens: query t sees block i exactly if i*d + l - 1 <= t.

    Args:
        q: (B, Sq, H, Dk) or (total_q, H, Dk).
        k_c: (B, N_c(Sk), Hkv, Dk) or (total_k // d, Hkv, Dk), from `compress` (and rotated, if q is).
        v_c: likewise with Dv.
        seqlen_k: raw key tokens Sk behind k_c, batched calls only; default Sq.

    Returns:
        o and lse: (B, Sq, H, Dv) or (total_q, H, Dv), in q's dtype; and float32 (B, H, Sq) or (H, total_q), the natural
            logarithm of the softmax's denominator, without a gradient.
    """
    packed = _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return call(ops.compressed_attention, q, k_c, v_c, cfg.as_list(), softmax_scale, seqlen_k, *packed)


@checked
def select_blocks(
    q: Tensor,
    k_c: Tensor,
    lse: Tensor,
    cfg: NSAConfig,
    softmax_scale: float | None = None,
    seqlen_k: int | None = None,
    noise: float = 0.0,
    seed: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Tensor:
    """The blocks that each query selects, by the compressed attention's probabilities (eq. 8 to 12). No gradient.

    Forced blocks (init_blocks, local_blocks) come first, then those of highest importance summed over the heads of a
    KV head; a tie goes to the lower index.

    Args:
        q, k_c, lse: as given to and returned by `compressed_attention`.
        noise: tau >= 0, Gumbel noise on the logarithm of the importance, for exploration in training; 0: off.
        seed: of the noise, 64 bits; the same seed draws the same noise on every backend.

    Returns:
        int32 (B, Sq, Hkv, topk) or (total_q, Hkv, topk), ascending, padded with -1 at the end.
    """
    packed = _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    scores = (q.detach(), k_c.detach(), lse.detach())
    return call(
        ops.select_blocks, *scores, cfg.as_list(), softmax_scale, seqlen_k, float(noise), _signed(seed), *packed
    )


@checked
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    block_size: int = 64,
    softmax_scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention to all tokens u <= t of the blocks that query t selected.

    Args:
        q: (B, Sq, H, Dk) or (total_q, H, Dk).
        k, v: (B, Sk, Hkv, Dk) and (B, Sk, Hkv, Dv), or (total_k, Hkv, Dk) and (total_k, Hkv, Dv).
        indices: int32 (B, Sq, Hkv, n) or (total_q, Hkv, n), any n: a set of blocks per query. Duplicates count once; -1
            and blocks out of range or in the future are ignored.
        block_size: l', a positive multiple of 16.

    Returns:
        o and lse as in `compressed_attention`.
    """
    packed = _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return call(ops.selected_attention, q, k, v, indices, block_size, softmax_scale, *packed)


@checked
def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window_size: int,
    softmax_scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention to the tokens max(0, t - window_size + 1) ... t.

    Args:
        q, k, v: as in `selected_attention`.
        window_size: w >= 1 in tokens, the query itself included.

    Returns:
        o and lse as in `compressed_attention`.
    """
    packed = _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return call(ops.sliding_window_attention, q, k, v, window_size, softmax_scale, *packed)


@checked
def combine(o_cmp: Tensor, o_slc: Tensor, o_swa: Tensor, gates: Tensor) -> Tensor:
    """o = g_cmp * o_cmp + g_slc * o_slc + g_swa * o_swa (eq. 5).

    Args:
        o_cmp, o_slc, o_swa: (B, S, H, Dv) or (total, H, Dv).
        gates: (B, S, H, 3) or (total, H, 3) in the order cmp, slc, swa, already passed through the sigmoid.

    Returns:
        o like o_cmp.
    """
    return call(ops.combine, o_cmp, o_slc, o_swa, gates)


@overload
def nsa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    *,
    k_c: Tensor,
    v_c: Tensor,
    return_indices: Literal[False] = False,
    **options: Unpack[_options.NSAAttention],
) -> Tensor: ...


@overload
def nsa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    *,
    k_c: Tensor,
    v_c: Tensor,
    return_indices: Literal[True],
    **options: Unpack[_options.NSAAttention],
) -> tuple[Tensor, Tensor]: ...


@overload
def nsa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    *,
    k_c: Tensor,
    v_c: Tensor,
    return_indices: bool,
    **options: Unpack[_options.NSAAttention],
) -> Tensor | tuple[Tensor, Tensor]: ...


@checked
def nsa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    *,
    k_c: Tensor,
    v_c: Tensor,
    cfg: NSAConfig | None = None,
    k_swa: Tensor | None = None,
    v_swa: Tensor | None = None,
    indices: Tensor | None = None,
    softmax_scale: float | None = None,
    noise: float = 0.0,
    seed: int = 0,
    return_indices: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compressed, selected and sliding window attention and their gated sum in one call and one backward.

    The branches meet in float32, so that the result is rounded once. Nothing is rotated here.

    Args:
        q: (B, Sq, H, Dk) or (total_q, H, Dk).
        k, v: of the selected branch, and of the window unless k_swa or v_swa are given; as in `selected_attention`.
        gates: as in `combine`.
        k_c, v_c: compressed tokens as in `compressed_attention`, of the same raw length as k.
        cfg: hyperparameters, default the paper's.
        indices: int32 (B, Sq, Hkv, topk) or (total_q, Hkv, topk): the blocks to attend to, instead of those that the
            importance selects.
        noise, seed: as in `select_blocks`.
        return_indices: also return the blocks that the importance selects.

    Returns:
        o, or (o, indices): (B, Sq, H, Dv) or (total_q, H, Dv), and int32 as `select_blocks` returns them.
    """
    packed = _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    names = partial(branch_names, None, None, k_swa, v_swa)
    cfg = PAPER if cfg is None else cfg
    tensors = (q, k_c, v_c, k, v, k if k_swa is None else k_swa, v if v_swa is None else v_swa, gates)
    keep = torch.is_grad_enabled() and needs_gradient(*tensors)
    settings = (cfg.as_list(), softmax_scale, float(noise), _signed(seed))
    o, selected, *_ = call(ops.nsa_attention, *tensors, *settings, *packed, indices, keep, return_indices, names=names)
    return (o, selected) if return_indices else o


@overload
def native_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    *,
    return_indices: Literal[False] = False,
    **options: Unpack[_options.NativeSparseAttention],
) -> Tensor: ...


@overload
def native_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    *,
    return_indices: Literal[True],
    **options: Unpack[_options.NativeSparseAttention],
) -> tuple[Tensor, Tensor]: ...


@overload
def native_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    *,
    return_indices: bool,
    **options: Unpack[_options.NativeSparseAttention],
) -> Tensor | tuple[Tensor, Tensor]: ...


@checked
def native_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    *,
    cfg: NSAConfig | None = None,
    weights_k: CompressionWeights | None = None,
    weights_v: CompressionWeights | None = None,
    k_slc: Tensor | None = None,
    v_slc: Tensor | None = None,
    k_swa: Tensor | None = None,
    v_swa: Tensor | None = None,
    indices: Tensor | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    softmax_scale: float | None = None,
    noise: float = 0.0,
    seed: int = 0,
    recompute_compressed: bool = False,
    return_indices: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """A layer's attention in one call and one backward: rotate, compress, `nsa_attention`.

    Kept for the backward: the arguments (rotated ones too), compressed keys and values, block indices, the branches'
    outputs and lse.

    Args:
        q: (B, Sq, H, Dk) or (total_q, H, Dk).
        k, v: of the compressed branch, and of the others unless theirs are given; (B, Sk, Hkv, Dk or Dv) or (total_k,
            Hkv, Dk or Dv).
        gates: as in `combine`.
        cfg: hyperparameters, default the paper's.
        weights_k, weights_v: of the compression function, as in `compress`; default the mean.
        k_slc, v_slc, k_swa, v_swa: of the selected branch and of the window.
        indices: as in `nsa_attention`.
        rope: cosines and sines, float32 (max_positions, R / 2) each, R <= Dk: q and keys come unrotated, query i turns
            by row i + Sk - Sq, key i by row i, compressed key i by row i*d (per sequence, if packed). If R < Dk, the
            first R channels are rotated, in pairs (j, j + R/2). None: nothing is rotated.
        noise, seed: as in `select_blocks`.
        recompute_compressed: the backward computes compressed keys and values again instead of keeping them.
        return_indices: also return the blocks that the importance selects.

    Returns:
        o, or (o, indices), as `nsa_attention`.
    """
    packed = _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    names = partial(branch_names, k_slc, v_slc, k_swa, v_swa)
    cfg = PAPER if cfg is None else cfg
    at_q, at_k = _positions(q, k, packed, rope)
    keys = (k, k if k_slc is None else k_slc, k if k_swa is None else k_swa)
    rotated = rotate_inputs(rope, q, *keys, MEAN if weights_k is None else weights_k, at_q, at_k)
    values = (v, v if v_slc is None else v_slc, v if v_swa is None else v_swa)
    branches = (rotated.q, rotated.k, values[0], rotated.k_slc, values[1], rotated.k_swa, values[2], gates)
    weights = (*rotated.weights_k.as_arguments(), *(MEAN if weights_v is None else weights_v).as_arguments())
    keep = torch.is_grad_enabled() and needs_gradient(*branches, *weights[1:6], *weights[7:])
    settings = (cfg.as_list(), softmax_scale, rotated.cos, rotated.sin, float(noise), _signed(seed))
    results = call(
        ops.native_sparse_attention,
        *(*branches, *weights, *settings, *packed, indices),
        *(keep, keep and not recompute_compressed, return_indices),
        names=names,
    )
    return results[:2] if return_indices else results[0]


def branch_names(
    k_slc: Tensor | None,
    v_slc: Tensor | None,
    k_swa: Tensor | None,
    v_swa: Tensor | None,
    others: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Names of the operators' arguments for messages; k and v serve the branches that were not given."""
    return {
        "k_cmp": "k",
        "v_cmp": "v",
        "k_slc": "k" if k_slc is None else "",
        "v_slc": "v" if v_slc is None else "",
        "k_swa": "k" if k_swa is None else "",
        "v_swa": "v" if v_swa is None else "",
        "block_indices": "indices",
        **others,
    }


def _positions(
    q: Tensor, k: Tensor, packed: tuple[Tensor | None, Tensor | None, int, int], rope: tuple[Tensor, Tensor] | None
) -> tuple[Tensor | slice, Tensor | slice]:
    """Rows of the rotation's tables for queries and for keys."""
    cu_q, cu_k, max_q, max_k = packed
    if rope is None or q.dim() < 2 or k.dim() < 2:
        return slice(None), slice(None)
    if cu_q is None:
        check_positions(rope, k.shape[1])
        return slice(k.shape[1] - q.shape[1], k.shape[1]), slice(0, k.shape[1])
    at_q, sequence = rows_within(cu_q, q.shape[0])
    if cu_k is None:
        check_positions(rope, max_q or min(1, q.shape[0]))  # rows past the last sequence have position 0
        at_k = at_q
    else:
        check_positions(rope, max_k or min(1, k.shape[0]))
        at_k, _ = rows_within(cu_k, k.shape[0])
        at_q = at_q + (cu_k.diff() - cu_q.diff())[sequence]
    if rope[0].is_cuda:  # where nothing waits to see whether an index is in range
        last = rope[0].shape[0] - 1
        at_q, at_k = at_q.clamp(max=last), at_k.clamp(max=last)
    return at_q.clamp(min=0), at_k.clamp(min=0)


def _packed(
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int | None, max_seqlen_k: int | None
) -> tuple[Tensor | None, Tensor | None, int, int]:
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if value is not None and cu_seqlens_q is None:
            raise ValueError(f"{name} = {value}: must be given with cu_seqlens_q only")
        if value is not None and not 0 <= value <= 2**63 - 1:
            raise ValueError(f"{name} = {value}: must be 0 ... 2^63 - 1, or None for the total")
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if offsets is not None:
            check_offsets(offsets, name)
    return cu_seqlens_q, cu_seqlens_k, max_seqlen_q or 0, max_seqlen_k or 0


def _signed(seed: int) -> int:
    """A 64-bit seed as the signed integer that the operators take."""
    seed = int(seed) if isinstance(seed, Tensor) else seed
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed = {seed}: must be in 0 ... 2**64 - 1")
    return seed - 2**64 if seed >= 2**63 else seed
