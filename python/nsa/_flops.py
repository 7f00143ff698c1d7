"""Floating-point operations of the operators for torch.utils.flop_counter, counted as in `nsa bench`.

Attention counts 2 * channels for each visible (query, key) pair, head and matmul; phi counts its matmuls. Block
selection, gates and sums are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ._registration import ops
from .config import NSAConfig

F = TypeVar("F", bound=Callable[..., int])


def _formula(name: str) -> Callable[[F], F]:
    """Registers flop(a, names of arguments -> values) for an operator."""
    operator = getattr(ops, name)
    names = [argument.name for argument in operator.default._schema.arguments]

    def register(flop: F) -> F:
        def count(*arguments: Any, out_val: Any = None, **named: Any) -> int:
            return int(flop(dict(zip(names, arguments, strict=False)) | named))

        register_flop_formula(operator, get_raw=True)(count)
        return flop

    return register


def _spans(a: dict[str, Any], keys: int | None) -> list[tuple[int, int]]:
    """(queries, keys) of every sequence."""
    offsets = a.get("cu_seqlens_q")
    if offsets is None:
        batch, rows = a["q"].shape[:2]
        return [(rows, rows if keys is None else keys)] * batch
    lengths = offsets.diff().tolist()
    other = a["cu_seqlens_k"]
    return list(zip(lengths, lengths if other is None else other.diff().tolist(), strict=True))


def _pairs(spans: list[tuple[int, int]], visible: Callable[[int], int]) -> int:
    """Visible (query, key) pairs of a head; visible(t): of the query at position t."""
    return sum(visible(t) for queries, keys in spans for t in range(keys - queries, keys))


def _compressed_pairs(spans: list[tuple[int, int]], cfg: NSAConfig) -> int:
    return _pairs(spans, lambda t: cfg.num_compressed(t + 1))


def _selected_pairs(spans: list[tuple[int, int]], blocks: int, size: int) -> int:
    return _pairs(spans, lambda t: min(t + 1, (blocks - 1) * size + t % size + 1))


def _window_pairs(spans: list[tuple[int, int]], window: int) -> int:
    return _pairs(spans, lambda t: min(t + 1, window))


def _attention(a: dict[str, Any], pairs: int, v: Tensor, backward: bool) -> int:
    """S = QK', O = PV; backward: S again, dP = dO V', dV = P'dO, dQ = dS K, dK = dS'Q."""
    heads, dk, dv = a["q"].shape[-2], a["q"].shape[-1], v.shape[-1]
    return 2 * pairs * heads * ((3 * dk + 2 * dv) if backward else dk + dv)


def _compress(k: Tensor, lengths: list[int], kind: str, w1: Tensor | None, cfg: NSAConfig, backward: bool) -> int:
    width = k.shape[-1]
    flat = cfg.kernel_size * width
    if kind == "mean":
        block = flat
    elif kind == "linear":
        block = (2 if backward else 1) * 2 * flat * width
    else:  # backward: two products for each layer, and the first layer's outputs once more
        assert w1 is not None
        first, second = 2 * flat * w1.shape[-1], 2 * w1.shape[-1] * width
        block = 3 * first + 2 * second if backward else first + second
    return block * k.shape[-2] * sum(cfg.num_compressed(length) for length in lengths)


for _suffix, _backward in (("", False), ("_backward", True)):

    @_formula("compress" + _suffix)
    def _(a, backward=_backward):
        offsets, k = a["cu_seqlens"], a["k"]
        lengths = [k.shape[1]] * k.shape[0] if offsets is None else offsets.diff().tolist()
        return _compress(k, lengths, a["kind"], a["w1"], NSAConfig(*a["cfg"]), backward)

    @_formula("compressed_attention" + _suffix)
    def _(a, backward=_backward):
        pairs = _compressed_pairs(_spans(a, a["seqlen_k"]), NSAConfig(*a["cfg"]))
        return _attention(a, pairs, a["v_c"], backward)

    @_formula("selected_attention" + _suffix)
    def _(a, backward=_backward):
        pairs = _selected_pairs(_spans(a, a["k"].shape[1]), a["indices"].shape[-1], a["block_size"])
        return _attention(a, pairs, a["v"], backward)

    @_formula("sliding_window_attention" + _suffix)
    def _(a, backward=_backward):
        return _attention(a, _window_pairs(_spans(a, a["k"].shape[1]), a["window_size"]), a["v"], backward)

    @_formula("nsa_attention" + _suffix)
    def _end_to_end(a, backward=_backward):
        cfg, spans = NSAConfig(*a["cfg"]), _spans(a, a["k_slc"].shape[1])
        pairs = _compressed_pairs(spans, cfg) + _selected_pairs(spans, cfg.topk, cfg.block_size)
        return _attention(a, pairs + _window_pairs(spans, cfg.window_size), a["v_slc"], backward)

    @_formula("native_sparse_attention" + _suffix)
    def _(a, backward=_backward, end_to_end=_end_to_end):
        cfg, lengths = NSAConfig(*a["cfg"]), [keys for _, keys in _spans(a, a["k_cmp"].shape[1])]
        phi = (_compress(a[f"{x}_cmp"], lengths, a[f"kind_{x}"], a[f"w1_{x}"], cfg, backward) for x in "kv")
        return end_to_end(a, backward) + sum(phi)
