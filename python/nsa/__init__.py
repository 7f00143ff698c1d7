"""Native Sparse Attention (arXiv 2502.11089) for PyTorch."""

from . import _flops as _flops
from . import parallel, reference, replay, serving
from ._backends import Backend, backends, describe_backends, device_count, use_backend
from ._registration import ops as _ops
from .cache import ROLLBACK, KVCache
from .compression import CompressionFunction, initial_compression_weights
from .config import CompressionWeights, NSAConfig
from .decoding import MAX_DECODE_TOKENS, decode, prefill
from .functional import (
    combine,
    compress,
    compressed_attention,
    compressed_cu_seqlens,
    native_sparse_attention,
    nsa_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)
from .layer import NativeSparseAttention
from .optimizer import parameter_groups
from .rotary import rotary_tables, rotate
from .selector import selector_loss

__version__: str = _ops.version()

__all__ = [
    "MAX_DECODE_TOKENS",
    "ROLLBACK",
    "Backend",
    "CompressionFunction",
    "CompressionWeights",
    "KVCache",
    "NSAConfig",
    "NativeSparseAttention",
    "backends",
    "combine",
    "compress",
    "compressed_attention",
    "compressed_cu_seqlens",
    "decode",
    "describe_backends",
    "device_count",
    "initial_compression_weights",
    "native_sparse_attention",
    "nsa_attention",
    "parallel",
    "parameter_groups",
    "prefill",
    "reference",
    "replay",
    "rotary_tables",
    "rotate",
    "select_blocks",
    "selected_attention",
    "selector_loss",
    "serving",
    "sliding_window_attention",
    "use_backend",
]
