"""Options of functions that return_indices gives another result. For type checkers alone: nothing runs this."""

from torch import Tensor
from typing_extensions import TypedDict

from .config import CompressionWeights, NSAConfig


class _Common(TypedDict, total=False):
    k_swa: Tensor | None
    v_swa: Tensor | None
    indices: Tensor | None
    softmax_scale: float | None


class _Layer(TypedDict, total=False):
    weights_k: CompressionWeights | None
    weights_v: CompressionWeights | None
    k_slc: Tensor | None
    v_slc: Tensor | None
    rope: tuple[Tensor, Tensor] | None


class NSAAttention(_Common, total=False):
    cfg: NSAConfig | None
    noise: float
    seed: int
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None


class NativeSparseAttention(NSAAttention, _Layer, total=False):
    recompute_compressed: bool


class Decode(_Common, _Layer, total=False):
    num_new: Tensor | None


class Prefill(Decode, total=False):
    first_chunk: bool
