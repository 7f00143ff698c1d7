"""Sequences and heads that are divided over several processes, on torch.distributed's process groups."""

from typing import TYPE_CHECKING, Any

from .attention import native_sparse_attention
from .exchange import ContextParallel

if TYPE_CHECKING:
    from .tensor import shard_heads
else:

    def __getattr__(name: str) -> Any:
        """`shard_heads` imports torch's DTensor, which takes a quarter of the time of `import nsa`, when it is used."""
        if name != "shard_heads":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from .tensor import shard_heads

        return shard_heads

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = ["ContextParallel", "native_sparse_attention", "shard_heads"]
