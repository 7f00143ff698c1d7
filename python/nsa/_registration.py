"""Loads the extension and gives its operators torch.ops.nsa.* their fake kernels and autograd formulas.

Shapes are described in functional.py. A fake kernel computes what its C++ kernel allocates: outputs are contiguous, and
a tensor that was not asked for is 1-D without elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import NSAConfig

_LIBRARY = Path(__file__).with_name("_C.so")
if not _LIBRARY.exists():
    raise ImportError(f"{_LIBRARY} is missing: install the package, or build the target nsa_torch")
torch.ops.load_library(_LIBRARY)
ops = torch.ops.nsa

_REFUSED = "invalid argument: "


def call(operator: Callable, *arguments: Any) -> Any:
    """operator(*arguments), with ValueError for a refused argument in every version of torch."""
    try:
        return operator(*arguments)
    except (RuntimeError, ValueError) as error:
        message = str(error)
        if message.startswith(_REFUSED):
            raise ValueError(message.removeprefix(_REFUSED)) from None
        raise


def compressed_cu_seqlens_on_device(cu_seqlens: Tensor, cfg: Sequence[int]) -> Tensor:
    """By torch, so that nothing waits for the offsets."""
    config = NSAConfig(*cfg)
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        what = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}".removeprefix("torch.")
        raise ValueError(f"cu_seqlens: {what}: expected int32 (B + 1)")
    blocks = (cu_seqlens.diff() - config.kernel_size) // config.kernel_stride + 1
    return torch.nn.functional.pad(blocks.clamp(min=0).cumsum(0, dtype=torch.int32), (1, 0))


torch.library.impl("nsa::compressed_cu_seqlens", "cuda", compressed_cu_seqlens_on_device)


def _fake(name: str) -> Callable[[Callable], Callable]:
    return torch.library.register_fake(f"nsa::{name}")


def _o(q: Tensor, v: Tensor) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _lse(q: Tensor) -> Tensor:
    *batch, rows, heads, _ = q.shape
    return q.new_empty((*batch, heads, rows), dtype=torch.float32)


def _indices(q: Tensor, k_c: Tensor, cfg: Sequence[int]) -> Tensor:
    return q.new_empty((*q.shape[:-2], k_c.shape[-2], NSAConfig(*cfg).topk), dtype=torch.int32)


def _gradients(needs: Sequence[bool], *of: Tensor | None) -> tuple[Tensor, ...]:
    like = next(t for t in of if t is not None)
    return tuple(
        like.new_empty(0) if t is None or not need else t.new_empty(t.shape) for t, need in zip(of, needs, strict=True)
    )


@_fake("compress")
def _(k, kind, pe, w1, b1, w2, b2, cfg, cu_seqlens):
    config = NSAConfig(*cfg)
    if cu_seqlens is not None:
        return k.new_empty((k.shape[0] // config.kernel_stride, *k.shape[1:]))
    return k.new_empty((k.shape[0], config.num_compressed(k.shape[1]), *k.shape[2:]))


@_fake("compress_backward")
def _(d_out, k, kind, pe, w1, b1, w2, b2, cfg, cu_seqlens, needs):
    return _gradients(needs, k, pe, w1, b1, w2, b2)


@_fake("compressed_cu_seqlens")
def _(cu_seqlens, cfg):
    return cu_seqlens.new_empty(cu_seqlens.shape)


@_fake("compressed_attention")
def _(q, k_c, v_c, cfg, softmax_scale, seqlen_k, *packed):
    return _o(q, v_c), _lse(q)


@_fake("compressed_attention_backward")
def _(d_o, q, k_c, v_c, o, lse, cfg, softmax_scale, seqlen_k, cu_q, cu_k, max_q, max_k, needs):
    return _gradients(needs, q, k_c, v_c)


@_fake("select_blocks")
def _(q, k_c, lse, cfg, *rest):
    return _indices(q, k_c, cfg)


@_fake("selected_attention")
def _(q, k, v, indices, block_size, softmax_scale, *packed):
    return _o(q, v), _lse(q)


@_fake("selected_attention_backward")
def _(d_o, q, k, v, indices, o, lse, block_size, softmax_scale, cu_q, cu_k, max_q, max_k, needs):
    return _gradients(needs, q, k, v)


@_fake("sliding_window_attention")
def _(q, k, v, window_size, softmax_scale, *packed):
    return _o(q, v), _lse(q)


@_fake("sliding_window_attention_backward")
def _(d_o, q, k, v, o, lse, window_size, softmax_scale, cu_q, cu_k, max_q, max_k, needs):
    return _gradients(needs, q, k, v)


@_fake("combine")
def _(o_cmp, o_slc, o_swa, gates):
    return o_cmp.new_empty(o_cmp.shape)


@_fake("combine_backward")
def _(d_o, o_cmp, o_slc, o_swa, gates, needs):
    return _gradients(needs, o_cmp, o_slc, o_swa, gates)


@_fake("nsa_attention")
def _(q, k_c, v_c, k_slc, v_slc, k_swa, v_swa, gates, cfg, softmax_scale, noise, seed, *rest):
    keep = rest[-1]
    kept = (_o(q, v_c), _o(q, v_slc), _o(q, v_swa), _lse(q), _lse(q), _lse(q))
    return _o(q, v_c), _indices(q, k_c, cfg), *(t if keep else t.new_empty(0) for t in kept)


@_fake("nsa_attention_backward")
def _(d_o, q, k_c, v_c, k_slc, v_slc, k_swa, v_swa, gates, *rest):
    return _gradients(rest[-1], q, k_c, v_c, k_slc, v_slc, k_swa, v_swa, gates)


@_fake("decode")
@_fake("prefill")
def _(q, k_cmp, v_cmp, *rest):
    cfg = rest[-6]
    return _o(q, v_cmp), _indices(q, k_cmp, cfg)


@_fake("fork")
def _(*arguments):
    return None


def _differentiable(name: str, *inputs: str, saved: Sequence[str] = ()) -> None:
    """Gives operator `name` the gradient that operator `name`_backward computes, for output 0 only.

    The backward takes the gradient of output 0, then arguments and `saved` outputs of the forward by their names, then
    `needs`; it returns the gradients of the arguments `inputs`. `saved` names the forward's outputs, "" is one that the
    backward does not read.
    """
    backward_op = getattr(ops, f"{name}_backward").default
    arguments = getattr(ops, name).default._schema.arguments
    names = [a.name for a in arguments]
    is_tensor = [str(a.type) in ("Tensor", "Optional[Tensor]") for a in arguments]
    wanted = [a.name for a in backward_op._schema.arguments[1:-1]]

    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.save_for_backward(
            *(a if tensor else None for a, tensor in zip(inputs, is_tensor, strict=True)),
            *(o if name else None for o, name in zip(outputs, saved, strict=False)),
        )
        ctx.others = [None if tensor else a for a, tensor in zip(inputs, is_tensor, strict=True)]

    def backward(ctx: Any, d_out: Tensor | None, *_: Any) -> tuple:
        gradients: dict[str, Tensor] = {}
        if d_out is not None:
            values = dict(zip((*names, *saved), ctx.saved_tensors, strict=True))
            values |= {n: a for n, a, tensor in zip(names, ctx.others, is_tensor, strict=True) if not tensor}
            needs = [ctx.needs_input_grad[names.index(i)] for i in inputs]
            results = backward_op(d_out, *(values[n] for n in wanted), needs)
            gradients = {i: g for i, g, needed in zip(inputs, results, needs, strict=True) if needed}
        return tuple(gradients.get(n) for n in names)

    torch.library.register_autograd(f"nsa::{name}", backward, setup_context=setup_context)
    torch.library.register_autograd(f"nsa::{name}_backward", _no_second_derivative)


def _no_second_derivative(ctx: Any, *gradients: Tensor) -> None:
    raise RuntimeError("nsa: second derivatives are not implemented (a backward ran with create_graph=True)")


_differentiable("compress", "k", "pe", "w1", "b1", "w2", "b2")
_differentiable("compressed_attention", "q", "k_c", "v_c", saved=("o", "lse"))
_differentiable("selected_attention", "q", "k", "v", saved=("o", "lse"))
_differentiable("sliding_window_attention", "q", "k", "v", saved=("o", "lse"))
_differentiable("combine", "o_cmp", "o_slc", "o_swa", "gates")
_differentiable(
    "nsa_attention",
    *("q", "k_c", "v_c", "k_slc", "v_slc", "k_swa", "v_swa", "gates"),
    saved=("", "indices", "o_cmp", "o_slc", "o_swa", "lse_cmp", "lse_slc", "lse_swa"),
)
