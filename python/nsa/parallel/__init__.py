"""Sequences that are divided over several processes (context parallelism), on torch.distributed's process groups."""

from .attention import native_sparse_attention
from .exchange import ContextParallel

__all__ = ["ContextParallel", "native_sparse_attention"]
