"""Rotary position embedding: channel pairs (j, j + D/2) turn by position * theta^(-2j/D)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._arguments import checked


@checked
def rotary_tables(positions: Tensor, head_dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of integer positions (...), each float32 (..., head_dim / 2).

    Raises:
        ValueError: head_dim is not even and positive, or theta not positive and finite.
    """
    check_rotation(head_dim, "theta", theta)
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
    angles = positions[..., None] * theta ** (-pairs / head_dim)
    return angles.cos().float(), angles.sin().float()


def check_rotation(head_dim: int, name: str, theta: float) -> None:
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim = {head_dim}: must be even to be rotated")
    if not (0 < theta < math.inf):
        raise ValueError(f"{name} = {theta}: must be positive and finite")


@checked
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x (..., S, heads, D) by its tokens' rows cos, sin (..., S, D/2), in float32; result in x's dtype."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
