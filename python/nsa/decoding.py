"""One step of generation, and chunked prefill, with a key/value cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ._arguments import checked
from ._first_chunk import prefill_empty_rows
from ._registration import NAMESPACE, call, ops
from .cache import KVCache
from .config import CompressionWeights
from .functional import MEAN, branch_names
from .rotary import check_positions, order_channels

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from . import _options

MAX_DECODE_TOKENS = 16
"""The most new tokens of one decode step; more is prefill."""


@overload
def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    cache: KVCache,
    *,
    return_indices: Literal[False] = False,
    **options: Unpack[_options.Decode],
) -> Tensor: ...


@overload
def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    cache: KVCache,
    *,
    return_indices: Literal[True],
    **options: Unpack[_options.Decode],
) -> tuple[Tensor, Tensor]: ...


@overload
def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    cache: KVCache,
    *,
    return_indices: bool,
    **options: Unpack[_options.Decode],
) -> Tensor | tuple[Tensor, Tensor]: ...


@checked
def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    cache: KVCache,
    *,
    weights_k: CompressionWeights | None = None,
    weights_v: CompressionWeights | None = None,
    k_slc: Tensor | None = None,
    v_slc: Tensor | None = None,
    k_swa: Tensor | None = None,
    v_swa: Tensor | None = None,
    indices: Tensor | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    softmax_scale: float | None = None,
    num_new: Tensor | None = None,
    return_indices: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Appends m = 1 ... 16 new tokens per sequence, compresses the blocks that they complete, and attends.

    Query r of a sequence has position cache_seqlens + r; the step then adds num_new to cache_seqlens. Capacity must
    have been reserved (`KVCache.reserve`). No gradient: a backward through o raises. Hyperparameters are the cache's.

    Args:
        q: (B, m, H, Dk).
        k, v: of the compressed branch, and of the others unless theirs are given; (B, m, Hkv, Dk or Dv).
        gates: (B, m, H, 3) as in `combine`.
        cache: is changed.
        weights_k, weights_v: of the compression function, as in `compress`; default the mean.
        k_slc, v_slc, k_swa, v_swa: of the selected branch and of the window.
        indices: int32 (B, m, Hkv, topk), the blocks to attend to, instead of those that the importance selects.
        rope: as in `native_sparse_attention`: q and keys come unrotated. At least the cache's `max_positions`.
        softmax_scale: default 1 / sqrt(Dk).
        num_new: int32 (B), 0 ... m; 0 is an idle row, for which nothing is read or written and o = 0. Default m.
        return_indices: also return the blocks that the importance selects, int32 (B, m, Hkv, topk).

    Returns:
        o (B, m, H, Dv), or (o, indices).

    Raises:
        TypeError: an argument is of another type.
        ValueError: it is not allowed.
        RuntimeError: other failures.
    """
    keys, values = (k, k_slc, k_swa), (v, v_slc, v_swa)
    weights = (weights_k, weights_v)
    step = partial(call, ops.decode)
    return _step(step, q, keys, values, gates, cache, weights, indices, rope, softmax_scale, num_new, return_indices)


@overload
def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    cache: KVCache,
    *,
    return_indices: Literal[False] = False,
    **options: Unpack[_options.Prefill],
) -> Tensor: ...


@overload
def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    cache: KVCache,
    *,
    return_indices: Literal[True],
    **options: Unpack[_options.Prefill],
) -> tuple[Tensor, Tensor]: ...


@overload
def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    cache: KVCache,
    *,
    return_indices: bool,
    **options: Unpack[_options.Prefill],
) -> Tensor | tuple[Tensor, Tensor]: ...


@checked
def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    cache: KVCache,
    *,
    weights_k: CompressionWeights | None = None,
    weights_v: CompressionWeights | None = None,
    k_slc: Tensor | None = None,
    v_slc: Tensor | None = None,
    k_swa: Tensor | None = None,
    v_swa: Tensor | None = None,
    indices: Tensor | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    softmax_scale: float | None = None,
    num_new: Tensor | None = None,
    first_chunk: bool = False,
    return_indices: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`decode` for any m >= 1: a chunk of the prompt against what the cache holds. Arguments as there.

    Args:
        first_chunk: the rows are empty, so the chunk is computed as a sequence of its own by
            `native_sparse_attention`. On a GPU this is several times as fast for long prompts. A row that is not empty
            takes no tokens, like one without capacity.
    """
    keys, values = (k, k_slc, k_swa), (v, v_slc, v_swa)
    weights = (weights_k, weights_v)
    step = prefill_empty_rows if first_chunk else partial(call, ops.prefill)
    return _step(step, q, keys, values, gates, cache, weights, indices, rope, softmax_scale, num_new, return_indices)


def _step(
    step: Callable[..., Any],
    q: Tensor,
    keys: tuple[Tensor, Tensor | None, Tensor | None],
    values: tuple[Tensor, Tensor | None, Tensor | None],
    gates: Tensor,
    cache: KVCache,
    weights: tuple[CompressionWeights | None, CompressionWeights | None],
    indices: Tensor | None,
    rope: tuple[Tensor, Tensor] | None,
    softmax_scale: float | None,
    num_new: Tensor | None,
    return_indices: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """`step` takes the arguments of the operators `decode` and `prefill`, and `names` as `call` does."""
    names = partial(branch_names, keys[1], values[1], keys[2], values[2])
    k, k_slc, k_swa = (keys[0] if t is None else t for t in keys)
    v, v_slc, v_swa = (values[0] if t is None else t for t in values)
    weights_k, weights_v = (MEAN if w is None else w for w in weights)
    check_positions(rope, cache.max_positions, "the cache's max_length rounded up to pages")
    records = cache._selections is not None
    before = cache.cache_seqlens.clone() if records else cache.cache_seqlens
    with torch.no_grad():
        x = order_channels(rope, q, k, k_slc, k_swa, weights_k)
        o, selected = step(
            *(x.q, x.k, v, x.k_slc, v_slc, x.k_swa, v_swa, gates),
            *cache.tensors(),
            *x.weights_k.as_arguments(),
            *weights_v.as_arguments(),
            *(
                cache.cfg.as_list(),
                softmax_scale,
                x.cos,
                x.sin,
                rope is not None,
                num_new,
                indices,
                cache.k_scale,
                cache.v_scale,
            ),
            names=names,
        )
        if records:
            cache._record(before, selected.clone() if return_indices else selected, indices)
    if torch.is_grad_enabled():
        branches = (q, k, v, k_slc, v_slc, k_swa, v_swa, gates)
        o = _without_gradient(o, *branches, *weights_k.as_arguments(), *weights_v.as_arguments())
    return (o, selected) if return_indices else o


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return o.view_as(o)

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> tuple[None, Tensor]:
        return None, _refuse_gradient(d_o, *ctx.saved_tensors)


# An operator, as torch.compile traces a backward when it compiles the forward.
@torch.library.custom_op(f"{NAMESPACE}::gradient_of_step", mutates_args=(), schema="(Tensor d_o, Tensor x) -> Tensor")
def _refuse_gradient(d_o: Tensor, x: Tensor) -> Tensor:
    raise RuntimeError("cache: a step with a cache has no gradient; train without one (use_cache=False)")


@_refuse_gradient.register_fake
def _(d_o: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _without_gradient(o: Tensor, *inputs: object) -> Tensor:
    """o, made of `inputs`: a gradient that is asked for is refused, not lost."""
    learnt = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    return _WithoutGradient.apply(o, learnt[0]) if learnt else o  # type: ignore[no-untyped-call]
