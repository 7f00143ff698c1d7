"""Loads the extension and gives its operators (torch.ops.nsa.*) their fake kernels and autograd formulas.

Shapes are described in functional.py. A fake kernel computes what its C++ kernel allocates: outputs are contiguous, and
a tensor that was not asked for is 1-D without elements.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._arguments import check_offsets
from .config import NSAConfig

_LIBRARY = Path(__file__).with_name("_C.so")
if not _LIBRARY.exists():
    raise ImportError(f"{_LIBRARY} is missing: install the package, or build the target nsa_torch")
torch.ops.load_library(_LIBRARY)
NAMESPACE = ctypes.string_at(ctypes.c_char_p.in_dll(ctypes.CDLL(str(_LIBRARY)), "nsa_torch_namespace")).decode()
"""Namespace of the operators in torch.ops, chosen when the extension is built: "nsa" by default."""
ops = getattr(torch.ops, NAMESPACE)

_REFUSED, _UNSUPPORTED = "invalid argument: ", "not supported: "
"""Prefixes of the extension's messages, which is how its exceptions are told apart."""

Fn = Callable[..., Any]
F = TypeVar("F", bound=Fn)

_eager: dict[Any, Fn] = {}
"""Functions for operators that eager code does not call through torch.ops."""
_transformed: dict[Any, Fn] = {}
"""Functions for operators inside torch.func's transforms."""


def call(operator: Any, *arguments: Any, names: Callable[[], Mapping[str, str]] = dict) -> Any:
    """operator(*arguments), with ValueError for a refused argument in every version of torch.

    What a backend cannot do is a NotImplementedError.

    `names`: gives, for a message, what the caller calls arguments of the operator; "" the same.
    """
    try:
        if torch.compiler.is_compiling():
            return operator(*arguments)
        if torch._C._are_functorch_transforms_active():
            return _transformed.get(operator, operator)(*arguments)
        return (_eager.get(operator) or operator.default)(*arguments)
    except (RuntimeError, ValueError) as error:
        message = str(error)
        unsupported = message.startswith(_UNSUPPORTED)
        refused = isinstance(error, ValueError) or message.startswith(_REFUSED)
        if not (refused or unsupported or message.startswith(f"{operator.__name__}: ")):  # the last: no page
            raise
        called = {name: own for name, own in names().items() if own}
        if called:
            message = re.sub(
                r"(?<![.\w])({})\b".format("|".join(map(re.escape, called))), lambda found: called[found[0]], message
            )
        kind = NotImplementedError if unsupported else ValueError if refused else RuntimeError
        raise kind(message.removeprefix(_REFUSED).removeprefix(_UNSUPPORTED)) from None


def compressed_cu_seqlens_on_device(cu_seqlens: Tensor, cfg: Sequence[int]) -> Tensor:
    """compressed_cu_seqlens with torch operations, so that nothing waits for the offsets."""
    config = NSAConfig(*cfg)
    check_offsets(cu_seqlens)
    blocks = (cu_seqlens.diff() - config.kernel_size) // config.kernel_stride + 1
    return torch.nn.functional.pad(blocks.clamp(min=0).cumsum(0, dtype=torch.int32), (1, 0))


torch.library.impl(f"{NAMESPACE}::compressed_cu_seqlens", "cuda", compressed_cu_seqlens_on_device)


def _register_views(name: str) -> None:
    """Negative and conjugate views as arguments of an operator that writes to some of them.

    Torch's own way fails an assertion inside of torch for one that is written, and may crash after it.
    """
    operator = getattr(ops, name).default
    arguments = operator._schema.arguments

    def run(*given: Any) -> Any:
        values = list(given)
        for i, (argument, value) in enumerate(zip(arguments, given, strict=True)):
            if isinstance(value, Tensor) and (value.is_neg() or value.is_conj()):
                if argument.is_write:
                    raise ValueError(f"{_REFUSED}{argument.name}: a negative or conjugate view: must not be one")
                values[i] = value.resolve_neg().resolve_conj()
        return operator(*values)

    for key in ("Negative", "Conjugate"):
        _views.impl(name, run, key)


_views = torch.library.Library(NAMESPACE, "IMPL")
for _name in ("decode", "prefill", "decode_paged", "fork"):
    _register_views(_name)


def _fake(name: str) -> Callable[[F], F]:
    """Registers a fake kernel. Torch also takes it where one of the arguments alone is on the meta device."""
    names = [argument.name for argument in getattr(ops, name).default._schema.arguments]

    def register(kernel: F) -> F:
        def on_one_device(*arguments: Any) -> Any:
            given = [(n, t.device) for n, t in zip(names, arguments, strict=True) if isinstance(t, Tensor)]
            first, expected = given[0]
            for other, device in given:
                if device != expected:
                    raise ValueError(f"{other}: on {device}: expected {expected} as {first}")
            return kernel(*arguments)

        torch.library.register_fake(f"{NAMESPACE}::{name}")(on_one_device)
        return kernel

    return register


def _o(q: Tensor, v: Tensor) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _lse(q: Tensor) -> Tensor:
    *batch, rows, heads, _ = q.shape
    return q.new_empty((*batch, heads, rows), dtype=torch.float32)


def _indices(q: Tensor, k_c: Tensor, cfg: Sequence[int]) -> Tensor:
    return q.new_empty((*q.shape[:-2], k_c.shape[-2], NSAConfig(*cfg).topk), dtype=torch.int32)


def _chosen(q: Tensor, k_c: Tensor, cfg: Sequence[int], block_indices: Tensor | None, return_indices: bool) -> Tensor:
    if block_indices is not None and not return_indices:
        return q.new_empty(0, dtype=torch.int32)
    return _indices(q, k_c, cfg)


def _compressed(k: Tensor, cfg: Sequence[int], cu_seqlens: Tensor | None) -> Tensor:
    config = NSAConfig(*cfg)
    if cu_seqlens is not None:
        return k.new_empty((k.shape[0] // config.kernel_stride, *k.shape[1:]))
    return k.new_empty((k.shape[0], config.num_compressed(k.shape[1]), *k.shape[2:]))


def _gradients(needs: Sequence[bool], *of: Tensor | None) -> tuple[Tensor, ...]:
    like = next(t for t in of if t is not None)
    return tuple(
        like.new_empty(0) if t is None or not need else t.new_empty(t.shape) for t, need in zip(of, needs, strict=True)
    )


@_fake("compress")
def _(k, kind, pe, w1, b1, w2, b2, cfg, cu_seqlens):
    return _compressed(k, cfg, cu_seqlens)


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
    block_indices, keep, return_indices = rest[-3:]
    kept = (_o(q, v_c), _o(q, v_slc), _o(q, v_swa), _lse(q), _lse(q), _lse(q))
    chosen = _chosen(q, k_c, cfg, block_indices, return_indices)
    return _o(q, v_c), chosen, *(t if keep else t.new_empty(0) for t in kept)


@_fake("nsa_attention_backward")
def _(d_o, q, k_c, v_c, k_slc, v_slc, k_swa, v_swa, gates, *rest):
    return _gradients(rest[-1], q, k_c, v_c, k_slc, v_slc, k_swa, v_swa, gates)


@_fake("native_sparse_attention")
def _(q, k_cmp, v_cmp, k_slc, v_slc, k_swa, v_swa, gates, *rest):
    cfg, (cu_seqlens_q, *_, block_indices, keep, keep_compressed, return_indices) = rest[12], rest[18:]
    kept = (_o(q, v_slc), _o(q, v_slc), _o(q, v_slc), _lse(q), _lse(q), _lse(q))
    return (
        *(_o(q, v_slc), _chosen(q, k_cmp, cfg, block_indices, return_indices)),
        *(_compressed(t, cfg, cu_seqlens_q) if keep_compressed else t.new_empty(0) for t in (k_cmp, v_cmp)),
        *(t if keep else t.new_empty(0) for t in kept),
    )


@_fake("native_sparse_attention_backward")
def _(d_o, *rest):
    branches, (_, *weights_k), (_, *weights_v) = rest[:8], rest[8:14], rest[14:20]
    return _gradients(rest[-1], *branches, *weights_k, *weights_v)


@_fake("decode")
@_fake("prefill")
def _(q, k_cmp, v_cmp, *rest):
    cfg = rest[-9]
    return _o(q, v_cmp), _indices(q, k_cmp, cfg)


@_fake("decode_paged")
def _(q, k_cmp, v_cmp, *rest):
    o = _o(q, v_cmp) if rest[-1] is None else q.new_empty(0)
    return o, _indices(q, k_cmp, rest[-9])


@_fake("fork")
def _(*arguments):
    return None


def _differentiable(name: str, *inputs: str, saved: Sequence[str] = ()) -> None:
    """Gives operator `name` the gradient that operator `name`_backward computes, for output 0 only.

    The backward takes the gradient of output 0, then arguments and `saved` outputs of the forward by their names, then
    `needs`; it returns the gradients of the arguments `inputs`. `saved` names the forward's outputs, "" is one that the
    backward does not read.

    Compiled code gets the formula through torch.library, whose way from the dispatcher to Python and back costs eager
    code more than a short call's kernels; that has an autograd.Function of its own around the bare kernels.
    """
    forward_op, backward_op = (getattr(ops, n).default for n in (name, f"{name}_backward"))
    arguments = forward_op._schema.arguments
    names = [a.name for a in arguments]
    wanted = [a.name for a in backward_op._schema.arguments[1:-1]]
    tensor_names = {a.name for a in arguments if str(a.type) in ("Tensor", "Optional[Tensor]")}
    tensors = [names.index(n) for n in names if n in tensor_names]
    kept_inputs = [i for i in tensors if names[i] in wanted]
    kept_outputs = [i for i, n in enumerate(saved) if n in wanted]
    others = [i for i, n in enumerate(names) if n in wanted and n not in tensor_names]
    order = [names[i] for i in kept_inputs] + [saved[i] for i in kept_outputs] + [names[i] for i in others]
    arranged = [order.index(n) for n in wanted]
    positions = [names.index(i) for i in inputs]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.save_for_backward(*[inputs[i] for i in kept_inputs], *[outputs[i] for i in kept_outputs])
        ctx.others = [inputs[i] for i in others]

    def backward(ctx: Any, d_out: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = [None] * len(names)
        if d_out is not None:
            values = (*ctx.saved_tensors, *ctx.others)
            needs = [ctx.needs_input_grad[i] for i in positions]
            if torch.compiler.is_compiling():
                run = backward_op
            else:  # with create_graph through what refuses second derivatives
                run = once.apply if torch.is_grad_enabled() else _below_autograd(backward_op)
            results = run(d_out, *[values[i] for i in arranged], needs)
            for i, gradient, needed in zip(positions, results, needs, strict=True):
                gradients[i] = gradient if needed else None
        return tuple(gradients)

    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context)
    torch.library.register_autograd(f"{NAMESPACE}::{name}_backward", _no_second_derivative)

    bare = _below_autograd(forward_op)
    transformed = _function(f"nsa_{name}", bare, setup_context, backward)

    def forward(ctx: Any, *arguments: Any) -> Any:
        output = bare(*arguments)
        setup_context(ctx, arguments, output)
        return output

    # Without a setup_context of its own, which costs a short call in eager code a quarter more.
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(f"nsa_{name}", (torch.autograd.Function,), members)
    once = _function(f"nsa_{name}_backward", _below_autograd(backward_op), lambda *_: None, _no_second_derivative)

    def run(*arguments: Any) -> Any:
        if torch.is_grad_enabled() and needs_gradient(*[arguments[i] for i in positions]):
            return function.apply(*arguments)
        if forward_ad._current_level >= 0:  # refused, as the function has no jvp; the bare kernels would lose tangents
            return function.apply(*arguments)
        return bare(*arguments)

    _eager[getattr(ops, name)] = run
    _transformed[getattr(ops, name)] = transformed.apply


def _function(name: str, forward: Fn, setup_context: Fn, backward: Fn) -> Any:
    """An autograd.Function that torch.func's transforms know."""

    def vmap(*_: Any) -> None:
        raise RuntimeError("nsa: vmap is not implemented: the operations take a batch as their first dimension")

    functions = {"forward": forward, "setup_context": setup_context, "backward": backward, "vmap": vmap}
    return type(name, (torch.autograd.Function,), {n: staticmethod(f) for n, f in functions.items()})


def needs_gradient(*tensors: Tensor | None) -> bool:
    for t in tensors:  # a generator for any() takes three times as long
        if t is not None and t.requires_grad:
            return True
    return False


def _below_autograd(operator: Fn) -> Fn:
    """The operator's kernel, or in a mode of torch's what that makes of it, past its registered autograd formula."""

    def run(*arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    return run


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
_differentiable(
    "native_sparse_attention",
    *("q", "k_cmp", "v_cmp", "k_slc", "v_slc", "k_swa", "v_swa", "gates"),
    *("pe_k", "w1_k", "b1_k", "w2_k", "b2_k", "pe_v", "w1_v", "b1_v", "w2_v", "b2_v"),
    saved=("", "indices", "k_c", "v_c", "o_cmp", "o_slc", "o_swa", "lse_cmp", "lse_slc", "lse_swa"),
)
