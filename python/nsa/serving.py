"""Continuous batching over memory of the caller: one step for decodes and chunks of prompts together.

Names and meanings of the arguments are vLLM's. A layer's keys and values for the selected branch lie in pages that
`block_table` assigns to requests, its compressed tokens in pages of their own (`block_table_c`), and what the window
and the compression of the next block need in rings, of which each running request has one slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ._arguments import check_sizes, check_type, check_usable, checked, validates_devices
from ._first_chunk import prefill_empty_rows
from ._pages import check_sharing
from ._registration import call, ops
from .cache import ROLLBACK, _multiple_of_16, _raw_dtype, check_rings, head_scales
from .config import CompressionWeights, NSAConfig
from .decoding import MAX_DECODE_TOKENS, _step
from .functional import MEAN, branch_names
from .rotary import RotaryInputs, check_positions, order_channels

__all__ = ["LayerCache", "Step", "allocate", "compressed_page_size", "decode_paged", "fork"]


@checked
def compressed_page_size(cfg: NSAConfig, page_size: int) -> int:
    """Compressed tokens in a page of `block_table_c` for pages of page_size tokens, as `nsa.KVCache` has them.

    Raises:
        ValueError: page_size is below 1.
        TypeError: an argument of another type.
    """
    check_type("cfg", cfg, NSAConfig)
    check_sizes(2**31 - 16, page_size=page_size)
    return _multiple_of_16(-(-page_size // cfg.kernel_stride))


class LayerCache(NamedTuple):
    """The memory of one layer, which the caller owns: any tensors of these shapes.

    Attributes:
        k_slc, v_slc: (num_pages, page_size, Hkv, Dk or Dv), page_size a multiple of 16.
        k_c, v_c: (num_pages_c, page_size_c, Hkv, Dk or Dv), likewise, of compressed tokens.
        k_swa_ring, v_swa_ring: (num_slots, window_size + 32, Hkv, Dk or Dv).
        k_cmp_ring, v_cmp_ring: (num_slots, kernel_size + 32, Hkv, Dk or Dv).

    `decode_paged` also takes pages in place of the rings, and compressed tokens in pages of page_size / kernel_stride.
    There, k_swa_ring and v_swa_ring may both be None: the window reads k_slc and v_slc. v_cmp_ring may be None: raw
    values are v_slc.
    """

    k_slc: Tensor
    v_slc: Tensor
    k_c: Tensor
    v_c: Tensor
    k_swa_ring: Tensor | None
    v_swa_ring: Tensor | None
    k_cmp_ring: Tensor
    v_cmp_ring: Tensor | None

    def _check_tensors(self, name: str) -> None:
        """Raises TypeError or ValueError for a member that is no tensor or has not the memory it says."""
        for member, tensor in zip(self._fields, self, strict=True):
            check_type(f"{name}.{member}", tensor, Tensor | None if member in _SHARED else Tensor)
            check_usable(f"{name}.{member}", tensor)


_SHARED = ("k_swa_ring", "v_swa_ring", "v_cmp_ring")
"""Members that may be None where a layer's memory for the selected branch has them."""


_NAMES = (
    {f"cache.{name}": f"layer.{name}" for name in LayerCache._fields}
    | {f"cache.{name}": name for name in ("overflow", "k_scale", "v_scale")}
    | {f"cache.block_table{end}": f"block_table{end}" for end in ("", "_c", "_swa", "_cmp")}
    | {"cache.cache_seqlens": "seq_lens"}
)
"""Names of the operators' arguments here, for messages."""


@checked
def allocate(
    cfg: NSAConfig,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    *,
    page_size: int,
    num_pages: int,
    num_pages_c: int,
    num_slots: int,
    dtype: torch.dtype = torch.float32,
    raw_dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
) -> LayerCache:
    """The memory of a layer, zeros. `num_slots`: the most requests that run at a time. The rest as in LayerCache.

    dtype, raw_dtype: as in `nsa.KVCache`.

    Raises:
        ValueError: a size or dtype is not allowed.
        RuntimeError: torch cannot allocate the memory, or does not know the device.
    """
    sizes = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "page_size": page_size, "num_slots": num_slots}
    check_sizes(2**31 - 16, **sizes, num_pages=num_pages, num_pages_c=num_pages_c, v_head_dim=v_head_dim)
    if page_size % 16:
        raise ValueError(f"page_size = {page_size}: must be a multiple of 16")

    raw_dtype = _raw_dtype(dtype, raw_dtype)
    check_rings(cfg)

    def both(*shape: int, dtype: torch.dtype = dtype) -> list[Tensor]:
        dims = head_dim, head_dim if v_head_dim is None else v_head_dim
        return [torch.zeros(*shape, num_kv_heads, dim, dtype=dtype, device=device) for dim in dims]

    return LayerCache(
        *both(num_pages, page_size),
        *both(num_pages_c, compressed_page_size(cfg, page_size)),
        *both(num_slots, cfg.window_size + ROLLBACK),
        *both(num_slots, cfg.kernel_size + ROLLBACK, dtype=raw_dtype),
    )


class _Rows:
    """A step's view of a cache: the memory of contiguous ring slots and their tables."""

    k_scale: Tensor | None
    v_scale: Tensor | None
    _selections = None  # not recorded

    def __init__(self, step: Step, first: int, lengths: Tensor, table: Tensor, table_c: Tensor) -> None:
        self.cfg, self.max_positions, self.overflow = step.cfg, step.max_length, step.overflow
        self.slots = slice(first, first + lengths.shape[0])
        self.lengths, self.tables = lengths, (table, table_c)
        self.layer: LayerCache | None = None
        self.cache_seqlens = lengths

    def of(self, layer: LayerCache, k_scale: Tensor | None, v_scale: Tensor | None) -> _Rows:
        """Binds the memory of a layer. The operators advance the lengths, of which each layer has a copy."""
        self.layer, self.cache_seqlens = layer, self.lengths.clone()
        self.k_scale, self.v_scale = k_scale, v_scale
        return self

    def tensors(self) -> tuple[Tensor, ...]:
        assert self.layer is not None
        rings = (ring[self.slots] for ring in _rings(self.layer))
        return (*self.layer[:4], *rings, self.cache_seqlens, self.overflow, *self.tables)


class Step:
    """The schedule of one engine step: made once, used by all layers.

    A request with at most 16 new tokens is a decode (or a draft to verify), and all decodes run as one batch; every
    other request is a chunk of a prompt, which runs by itself after them. The batch spans the ring slots from the
    lowest to the highest one of a decode: give running requests low slots. Nothing waits for the device.

    To take tokens back (rejected drafts), give smaller seq_lens in the next step: at most 32 below the longest that the
    request has been. The pages must not be shared from there on.

    Args:
        query_start_loc: (num_reqs + 1) on the host, where the new tokens of each request begin in the packed tensors.
        seq_lens: int32 (num_reqs), tokens of each request with the new ones; may be on a GPU, as the next three.
        block_table: int32 (num_reqs, max_pages), the pages of each request, -1: none.
        block_table_c: int32 (num_reqs, max_pages_c), of its compressed tokens: pages for
            cfg.num_compressed(seq_lens) of them.
        slots: the ring slot of each request, on the host.
        cfg: hyperparameters.
        max_length: an upper bound of seq_lens.
        slot_mapping: int64 (tokens), where each new token lies in the pool of pages, page * page_size + offset. Follows
            from block_table and is only compared with it.
        page_size: tokens in a page of the layers, for slot_mapping and for the checks of tables and capacity.
        seq_lens_cpu_upper_bound: (num_reqs) on the host, at least seq_lens; default seq_lens, if they are on the host.
            A chunk that has as many tokens begins its prompt and runs as `nsa.prefill(first_chunk=True)`, on a GPU
            several times as fast.

    Lengths and tables are copied: the caller may rewrite its tensors before `attend`. Values in host memory are
    checked, values on a GPU with NSA_VALIDATE=1 only; without, a request beyond its capacity writes nothing, gets o = 0
    and sets the flag that `check` reads.

    Raises:
        ValueError: an argument is not allowed.
        TypeError: it is of another type.
    """

    @checked
    def __init__(
        self,
        query_start_loc: Sequence[int] | Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        block_table_c: Tensor,
        slots: Sequence[int] | Tensor,
        cfg: NSAConfig,
        *,
        max_length: int,
        page_size: int,
        slot_mapping: Tensor | None = None,
        seq_lens_cpu_upper_bound: Sequence[int] | Tensor | None = None,
    ) -> None:
        starts, slots = _integers("query_start_loc", query_start_loc), _integers("slots", slots)
        requests = len(starts) - 1
        if requests < 1 or starts[0] != 0 or any(b <= a for a, b in pairwise(starts)):
            raise ValueError(f"query_start_loc: {starts}: must begin with 0 and ascend, a token at least per request")
        if len(slots) != requests or len(set(slots)) != requests or min(slots) < 0:
            raise ValueError(f"slots: {slots}: must be {requests} different numbers >= 0, one per request")
        check_sizes(2**31 - 16, max_length=max_length, page_size=page_size)
        for name, tensor, shape in (
            ("seq_lens", seq_lens, f"({requests},)"),
            ("block_table", block_table, f"({requests}, max_pages)"),
            ("block_table_c", block_table_c, f"({requests}, max_pages_c)"),
        ):
            check_type(name, tensor, Tensor)
            dims = 1 if name == "seq_lens" else 2
            if tensor.dtype != torch.int32 or tensor.dim() != dims or tensor.shape[0] != requests:
                what = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
                raise ValueError(f"{name}: {what}: must be int32 {shape}")
            if tensor.device != seq_lens.device:
                raise ValueError(f"{name}: on {tensor.device}: must be on {seq_lens.device} as seq_lens")
            check_usable(name, tensor)
        check_type("slot_mapping", slot_mapping, Tensor | None)
        for name, values in (("seq_lens", seq_lens), ("slot_mapping", slot_mapping)):
            if values is not None and values.is_meta:
                raise ValueError(f"{name}: on meta: must be on the cpu or a GPU")
        if slot_mapping is not None and (slot_mapping.dtype != torch.int64 or slot_mapping.shape != (starts[-1],)):
            what = f"{str(slot_mapping.dtype).removeprefix('torch.')} {tuple(slot_mapping.shape)}"
            raise ValueError(f"slot_mapping: {what}: must be int64 ({starts[-1]},)")
        check_usable("slot_mapping", slot_mapping)
        # The caller may rewrite its tensors for the next step while layers run this one.
        seq_lens, block_table, block_table_c = (
            t.clone(memory_format=torch.contiguous_format) for t in (seq_lens, block_table, block_table_c)
        )
        self.cfg, self.max_length, self.num_tokens, self.num_slots = cfg, max_length, starts[-1], max(slots) + 1
        self._page_sizes = {"k_slc": page_size, "k_c": compressed_page_size(cfg, page_size)}
        self._last_pages: dict[str, int] = {}
        new = [b - a for a, b in pairwise(starts)]
        if not seq_lens.is_cuda or validates_devices():
            _check_values(new, seq_lens, block_table, block_table_c, cfg, max_length, page_size, slot_mapping)
            for name, table in (("block_table", block_table), ("block_table_c", block_table_c)):
                self._last_pages[name] = int(table.max()) if table.numel() else -1
        bounds = known = None if seq_lens.is_cuda else seq_lens.tolist()
        if seq_lens_cpu_upper_bound is not None:
            bounds, least = _integers("seq_lens_cpu_upper_bound", seq_lens_cpu_upper_bound), known or new
            if len(bounds) != requests or any(bound < length for bound, length in zip(bounds, least, strict=True)):
                what = "seq_lens" if known else "the new tokens"
                raise ValueError(f"seq_lens_cpu_upper_bound: {bounds}: must be at least {least}, {what}")
        device = seq_lens.device
        self.overflow = torch.zeros(1, dtype=torch.int32, device=device)
        """int32 (1); not 0 when a request exceeded its capacity."""

        def upload(numbers: Sequence[int], dtype: torch.dtype) -> Tensor:
            host = torch.tensor(numbers, dtype=dtype, device="cpu")
            return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host

        before = seq_lens - upload(new, torch.int32)
        self._chunks = [
            (
                slice(starts[r], starts[r + 1]),
                _Rows(self, slots[r], before[r : r + 1], *tables),
                bounds is not None and bounds[r] == new[r],
            )
            for r in range(requests)
            if new[r] > MAX_DECODE_TOKENS
            for tables in [(block_table[r : r + 1], block_table_c[r : r + 1])]
        ]
        self._decodes: _Rows | None = None
        decodes = [r for r in range(requests) if new[r] <= MAX_DECODE_TOKENS]
        if decodes:
            first = min(slots[r] for r in decodes)
            rows, self._most = max(slots[r] for r in decodes) + 1 - first, max(new[r] for r in decodes)
            here = upload([slots[r] - first for r in decodes], torch.int64)
            chosen = upload(decodes, torch.int64)
            numbers = torch.zeros(rows, dtype=torch.int32, device=device)
            self._num_new = numbers.index_copy(0, here, upload([new[r] for r in decodes], torch.int32))
            tables = (table.new_full((rows, table.shape[1]), -1) for table in (block_table, block_table_c))
            self._decodes = _Rows(
                self,
                first,
                numbers.index_copy(0, here, before[chosen]),
                *(
                    table.index_copy_(0, here, given[chosen])
                    for table, given in zip(tables, (block_table, block_table_c), strict=True)
                ),
            )
            tokens = [(starts[r] + i, (slots[r] - first) * self._most + i) for r in decodes for i in range(new[r])]
            self._from = upload([source for source, _ in tokens], torch.int64)
            self._to = upload([target for _, target in tokens], torch.int64)

    @checked
    def attend(
        self,
        layer: LayerCache,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Tensor,
        *,
        weights_k: CompressionWeights | None = None,
        weights_v: CompressionWeights | None = None,
        k_slc: Tensor | None = None,
        v_slc: Tensor | None = None,
        k_swa: Tensor | None = None,
        v_swa: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        softmax_scale: float | None = None,
    ) -> Tensor:
        """Appends the new tokens of every request to the layer's memory and attends. No gradient.

        Args:
            layer: the layer's memory, is changed.
            q, k, v, gates: packed, (tokens, heads, ...), otherwise as in `nsa.decode`, as the options are.
            k_scale, v_scale: of a layer in float8_e4m3fn, as in `decode_paged`.

        Returns:
            o: (tokens, H, Dv).

        Raises:
            ValueError: an argument is not allowed; no memory was changed then.
        """
        _check_layer(layer)
        several = (self._decodes is not None) + len(self._chunks) > 1  # one operator alone checks before it writes
        if several:
            check_usable("layer", layer)
        k_scale, v_scale = _scales_of(layer, k_scale, v_scale)
        for name, ring in zip(LayerCache._fields[4:], _rings(layer), strict=True):
            if ring.shape[0] < self.num_slots:
                raise ValueError(f"layer: {name}: {ring.shape[0]} slots: must have {self.num_slots}")
        for name, size in self._page_sizes.items():
            if (found := getattr(layer, name).shape[1]) != size:
                raise ValueError(f"layer: {name}: pages of {found} tokens: must be {size}, by page_size of the step")
        given = [q, k, v, k_slc, v_slc, k_swa, v_swa, gates]
        names = ("q", "k", "v", "k_slc", "v_slc", "k_swa", "v_swa", "gates")
        for name, tensor in zip(names, given, strict=True):  # as a chunk's operator would, after the decodes
            if tensor is None:
                continue
            check_type(name, tensor, Tensor)
            if tensor.dim() != 3 or tensor.shape[0] != self.num_tokens:
                raise ValueError(f"{name}: {tuple(tensor.shape)}: must be ({self.num_tokens}, heads, ...)")
            if tensor.shape[2] > 1 and tensor.stride(2) != 1:
                raise ValueError(f"{name}: the last dimension has stride {tensor.stride(2)}, expected 1")
            if several:
                check_usable(name, tensor)
            if tensor.data_ptr() % tensor.element_size():
                raise ValueError(f"{name}: begins at an address that is no multiple of {tensor.element_size()}")
        for name, pages in self._last_pages.items():
            pool = layer.k_slc if name == "block_table" else layer.k_c
            if pages >= pool.shape[0]:
                raise ValueError(f"{name}: page {pages}: must be below {pool.shape[0]}, the pages of the layer")
        weights = weights_k, weights_v

        def run(step: Callable[..., Any], rows: _Rows, tensors: list[Tensor | None], num_new: Tensor | None) -> Tensor:
            q, k, v, k_slc, v_slc, k_swa, v_swa, gates = tensors
            keys, values = (k, k_slc, k_swa), (v, v_slc, v_swa)
            options = (weights, None, rope, softmax_scale, num_new, False)

            def named(*arguments: Any, names: Callable[[], dict[str, str]]) -> Any:
                return step(*arguments, names=lambda: names() | _NAMES)

            return _step(named, q, keys, values, gates, rows.of(layer, k_scale, v_scale), *options)  # type: ignore[arg-type, return-value]

        o = q.new_empty(self.num_tokens, q.shape[1], v.shape[2])
        if self._decodes is not None:
            rows = self._num_new.shape[0]

            def unpack(t: Tensor | None) -> Tensor | None:
                if t is None:
                    return None
                placed = t.new_zeros(rows * self._most, *t.shape[1:]).index_copy_(0, self._to, t[self._from])
                return placed.unflatten(0, (rows, self._most))

            part = run(partial(call, ops.decode), self._decodes, [unpack(t) for t in given], self._num_new)
            o.index_copy_(0, self._from, part.flatten(0, 1)[self._to])
        for tokens, row, first in self._chunks:
            step = prefill_empty_rows if first else partial(call, ops.prefill)
            o[tokens] = run(step, row, [None if t is None else t[tokens][None] for t in given], None)[0]
        return o

    def check(self) -> None:
        """Waits for the device. Raises RuntimeError if a request exceeded its capacity in a layer of this step."""
        if int(self.overflow.item()):
            raise RuntimeError("Step: a request exceeded its capacity and its tokens were dropped: it needs more pages")


_PAGED_NAMES = _NAMES | {"prefill": "decode_paged", "decode": "decode_paged"}
"""Names of the operator's arguments in `decode_paged`, for messages."""
_NAMES_WITH_OUT = _PAGED_NAMES | {"o": "out"}


@checked
def decode_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    layer: LayerCache,
    *,
    cfg: NSAConfig,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_table_c: Tensor | None = None,
    block_table_swa: Tensor | None = None,
    block_table_cmp: Tensor | None = None,
    max_query_len: int = 0,
    overflow: Tensor | None = None,
    weights_k: CompressionWeights | None = None,
    weights_v: CompressionWeights | None = None,
    k_slc: Tensor | None = None,
    v_slc: Tensor | None = None,
    k_swa: Tensor | None = None,
    v_swa: Tensor | None = None,
    indices: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    rotated: bool = False,
    softmax_scale: float | None = None,
    return_indices: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """One layer's step for decodes and chunks together, as one operator on an engine's tensors.

    T new tokens, packed, of B requests. The caller's lengths and tables say everything; none of them is written. With
    `block_table` alone for all that has pages, requests that begin alike share full pages without a call of `fork`.

    Args:
        q, k, v, gates: (T, heads, ...), otherwise as in `nsa.decode`, as the options are.
        layer: the layer's memory, is changed.
        cfg: hyperparameters.
        query_start_loc: int32 (B + 1), from 0 on: request b has rows query_start_loc[b] ... query_start_loc[b + 1] - 1,
            or none. Rows behind the last are padding: never read, o = 0.
        seq_lens: int32 (B), tokens of each request with the new ones.
        block_table: int32 (B, max_pages), pages of `layer.k_slc`; -1: none.
        block_table_c: int32 (B, max_pages_c), pages of `layer.k_c`. None: `block_table` has them, too, and a page of
            `layer.k_c` has page_size / kernel_stride entries, entry i in slot i + kernel_size / kernel_stride - 1.
        block_table_swa: int32 (B, max_pages), pages of `layer.k_swa_ring` (num_pages, page_size, Hkv, D), needed for
            the last window_size - 1 tokens and the new ones. None: a ring for each request, B slots.
        block_table_cmp: the same of `layer.k_cmp_ring`, needed for the tokens of blocks that are not complete. A page
            may stand in several columns that follow each other: it keeps the last raw tokens of these. It needs at
            least kernel_size + 15 slots, or more by what a rollback takes back beyond 16 tokens.
        max_query_len: at least the most new tokens of a request. 0: T.
        overflow: int32 (1), set to 1 if a request found no page: it writes nothing then, and o = 0. None: that raises
            RuntimeError at the end of the step.
        k_scale, v_scale: float32, one number, or one for each KV head: of a layer whose tensors but the raw tokens are
            in float8_e4m3fn. x is stored as x / scale, saturated, and read as stored * scale.
        rotated: q, k_slc and k_swa are rotated already, k is not: `rope`, (positions, D / 2), rotates compressed keys
            alone. An engine then rotates where it fuses that with other work.
        out: (T, H, Dv) for the result, which is returned.

    Returns:
        o (T, H, Dv), or (o, indices) with indices int32 (T, Hkv, topk).

    Raises:
        ValueError: an argument is not allowed; no memory was changed then.
        RuntimeError: a request found no page, and `overflow` was not given.
        TypeError: an argument is of another type.
    """
    _check_layer(layer, _SHARED)
    others = _PAGED_NAMES if out is None else _NAMES_WITH_OUT
    names = partial(branch_names, k_slc, v_slc, k_swa, v_swa, others)
    k_scale, v_scale = _scales_of(layer, k_scale, v_scale)
    k_slc, k_swa = (k if t is None else t for t in (k_slc, k_swa))
    v_slc, v_swa = (v if t is None else t for t in (v_slc, v_swa))
    weights_k, weights_v = (MEAN if w is None else w for w in (weights_k, weights_v))
    flag = torch.zeros(1, dtype=torch.int32, device=q.device) if overflow is None else overflow
    rotate = rope is not None and not rotated
    with torch.no_grad():
        if rotated:
            x = RotaryInputs(q, k, k_slc, k_swa, weights_k, *((None, None) if rope is None else rope))
        else:
            check_positions(rope)
            x = order_channels(rope, q, k, k_slc, k_swa, weights_k)
        o, selected = call(
            ops.decode_paged,
            *(x.q, x.k, v, x.k_slc, v_slc, x.k_swa, v_swa, gates),
            *(*layer, flag, seq_lens, block_table, block_table_c, block_table_swa, block_table_cmp),
            *(query_start_loc, max_query_len, *x.weights_k.as_arguments(), *weights_v.as_arguments()),
            *(cfg.as_list(), softmax_scale, x.cos, x.sin, rotate, indices, k_scale, v_scale, out),
            names=names,
        )
    o = o if out is None else out
    if overflow is None and int(flag.item()):
        raise RuntimeError("decode_paged: a request found no page and its tokens were dropped: see block_table")
    return (o, selected) if return_indices else o


@checked
def fork(
    layer: LayerCache,
    parent: int,
    child: int,
    block_table: Tensor,
    block_table_c: Tensor,
    length: int,
    parent_length: int,
    cfg: NSAConfig,
) -> None:
    """Forks slot `parent` into slot `child` after its first `length` tokens: a shared prefix.

    The caller's tables say what is shared: full pages before `length`, and pages of compressed tokens that are full
    with the cfg.num_compressed(length) first ones. The child has pages of its own for what follows, into which the
    rest is copied, as the rings are.

    Args:
        layer: is changed; every layer needs its call.
        parent, child: ring slots.
        block_table, block_table_c: int32 (2, max_pages) and (2, max_pages_c), the parent's row, then the child's. Of
            the child's row only the columns for `length` tokens are used. The others may be stale, with numbers of any
            pages of the layer, until a step needs them: a `Step` with both requests refuses the parent's pages there.
        length: at most parent_length, and at most 32 tokens below the longest that the parent has been.
        parent_length: tokens of the parent.
        cfg: hyperparameters.

    Raises:
        ValueError: an argument is not allowed.
        RuntimeError: a table has no page for a token of the child. In both cases no memory was changed.
    """
    _check_layer(layer)
    slots = _rings(layer)[0].shape[0]
    for table_name, table in (("block_table", block_table), ("block_table_c", block_table_c)):
        check_type(table_name, table, Tensor)
        if table.device != layer.k_slc.device:
            raise ValueError(f"{table_name}: on {table.device}: expected {layer.k_slc.device} as the layer")
    for name, slot in (("parent", parent), ("child", child)):
        check_type(name, slot, int)
        if not 0 <= slot < slots or parent == child:
            raise ValueError(f"{name} = {slot}: must be 0 ... {slots - 1}, and another than the other's")
    check_sizes(2**31 - 16, parent_length=max(1, parent_length))
    if not 0 <= length <= parent_length or parent_length - length > ROLLBACK:
        least = max(0, parent_length - ROLLBACK)
        raise ValueError(f"length = {length}: must be {least} ... {parent_length}, the parent's length")
    flipped = parent > child
    low, high = sorted((parent, child))
    rings = (ring[low : high + 1 : high - low] for ring in _rings(layer))
    lengths = torch.tensor([parent_length, 0], dtype=torch.int32, device=block_table.device)
    tables = [t.flip(0) if flipped else t for t in (lengths, block_table, block_table_c)]
    overflow = torch.zeros(1, dtype=torch.int32, device=block_table.device)
    tables_by_row = [(name, row) for name in ("block_table", "block_table_c") for row in (0, 1)]
    names = {f"cache.{name}[{row ^ flipped}": f"{name}[{row}" for name, row in tables_by_row} | _NAMES  # these first
    rows = int(flipped), 1 - flipped
    memory = (*layer[:4], *rings, tables[0], overflow, *tables[1:])
    call(ops.fork, *memory, cfg.as_list(), *rows, length, names=lambda: names)


def _check_layer(layer: LayerCache, shared: tuple[str, ...] = ()) -> None:
    check_type("layer", layer, LayerCache)
    for name, tensor in zip(LayerCache._fields, layer, strict=True):
        if tensor is None and name in shared:
            continue
        if not isinstance(tensor, Tensor):  # `checked` looks at the rest of a tensor if the call fails
            check_type(f"layer.{name}", tensor, Tensor)
        assert tensor is not None
        if tensor.dim() != 4:
            raise ValueError(f"layer.{name}: {tuple(tensor.shape)}: must have 4 dimensions, the last two (Hkv, D)")


def _rings(layer: LayerCache) -> tuple[Tensor, ...]:
    """Those of a layer that has been checked."""
    return cast(tuple[Tensor, ...], layer[4:])


def _scales_of(layer: LayerCache, *given: Tensor | None) -> tuple[Tensor | None, ...]:
    """Converts the scales of engines for the operators: one number for a layer, or one per KV head."""
    scales: list[Tensor | None] = []
    for name, scale in zip(("k_scale", "v_scale"), given, strict=True):
        check_type(name, scale, Tensor | None)
        if (scale is not None) != (layer.k_slc.dtype == torch.float8_e4m3fn):
            which = str(layer.k_slc.dtype).removeprefix("torch.")
            what = "not given: a layer" if scale is None else "given for a layer"
            raise ValueError(f"{name}: {what} in {which}: goes with float8_e4m3fn")
        heads = layer.k_slc.shape[2]
        scales.append(None if scale is None else head_scales(name, scale, heads, layer.k_slc.device))
    return tuple(scales)


def _integers(name: str, given: Sequence[int] | Tensor) -> list[int]:
    if isinstance(given, Tensor):
        if given.device.type != "cpu" or given.dim() != 1 or given.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name}: {given.dtype} {tuple(given.shape)} on {given.device}: must be integers on the cpu"
            )
        check_usable(name, given)
        return given.tolist()
    check_type(name, given, Sequence[int])
    return list(given)


def _check_values(
    new: list[int],
    seq_lens: Tensor,
    block_table: Tensor,
    block_table_c: Tensor,
    cfg: NSAConfig,
    max_length: int,
    page_size: int,
    slot_mapping: Tensor | None,
) -> None:
    size_c = compressed_page_size(cfg, page_size)
    lengths, pages, pages_c = seq_lens.tolist(), block_table.tolist(), block_table_c.tolist()
    slots = iter(() if slot_mapping is None else slot_mapping.tolist())
    needed: dict[str, list[list[int]]] = {"block_table": [], "block_table_c": []}
    for r, (count, length) in enumerate(zip(new, lengths, strict=True)):
        if not count <= length <= max_length:
            raise ValueError(
                f"seq_lens[{r}] = {length}: must be {count} (its new tokens) ... max_length = {max_length}"
            )
        for name, row, least in (
            ("block_table", pages[r], -(-length // page_size)),
            ("block_table_c", pages_c[r], -(-cfg.num_compressed(length) // size_c)),
        ):
            if len(row) < least or min(row[:least], default=0) < 0 or min(row, default=0) < -1:
                what = f"{name}[{r}]: {row}: must be at least {least} pages for {length} tokens"
                raise ValueError(what + ", then -1" * (min(row, default=0) < -1))
            needed[name].append(row[:least])
        for position in range(length - count, length) if slot_mapping is not None else ():
            found, expected = next(slots), pages[r][position // page_size] * page_size + position % page_size
            if found != expected:
                what = f"slot_mapping: {found} for token {position} of request {r}"
                raise ValueError(f"{what}: must be {expected}, as block_table says")
    before = [length - count for length, count in zip(lengths, new, strict=True)]
    check_sharing("block_table", needed["block_table"], [length // page_size for length in before])
    check_sharing("block_table_c", needed["block_table_c"], [cfg.num_compressed(length) // size_c for length in before])
