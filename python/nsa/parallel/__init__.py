"""Sequences and heads that are divided over several processes, on torch.distributed's process groups."""

from .attention import native_sparse_attention
from .exchange import ContextParallel
from .tensor import shard_heads

__all__ = ["ContextParallel", "native_sparse_attention", "shard_heads"]
