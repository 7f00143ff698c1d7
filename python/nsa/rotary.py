"""Rotary position embedding (RoPE): rotates channel pairs (j, j + D/2) by position * theta^(-2j/D)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ._arguments import check_type, checked
from .config import CompressionWeights

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_POSITIONS = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@checked
def rotary_tables(
    positions: Tensor, head_dim: int, theta: float = 10000.0, partial_rotary_factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions (...), integers or floating-point numbers, each float32 (..., head_dim / 2).

    Partial RoPE: partial_rotary_factor is the fraction of the channel pairs that are rotated, rounded down. They are
    those with the highest frequencies (2410.06205; the rope_type "proportional" of transformers). The cosines and sines
    of the others are 1 and 0.

    Raises:
        ValueError: head_dim is not even, positive and below 2^31, theta not positive and finite, partial_rotary_factor
            not 0 ... 1, or positions of a dtype that is neither a signed integer, uint8 nor floating-point.
        TypeError: an argument of another type.
    """
    check_rotation(head_dim, "theta", theta, partial_rotary_factor)
    check_type("positions", positions, Tensor)
    if positions.dtype not in _POSITIONS:
        what = str(positions.dtype).removeprefix("torch.")
        raise ValueError(f"positions: dtype {what}: must be a signed integer or floating-point type, or uint8")
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
    frequencies = float(theta) ** (-pairs / head_dim)
    frequencies[int(partial_rotary_factor * head_dim / 2) :] = 0
    angles = positions[..., None] * frequencies
    return angles.cos().float(), angles.sin().float()


def check_rotation(head_dim: int, name: str, theta: float, partial_rotary_factor: float) -> None:
    """Raises ValueError unless RoPE can rotate head_dim channels with base `theta`, which messages call `name`."""
    if not 0 <= partial_rotary_factor <= 1:
        raise ValueError(f"partial_rotary_factor = {partial_rotary_factor}: must be 0 ... 1")
    if not 2 <= head_dim < 2**31 or head_dim % 2:
        raise ValueError(f"head_dim = {head_dim}: must be even and 2 ... 2^31 - 2 to be rotated")
    try:
        positive = 0 < float(theta) < math.inf
    except OverflowError:
        positive = False
    if not positive:
        raise ValueError(f"{name} = {theta}: must be positive and finite")


@checked
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x (..., S, heads, D) by its tokens' rows cos, sin (..., S, R/2), at least in float32; result like x.

    R <= D: only the first R channels of x are rotated, in pairs (j, j + R/2). Leading dimensions of
    cos and sin broadcast to those of x.

    Raises:
        ValueError: a dtype other than float32, bfloat16, float16 or float64, a shape or device that does not fit.
        TypeError: an argument of another type.
    """
    _check_rotate(x, cos, sin)
    return apply_rotation(x, cos, sin)


def apply_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate` without its checks, whose comparisons of sizes stay in the graphs that torch.compile traces."""
    rotated = 2 * cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    wide = x[..., :rotated].to(torch.promote_types(x.dtype, torch.float32))
    low, high = wide.chunk(2, dim=-1)
    parts = (low * cos - high * sin, high * cos + low * sin)
    result = torch.cat(parts, dim=-1).to(x.dtype)
    return result if rotated == x.shape[-1] else torch.cat((result, x[..., rotated:]), dim=-1)


def _check_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    for name, t in (("x", x), ("cos", cos), ("sin", sin)):
        check_type(name, t, Tensor)
        if t.dtype not in FLOATS:
            what = str(t.dtype).removeprefix("torch.")
            raise ValueError(f"{name}: dtype {what}: must be float32, bfloat16, float16 or float64")
        if t.device != x.device:
            raise ValueError(f"{name}: on {t.device}: expected {x.device} as x")
    if x.dim() < 3:
        raise ValueError(f"x: {x.dim()} dimensions: must be (..., S, heads, D)")
    if sin.shape != cos.shape:
        raise ValueError(f"sin: {tuple(sin.shape)}: must be {tuple(cos.shape)} as cos")
    rows, leading = tuple(x.shape[:-2]), cos.shape[:-1]
    fits = 1 <= cos.dim() < x.dim() and 2 * cos.shape[-1] <= x.shape[-1]
    if not fits or any(n not in (1, m) for n, m in zip(reversed(leading), reversed(rows), strict=False)):
        what = f"(..., R / 2) with rows that broadcast to {rows}, those of x, and R <= {x.shape[-1]}"
        raise ValueError(f"cos: {tuple(cos.shape)}: must be {what}")


class RotaryInputs(NamedTuple):
    """Arguments of the operators, which rotate channels in pairs (j, j + Dk/2)."""

    q: Tensor
    k: Tensor  # of the compressed branch, unrotated
    k_slc: Tensor
    k_swa: Tensor
    weights_k: CompressionWeights
    cos: Tensor | None
    sin: Tensor | None


def order_channels(
    rope: tuple[Tensor, Tensor] | None,
    q: Tensor,
    k: Tensor,
    k_slc: Tensor,
    k_swa: Tensor,
    weights_k: CompressionWeights,
) -> RotaryInputs:
    """Inputs whose channels are rotated in pairs (j, j + Dk/2), all of them.

    With partial RoPE the channels of q, keys and phi's weights are permuted, all in the same way, so that the rotated
    pairs have this form.
    """
    if rope is None:
        return RotaryInputs(q, k, k_slc, k_swa, weights_k, None, None)
    cos, sin = rope
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise ValueError("rope: requires a gradient: must not, as none comes from the compressed keys")
    if not _is_refused(q, cos, sin) and 2 * cos.shape[1] < q.shape[-1]:
        shared, own = k_swa is k_slc, k is k_slc
        rotated, width = 2 * cos.shape[1], q.shape[-1]
        q, k = _halves(q, rotated), _halves(k, rotated)
        k_slc = k if own else _halves(k_slc, rotated)
        k_swa = k_slc if shared else _halves(k_swa, rotated)
        weights_k = _reordered(weights_k, rotated)
        cos = torch.nn.functional.pad(cos, (0, (width - rotated) // 2), value=1.0)
        sin = torch.nn.functional.pad(sin, (0, (width - rotated) // 2))
    return RotaryInputs(q, k, k_slc, k_swa, weights_k, cos, sin)


def rotate_inputs(
    rope: tuple[Tensor, Tensor] | None,
    q: Tensor,
    k: Tensor,
    k_slc: Tensor,
    k_swa: Tensor,
    weights_k: CompressionWeights,
    at_q: Tensor | slice,
    at_k: Tensor | slice,
) -> RotaryInputs:
    """`order_channels`, for operators that rotate only compressed keys: q, k_slc and k_swa come rotated."""
    x = order_channels(rope, q, k, k_slc, k_swa, weights_k)
    if x.cos is None or x.sin is None or _is_refused(q, x.cos, x.sin):
        return x
    q, k_slc, k_swa = rotate_branches(x.q, x.k_slc, x.k_swa, x.cos, x.sin, at_q, at_k)
    return x._replace(q=q, k_slc=k_slc, k_swa=k_swa)


def rotate_branches(
    q: Tensor, k_slc: Tensor, k_swa: Tensor, cos: Tensor, sin: Tensor, at_q: Tensor | slice, at_k: Tensor | slice
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k_slc and k_swa rotated by the rows at_q and at_k of the tables."""
    rotated = _at_positions(k_slc, cos, sin, at_k)
    window = rotated if k_swa is k_slc else _at_positions(k_swa, cos, sin, at_k)
    return _at_positions(q, cos, sin, at_q), rotated, window


def _is_refused(q: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the operators refuse the tables, which they name."""
    return q.dim() < 3 or cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > q.shape[-1]


def check_positions(rope: tuple[Tensor, Tensor] | None, length: int = 0, what: str = "the length of the keys") -> None:
    """Raises ValueError if the tables are no matrices or end before `length`, TypeError if they are no tensors."""
    if rope is None:
        return
    if len(rope) != 2:
        raise ValueError(f"rope: {len(rope)} tensors: must be cosines and sines")
    for i, table in enumerate(rope):
        check_type(f"rope[{i}]", table, Tensor)
        if table.dim() != 2:
            raise ValueError(f"rope[{i}]: {table.dim()} dimensions: must be (positions, channels / 2)")
    if rope[0].shape[0] < length:
        raise ValueError(f"rope: {rope[0].shape[0]} positions: must be at least {length}, {what}")


def rows_within(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Position of each of `total` packed rows within its sequence, and the sequence's number.

    Rows past the last sequence are at position 0.
    """
    rows = torch.arange(total, dtype=torch.int32, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens.contiguous(), rows, right=True).clamp(max=cu_seqlens.shape[0] - 1) - 1
    return torch.where(rows < cu_seqlens[-1], rows - cu_seqlens[sequence], 0), sequence


def _at_positions(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor | slice) -> Tensor:
    if cos.device != x.device or sin.device != x.device:
        return x  # refused by the operator
    try:
        cos, sin = cos[at], sin[at]
    except IndexError:
        what = f"rope: {cos.shape[0]} positions"
        raise ValueError(f"{what}: must be one for each position that cu_seqlens gives, at most max_seqlen") from None
    if x.dim() not in (3, 4) or cos.shape[:-1] != x.shape[max(0, x.dim() - 1 - cos.dim()) : -2]:
        return x
    if x.shape[-1] < 2 * cos.shape[-1] or any(t.dtype not in FLOATS for t in (x, cos, sin)):
        return x
    return apply_rotation(x, cos, sin)


def _halves(x: Tensor, rotated: int, dim: int = -1) -> Tensor:
    """Permutes channels so that pairs (j, j + rotated / 2), and the other channels, become pairs (j, j + D / 2)."""
    rest = x.shape[dim] - rotated
    low, high, first, second = x.split((rotated // 2, rotated // 2, rest // 2, rest - rest // 2), dim)
    return torch.cat((low, first, high, second), dim)


def _reordered(weights: CompressionWeights, rotated: int) -> CompressionWeights:
    """phi for channels in the order of `_halves`."""
    kind, pe, w1, b1, w2, b2 = weights.as_arguments()
    last = w1 if kind == "linear" else w2

    def out(t: Tensor | None) -> Tensor | None:
        return None if t is None else _halves(t, rotated)

    if w1 is not None and last is not None:
        w1 = _halves(w1.unflatten(1, (-1, last.shape[-1])), rotated, 2).flatten(1, 2)
    if kind == "linear":
        return CompressionWeights(kind, out(pe), out(w1), out(b1), w2, b2)
    return CompressionWeights(kind, out(pe), w1, b1, out(w2), out(b2))
