"""Native Sparse Attention (arXiv 2502.11089) for PyTorch."""

from .config import CompressionWeights, NSAConfig
from .functional import (
    combine,
    compress,
    compressed_attention,
    compressed_cu_seqlens,
    nsa_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)

__all__ = [
    "CompressionWeights",
    "NSAConfig",
    "combine",
    "compress",
    "compressed_attention",
    "compressed_cu_seqlens",
    "nsa_attention",
    "select_blocks",
    "selected_attention",
    "sliding_window_attention",
]
