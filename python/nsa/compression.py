"""The compression function phi as a module, and its initial weights."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ._arguments import check_sizes, checked
from .config import CompressionWeights

NAMES = ("pe", "w1", "b1", "w2", "b2")


@checked
def initial_compression_weights(
    kind: str,
    kernel_size: int,
    head_dim: int,
    num_sets: int = 1,
    hidden: int | None = None,
    generator: torch.Generator | None = None,
) -> CompressionWeights:
    """float32 weights with which phi is exactly the mean of the block's tokens.

    For "mlp", W1 = [M, -M, R] and W2 = [I; -I; 0] with M the average, because SiLU(z) - SiLU(-z) = z; R ~ N(0, 1/(l*D))
    are the further hidden units. Biases and pe are zero.

    Args:
        kind: "mlp", "linear" or "mean".
        kernel_size: l, tokens in a compression block.
        head_dim: D of the keys or of the values.
        num_sets: P, the number of KV heads, or 1 for weights shared by all.
        hidden: E of the mlp, default 2 * D. Below 2 * D the weights cannot be the mean: they are Xavier's, with a
            warning.
        generator: of R, on any device; the weights are on torch's default device.

    Raises:
        ValueError: an unknown kind or a size below 1.
        TypeError: an argument of another type.
    """
    hidden = 2 * head_dim if hidden is None else hidden
    check_sizes(kernel_size=kernel_size, head_dim=head_dim, num_sets=num_sets, hidden=hidden)
    if kind == "mean":
        return CompressionWeights("mean")
    inputs = kernel_size * head_dim
    eye = torch.eye(head_dim)
    mean = (eye / kernel_size).repeat(num_sets, kernel_size, 1)
    pe = torch.zeros(num_sets, kernel_size, head_dim)
    b_out = torch.zeros(num_sets, head_dim)
    if kind == "linear":
        return CompressionWeights("linear", pe, mean, b_out)
    if kind != "mlp":
        raise ValueError(f"kind = {kind!r}: must be mean, linear or mlp")

    def normal(*shape: int) -> Tensor:
        device = None if generator is None else generator.device
        return torch.randn(*shape, generator=generator, device=device).to(eye.device)

    w1 = normal(num_sets, inputs, hidden)
    w2 = torch.zeros(num_sets, hidden, head_dim)
    if hidden < 2 * head_dim:
        warnings.warn(
            f"phi starts from Xavier weights, not as the mean: hidden = {hidden}, below 2 * head_dim = {2 * head_dim}",
            stacklevel=2,
        )
        w1 *= math.sqrt(2 / (inputs + hidden))
        w2 = normal(num_sets, hidden, head_dim) * math.sqrt(2 / (hidden + head_dim))
    else:
        w1 /= math.sqrt(inputs)
        w1[..., :head_dim] = mean
        w1[..., head_dim : 2 * head_dim] = -mean
        w2[:, :head_dim] = eye
        w2[:, head_dim : 2 * head_dim] = -eye
    return CompressionWeights("mlp", pe, w1, torch.zeros(num_sets, hidden), w2, b_out)


class CompressionFunction(nn.Module):
    """phi of keys or of values: the parameters pe, w1, b1, w2, b2 (those its kind has), float32 at first.

    Called with a dtype it gives CompressionWeights, so that hooks around a module's forward (FSDP's, say) see it used.

    Args: as for `initial_compression_weights`.
    """

    _instances: ClassVar[WeakSet[CompressionFunction]] = WeakSet()  # for the check of an optimizer's groups

    def __init__(
        self,
        kind: str,
        kernel_size: int,
        head_dim: int,
        num_sets: int = 1,
        hidden: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self._instances.add(self)
        self.kind, self.hidden = kind, hidden
        self.kernel_size, self.head_dim, self.num_sets = kernel_size, head_dim, num_sets
        for name, tensor in self._initial(generator):
            self.register_parameter(name, None if tensor is None else nn.Parameter(tensor))

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a copy
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._instances.add(self)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Gives the parameters, wherever they are now, the values that they were made with."""
        for name, tensor in self._initial(generator):
            if tensor is not None:
                with torch.no_grad():
                    getattr(self, name).copy_(tensor)

    def inputs_of(self, parameter: str) -> int:
        """Inputs of the matrix that a parameter belongs to, by its name.

        Not by its shape, which sharding changes. Pruned and parametrized weights have longer names.
        """
        if re.search(r"\b[wb]2", parameter):
            return self.hidden or 2 * self.head_dim
        return self.kernel_size * self.head_dim

    def _initial(self, generator: torch.Generator | None) -> list[tuple[str, Tensor | None]]:
        sizes = self.kernel_size, self.head_dim, self.num_sets, self.hidden
        return list(
            zip(NAMES, initial_compression_weights(self.kind, *sizes, generator).as_arguments()[1:], strict=True)
        )

    def forward(self, dtype: torch.dtype) -> CompressionWeights:
        """The parameters in the dtype of what is compressed."""
        # fully_shard makes the module a subclass of its own, and frees the parameters when this returns.
        copy = type(self) is not CompressionFunction
        tensors = (getattr(self, name) for name in NAMES)
        return CompressionWeights(self.kind, *(None if t is None else t.to(dtype, copy=copy) for t in tensors))

    def extra_repr(self) -> str:
        """Arguments for the module's repr."""
        sizes = f"kernel_size={self.kernel_size}, head_dim={self.head_dim}, num_sets={self.num_sets}"
        return f"{self.kind}, {sizes}" + ("" if self.hidden is None else f", hidden={self.hidden}")
