"""Hyperparameters of Native Sparse Attention and the weights of its compression function."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Any

from torch import Tensor

from ._arguments import check_type


@dataclass(frozen=True)
class NSAConfig:
    """Hyperparameters (arXiv 2502.11089, section 3; the defaults are the paper's), all in tokens or blocks.

    Attributes:
        kernel_size: l, tokens in a compression block.
        kernel_stride: d, tokens between the starts of compression blocks; divides kernel_size and block_size.
        block_size: l', tokens in a selection block, a positive multiple of 16.
        topk: n, selection blocks per query, forced ones included; at least init_blocks + local_blocks.
        init_blocks: first blocks, always selected.
        local_blocks: last blocks up to the query's own, always selected.
        window_size: w, the sliding window in tokens, the query itself included.

    Raises:
        ValueError: a value breaks a rule; the message names the parameter, its value and the rule.
    """

    kernel_size: int = 32
    kernel_stride: int = 16
    block_size: int = 64
    topk: int = 16
    init_blocks: int = 1
    local_blocks: int = 2
    window_size: int = 512

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            try:
                whole = index(value)
            except TypeError:
                raise ValueError(f"{name} = {value!r}: must be an integer") from None
            if isinstance(value, bool) or not -(2**31) <= whole < 2**31:
                raise ValueError(f"{name} = {value!r}: must be an integer of 32 bits")
            object.__setattr__(self, name, whole)

        def require(holds: bool, name: str, rule: str) -> None:
            if not holds:
                raise ValueError(f"{name} = {getattr(self, name)}: must be {rule}")

        require(self.kernel_size >= 1, "kernel_size", ">= 1")
        require(self.kernel_stride >= 1, "kernel_stride", ">= 1")
        require(self.block_size >= 16 and self.block_size % 16 == 0, "block_size", "a positive multiple of 16")
        for whole_name in ("kernel_size", "block_size"):
            whole = getattr(self, whole_name)
            require(whole % self.kernel_stride == 0, "kernel_stride", f"a divisor of {whole_name} = {whole}")
        require(self.init_blocks >= 0, "init_blocks", ">= 0")
        require(self.local_blocks >= 1, "local_blocks", ">= 1")
        require(self.window_size >= 1, "window_size", ">= 1")
        require(self.topk >= 1, "topk", ">= 1")
        forced = f">= init_blocks + local_blocks = {self.init_blocks} + {self.local_blocks}"
        require(self.topk >= self.init_blocks + self.local_blocks, "topk", forced)

    @classmethod
    def recipe(cls) -> NSAConfig:
        """The default setting of `nsa train`.

        Byte-level models of 24 to 28 million parameters reached a lower held-out loss with it than with full attention
        (docs/evidence.md). Finer blocks than the paper's: compression blocks of 8 tokens next to each other, 32
        selected blocks of 32. It goes with one key and one value projection for the three branches (share_kv in
        `NativeSparseAttention`), a partial RoPE with base 500000 (partial_rotary_factor=0.5), `selector_loss` with a
        weight of 0.1, and `parameter_groups` for the optimizer.
        """
        return cls(kernel_size=8, kernel_stride=8, block_size=32, topk=32)

    def num_compressed(self, length: int) -> int:
        """N_c(length): compression blocks that lie wholly in `length` tokens."""
        return 0 if length < self.kernel_size else (length - self.kernel_size) // self.kernel_stride + 1

    def as_list(self) -> list[int]:
        """The members in their order, as the operators in torch.ops.nsa take them."""
        return [
            self.kernel_size,
            self.kernel_stride,
            self.block_size,
            self.topk,
            self.init_blocks,
            self.local_blocks,
            self.window_size,
        ]


@dataclass(frozen=True)
class CompressionWeights:
    """Weights of the compression function phi of keys or of values (eq. 7), in the dtype of what is compressed.

    P is the number of KV heads, or 1 for weights shared by all of them; l = kernel_size, D the head dimension.

    Attributes:
        kind: "mlp" (flatten -> E -> SiLU -> D, the paper's), "linear" (flatten -> D), or "mean" (no weights).
        pe: (P, l, D), added to the tokens of a block, or None.
        w1: linear (P, l*D, D), mlp (P, l*D, E); row r*D + c weighs channel c of the block's token r.
        b1: linear (P, D), mlp (P, E), or None.
        w2: mlp (P, E, D).
        b2: mlp (P, D), or None.

    Raises:
        TypeError: kind is no string, or a weight no tensor.
    """

    kind: str = "mlp"
    pe: Tensor | None = None
    w1: Tensor | None = None
    b1: Tensor | None = None
    w2: Tensor | None = None
    b2: Tensor | None = None

    def __post_init__(self) -> None:
        check_type("kind", self.kind, str)
        for name in ("pe", "w1", "b1", "w2", "b2"):
            check_type(name, getattr(self, name), Tensor | None)

    def to(self, *args: Any, **kwargs: Any) -> CompressionWeights:
        """The weights on another device or in another dtype; arguments as of Tensor.to."""
        kind, *tensors = self.as_arguments()
        return CompressionWeights(kind, *(None if t is None else t.to(*args, **kwargs) for t in tensors))

    def as_arguments(self) -> tuple[str, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """The members in their order, as the operators in torch.ops.nsa take them."""
        return self.kind, self.pe, self.w1, self.b1, self.w2, self.b2
