"""The attention of a sparse layer in vLLM: its pages, its metadata, its call of `nsa.serving.decode_paged`.

vLLM sees full attention with pages of an unusual size. A page holds everything of its tokens, so prefix caching,
preemption and rejected drafts need no code here.
"""

from __future__ import annotations

import math
import os
import weakref
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
import vllm.model_executor.layers.attention  # noqa: F401  # registers unified_attention_with_output
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

from .._files import open_regular
from ..cache import _index_type
from ..compression import CompressionFunction
from ..config import NSAConfig
from ..decoding import MAX_DECODE_TOKENS
from ..serving import LayerCache, decode_paged
from . import FP8, records_selections


@dataclass(frozen=True)
class PageLayout:
    """A layer's page: raw keys, rotated keys, values, compressed keys and values, one after the other.

    The window reads the same keys and values as the selection, and raw values are the values. A raw key is needed until
    its compression blocks are complete, so they have fewer slots than tokens, used in turn. In fp8 all but the raw
    tokens is stored in float8_e4m3fn, and there are raw values, too.
    """

    cfg: NSAConfig
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    fp8: bool = False

    @property
    def raw_slots(self) -> int:
        """Raw keys in a page: an open block's and a step's, or those of all tokens if no divisor is large enough."""
        least = self.cfg.kernel_size - 1 + MAX_DECODE_TOKENS
        fitting = (n for n in range(16, self.page_size, 16) if n >= least and self.page_size % n == 0)
        return next(fitting, self.page_size)

    @property
    def parts(self) -> list[tuple[int, torch.dtype]]:
        """Rows (Hkv, D) and data types of the parts; those of the largest type are first, which aligns all."""
        entries = self.page_size // self.cfg.kernel_stride
        raw, stored = (2, torch.float8_e4m3fn) if self.fp8 else (1, self.dtype)
        rows = self.page_size, self.page_size, entries, entries
        return [(self.raw_slots, self.dtype)] * raw + [(count, stored) for count in rows]

    @property
    def stored_dtype(self) -> torch.dtype:
        """The data type of the page as vLLM sees it, bytes in fp8."""
        return torch.uint8 if self.fp8 else self.dtype

    @property
    def head_size(self) -> int:
        """Head size with which vLLM's page, of page_size keys and values, has room for the parts."""
        needed = sum(rows * stored.itemsize for rows, stored in self.parts) * self.head_dim
        return math.ceil(needed / (2 * self.page_size * self.stored_dtype.itemsize))

    def views(self, cache: Tensor) -> LayerCache:
        """The parts of vLLM's memory (num_blocks, ...), whose blocks are contiguous."""
        row, size = self.num_kv_heads * self.head_dim, cache.element_size()
        begin, page, parts = cache.storage_offset() * size, cache.stride(0) * size, []
        for rows, dtype in self.parts:
            shape = cache.shape[0], rows, self.num_kv_heads, self.head_dim
            strides = page // dtype.itemsize, row, self.head_dim, 1
            part = torch.empty(0, dtype=dtype, device=cache.device)
            parts.append(part.set_(cache.untyped_storage(), begin // dtype.itemsize, shape, strides))
            begin += rows * row * dtype.itemsize
        *raw, k, v, k_c, v_c = parts
        return LayerCache(k, v, k_c, v_c, None, None, raw[0], raw[1] if self.fp8 else None)


def selections_file(vllm_config: VllmConfig) -> Path:
    """Shared memory of the engine's processes."""
    return Path(f"/dev/shm/nsa-{vllm_config.instance_id}-{vllm_config.parallel_config.data_parallel_rank}")


def map_selections(vllm_config: VllmConfig, num_pages: int) -> Tensor:
    """The blocks that each token selected: (num_pages * block_size + 1, layers, Hkv, topk), in host memory.

    A token has the row of its slot in the pages, so prefix caching, preemption and rejected drafts need no code.
    Workers write it and the scheduler reads it. Padding, whose slot is -1, has the last row.
    """
    config, cfg = vllm_config.model_config.hf_config, vllm_config.model_config.hf_config.nsa_config()
    layers = config.num_hidden_layers - len(set(config.dense_layers))
    rows = num_pages * vllm_config.cache_config.block_size + 1
    shape = rows, layers, config.num_key_value_heads, cfg.topk
    dtype, file = _index_type(vllm_config.model_config.max_model_len, cfg), selections_file(vllm_config)
    # In a folder where everybody may have made a link, a FIFO or a file of this name before.
    with open_regular(file, "ab", follow=False) as memory:
        if os.fstat(memory.fileno()).st_uid != os.geteuid():
            raise ValueError(f"{file}: must be a file of this user")
        os.posix_fallocate(memory.fileno(), 0, math.prod(shape) * dtype.itemsize)  # fails here if there is no room
    return torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=dtype).view(shape)


def _on_device(memory: Tensor, device: torch.device, owner: object) -> Tensor:
    """The same memory for kernels of the device, which `owner` keeps as long as it lives."""
    if device.type == "cpu":
        return memory
    from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    torch.cuda.check_error(runtime.cudaHostRegister(address, memory.nbytes, 0))
    # Before it is unmapped, or another engine of this process could not register memory at this address.
    weakref.finalize(owner, runtime.cudaHostUnregister, address).atexit = False
    return get_accelerator_view_from_cpu_tensor(memory)


@dataclass
class Part:
    """Requests of a step that share a call, and their rows of the packed tensors."""

    rows: slice
    max_query_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    block_table_raw: Tensor
    slots: Tensor


@dataclass
class NsaMetadata(AttentionMetadata):
    """A step: decodes and short chunks, then longer chunks, which have other kernels."""

    parts: list[Part]
    overflow: Tensor
    selections: Tensor | None


class NsaMetadataBuilder(AttentionMetadataBuilder[NsaMetadata]):
    """Makes the metadata. What a captured graph reads has the same address in every step."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold = MAX_DECODE_TOKENS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        layout = layer.layout
        if kv_cache_spec.block_size != layout.page_size:
            wrong = f"block_size = {layout.page_size}: the engine uses {kv_cache_spec.block_size}"
            raise ValueError(f"{wrong}: all attention backends of the model must support pages of {layout.page_size}")
        self.page_size, self.columns = layout.page_size, layout.page_size // layout.raw_slots
        # In a shorter table all blocks are selected, which has other kernels: bits would depend on the step's requests.
        self.least_tokens = layout.cfg.topk * layout.cfg.block_size + 1
        self.overflow = torch.zeros(1, dtype=torch.int32, device=device)
        self.max_requests = vllm_config.scheduler_config.max_num_seqs
        self.repeated: Tensor | None = None
        self.layer = layer
        self.selections: Tensor | None = None

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> NsaMetadata:
        """Metadata of a step."""
        m = common_attn_metadata
        requests = m.num_reqs
        starts = m.query_start_loc_cpu[: requests + 1].tolist()
        new = [end - begin for begin, end in pairwise(starts)]
        decodes = next((i for i, count in enumerate(new) if count > MAX_DECODE_TOKENS), requests)
        table = m.block_table_tensor[:requests]
        raw = self._repeat(table)
        if self.selections is None and records_selections(self.vllm_config):
            memory = map_selections(self.vllm_config, self.layer.kv_cache.shape[0])
            self.selections = _on_device(memory, table.device, self)
        parts = []
        for first, last in ((0, decodes), (decodes, requests)):
            if first == last:
                continue
            whole = first == 0 and last == requests
            begin = m.query_start_loc[first : last + 1]
            # Chunks take memory for as many tokens as their table has room for. Graphs replay decodes.
            tokens = max(m.max_seq_len, self.least_tokens)
            pages = table.shape[1] if last == decodes else -(-tokens // self.page_size)
            rows = slice(starts[first], None if last == requests else starts[last])
            parts.append(
                Part(
                    rows,
                    m.max_query_len if whole else max(new[first:last]),
                    begin - starts[first] if first else begin,
                    m.seq_lens[first:last],
                    table[first:last, :pages],
                    raw[first:last, : pages * self.columns],
                    m.slot_mapping[rows],
                )
            )
        return NsaMetadata(parts, self.overflow, self.selections)

    def _repeat(self, table: Tensor) -> Tensor:
        """The table of raw keys: each page in as many columns as its slots are used in turn."""
        if self.columns == 1:
            return table
        rows, pages = table.shape
        if self.repeated is None:
            self.repeated = table.new_zeros(max(rows, self.max_requests), pages, self.columns)
        if rows > self.repeated.shape[0] or pages != self.repeated.shape[1]:
            raise ValueError(f"block_table: {tuple(table.shape)}: must be at most {tuple(self.repeated.shape[:2])}")
        return self.repeated[:rows].copy_(table[:, :, None]).flatten(1)


class NsaImpl(AttentionImpl[NsaMetadata]):
    """The body of vLLM's attention operator.

    That operator has three inputs: q, keys with values behind them, gates. Piecewise CUDA graphs split at vLLM's own
    operators only: another one would be captured without metadata.
    """

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def forward(
        self,
        layer: NsaAttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: NsaMetadata | None,
        output: Tensor,
        *_: object,
        **__: object,
    ) -> Tensor:
        """Appends, compresses and attends; writes to `output`."""
        if attn_metadata is None:  # a run that measures memory
            return output.zero_()
        raw, values = key.chunk(2, dim=1)
        for part in attn_metadata.parts:
            rows = part.rows
            selected = decode_paged(
                *(query[rows], raw[rows], values[rows], value[rows], layer.cache()),
                cfg=layer.layout.cfg,
                query_start_loc=part.query_start_loc,
                seq_lens=part.seq_lens,
                block_table=part.block_table,
                block_table_cmp=part.block_table_raw,
                max_query_len=part.max_query_len,
                overflow=attn_metadata.overflow,
                return_indices=True,
                out=output[rows],
                **layer.weights(),
            )[1]
            if attn_metadata.selections is not None:
                memory = attn_metadata.selections[:, layer.index, layer.kv_heads]
                memory[part.slots] = selected[: part.slots.shape[0]].to(memory.dtype)
        return output


class NsaBackend(AttentionBackend):
    """What vLLM asks about the attention of a sparse layer."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        """Not "NSA", which in vLLM means DeepSeek's sparse attention."""
        return "NATIVE_SPARSE"

    @staticmethod
    def get_impl_cls() -> type[NsaImpl]:
        """The operator's body."""
        return NsaImpl

    @staticmethod
    def get_builder_cls() -> type[NsaMetadataBuilder]:
        """The builder of a step's metadata."""
        return NsaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(*_: object) -> list[int | MultipleOf]:
        """Sizes of pages."""
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """For vLLM 0.26. Blocks first: it clears new blocks by that dimension."""
        return num_blocks, block_size, num_kv_heads, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """For vLLM 0.26: a block is contiguous."""
        if include_num_layers_dimension:
            raise NotImplementedError("memory of several layers in one tensor")
        return 0, 1, 2, 3

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """The same for vLLM 0.32: layouts whose blocks are contiguous."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return KVCacheLayout.LBNHC, KVCacheLayout.LBHNC


class NsaAttentionLayer(nn.Module, AttentionLayerBase):
    """A sparse layer's memory and operator; the engine binds `kv_cache`."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        cfg: NSAConfig,
        weights: tuple[CompressionFunction, CompressionFunction, tuple[Tensor, Tensor]],
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        super().__init__()
        self.num_heads, self.dtype = num_heads, vllm_config.model_config.dtype
        self.cache_dtype = vllm_config.cache_config.cache_dtype
        page = cfg, vllm_config.cache_config.block_size, num_kv_heads, head_dim
        self.layout = PageLayout(*page, self.dtype, self.cache_dtype in FP8)
        self.sources = weights  # φ and the tables of rotation; a tuple, or φ would be registered twice
        self._weights: dict[str, Any] | None = None
        self.layer_name = prefix
        self.impl = NsaImpl()
        self.kv_cache = torch.tensor([])
        self._bound: tuple[int, LayerCache] | None = None
        layers = vllm_config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"Duplicate layer name: {prefix}")
        self.index = sum(isinstance(layer, NsaAttentionLayer) for layer in layers.values())  # among the sparse layers
        first = get_tensor_model_parallel_rank() * num_kv_heads
        self.kv_heads = slice(first, first + num_kv_heads)
        layers[prefix] = self

    def get_attn_backend(self) -> type[NsaBackend]:
        """The backend."""
        return NsaBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> FullAttentionSpec:
        """Full attention whose head size gives the page its size."""
        layout = self.layout
        return FullAttentionSpec(
            block_size=layout.page_size,
            num_kv_heads=layout.num_kv_heads,
            head_size=layout.head_size,
            dtype=layout.stored_dtype,
            kv_quant_mode=get_kv_quant_mode(self.cache_dtype),
        )

    def cache(self) -> LayerCache:
        """Views of the memory that the engine has bound."""
        memory = self.kv_cache
        if self._bound is None or self._bound[0] != memory.data_ptr():
            self._bound = memory.data_ptr(), self.layout.views(memory)
        return self._bound[1]

    def weights(self) -> dict[str, Any]:
        """Weights as `decode_paged` takes them: the parameters themselves, which vLLM may fill again."""
        if self._weights is None:
            phi_k, phi_v, rope = self.sources
            self._weights = {"weights_k": phi_k(self.dtype), "weights_v": phi_v(self.dtype), "rope": rope}
            if self.layout.fp8:
                one = torch.ones(self.layout.num_kv_heads, device=self.kv_cache.device)
                self._weights |= {"k_scale": one, "v_scale": one}
        return self._weights

    def forward(self, q: Tensor, kv: Tensor, gates: Tensor) -> Tensor:
        """Attention of packed new tokens, which are not rotated: q (T, H, D), kv (T, 2 * Hkv, D), gates (T, H, 3)."""
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        torch.ops.vllm.unified_attention_with_output(q, kv, gates, o, _encode_layer_name(self.layer_name))
        return o
