"""The key/value cache of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from ._arguments import check_order, check_sizes, check_type, check_usable, checked
from ._pages import Copies, PageAllocator, Pool, check_sharing
from ._registration import call, ops
from .config import NSAConfig

ROLLBACK = 32
"""Maximum number of tokens of a rollback: the rings keep this many more than attention needs."""

_DEFERRED = 64
"""Tokens of a row whose selections are written together."""

_DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64

_LARGEST = 2**31 - 16
"""The largest size: a multiple of 16 in 32 bits, as positions and page numbers are."""


NAMES = (
    *("k_slc", "v_slc", "k_c", "v_c", "k_swa_ring", "v_swa_ring", "k_cmp_ring", "v_cmp_ring"),
    *("cache_seqlens", "overflow", "block_table", "block_table_c"),
)
"""A cache's tensors in the order in which the operators in torch.ops.nsa take them."""


class KVCache:
    """Keys and values of `batch_size` sequences for `decode` and `prefill`.

    Selection keys and values lie in pages (num_pages, page_size, Hkv, D) that `block_table` (B, max_pages) assigns to
    the sequences; compressed tokens likewise in their own pages; the window's last window_size + 32 tokens and the last
    kernel_size + 32 raw tokens of compression lie in rings. Without `page_size` the cache is contiguous: one page per
    sequence, its own from the start.

    A step reads and advances `cache_seqlens` (int32 (B)) on the device, without waiting for it. Its capacity must
    have been reserved: a sequence without it writes nothing, keeps its length, gets o = 0 and sets a flag that `check`
    reads.

    Args:
        batch_size: B, rows of the cache; a row may stay idle.
        num_kv_heads: Hkv.
        head_dim: Dk.
        v_head_dim: Dv, default Dk.
        cfg: hyperparameters.
        max_length: the longest sequence in tokens.
        page_size: tokens in a page, a positive multiple of 16; None: contiguous.
        num_pages: pages in the pool, default enough for every sequence at max_length. The pool of compressed tokens is
            sized to match.
        num_prefixes: the most prefixes that `keep_prefix` keeps at a time, each with rings of its own; goes with
            page_size.
        dtype: of keys and values. With torch.float8_e4m3fn all that attention reads is stored in it, as x / scale, and
            read as stored * scale.
        raw_dtype: dtype of raw tokens that wait for compression, and of a step's q, k and v; default: dtype, or
            bfloat16 if dtype is torch.float8_e4m3fn.
        k_scale, v_scale: of torch.float8_e4m3fn, a number, at least 2^-126, or one for each KV head; default 1. Numbers
            beyond 448 times their scale are stored as that.
        device: of all tensors of the cache, default torch's default device.
        record_selections: also keep which blocks every token selected, for `nsa.replay`.

    Raises:
        ValueError: a size or dtype is not allowed.
        TypeError: an argument is of another type.
        RuntimeError: torch cannot allocate the memory, or does not know the device.

    Attributes:
        block_table: int32 (B, max_pages), page p of a sequence, -1: none.
        block_table_c: int32 (B, max_pages_c), likewise of its compressed tokens.
        k_scale, v_scale: float32 (Hkv), or None without torch.float8_e4m3fn.
    """

    _selections: Tensor | None = None
    _deferred: list[tuple[Tensor, Tensor]] | None = None
    """Steps whose selections are not in `selections` yet: lengths before, and blocks. None: every step writes."""

    k_scale: Tensor | None
    v_scale: Tensor | None

    @checked
    @torch.inference_mode(False)  # tensors of that mode could be written only in it
    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        cfg: NSAConfig | None = None,
        *,
        max_length: int,
        page_size: int | None = None,
        num_pages: int | None = None,
        num_prefixes: int = 0,
        dtype: torch.dtype = torch.float32,
        raw_dtype: torch.dtype | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        device: torch.device | str | int | None = None,
        record_selections: bool = False,
    ) -> None:
        cfg = NSAConfig() if cfg is None else cfg
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        sizes = {"batch_size": batch_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        check_sizes(_LARGEST, **sizes, v_head_dim=v_head_dim, max_length=max_length, num_pages=num_pages)
        if page_size is not None and (not 16 <= page_size <= _LARGEST or page_size % 16):
            raise ValueError(f"page_size = {page_size}: must be a positive multiple of 16, <= {_LARGEST}")
        if num_pages is not None and page_size is None:
            raise ValueError(f"num_pages = {num_pages}: must be >= 1, and goes with page_size")
        if not 0 <= num_prefixes <= _LARGEST or (num_prefixes and page_size is None):
            raise ValueError(f"num_prefixes = {num_prefixes}: must be 0 ... {_LARGEST}, and goes with page_size")
        raw_dtype = _raw_dtype(dtype, raw_dtype)
        check_rings(cfg)
        self.cfg = cfg
        self.max_length = max_length
        self.contiguous = page_size is None

        longest_c = max(1, cfg.num_compressed(max_length))
        size, size_c = page_size or _multiple_of_16(max_length), _multiple_of_16(longest_c)
        num_pages_c = None
        if page_size is not None:
            size_c = min(size_c, _multiple_of_16(-(-page_size // cfg.kernel_stride)))
            num_pages_c = self._compressed_pages(num_pages, size, size_c, batch_size)

        def pool(name: str, longest: int, size: int, count: int | None, more: int) -> tuple[Pool, Tensor, Tensor]:
            per_sequence = -(-longest // size)
            count = (batch_size * per_sequence if count is None else count) + more
            shape = (count, size, num_kv_heads)
            keys = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
            values = torch.zeros(*shape, v_head_dim, dtype=dtype, device=device)
            return Pool(name, size, count, batch_size, per_sequence), keys, values

        def rings(rows: int) -> list[Tensor]:
            """Rings of `rows` sequences, in the order of NAMES."""
            return [
                torch.zeros(rows, tokens + ROLLBACK, num_kv_heads, dim, dtype=kind, device=device)
                for tokens, kind in ((cfg.window_size, dtype), (cfg.kernel_size, raw_dtype))
                for dim in (head_dim, v_head_dim)
            ]

        tokens, self.k_slc, self.v_slc = pool("tokens", max_length, size, num_pages, 0)
        # A cached prefix may have a page in part.
        compressed, self.k_c, self.v_c = pool("compressed tokens", longest_c, size_c, num_pages_c, num_prefixes)
        self.k_swa_ring, self.v_swa_ring, self.k_cmp_ring, self.v_cmp_ring = rings(batch_size)
        self._pages = PageAllocator(cfg, tokens, compressed, num_prefixes)
        self._prefix_rings, self._longest_of_prefix = rings(num_prefixes), [0] * num_prefixes
        self.k_scale, self.v_scale = _scales(self.k_slc, k_scale, v_scale)
        if record_selections:
            shape = (self.k_slc.shape[0] + 1, size, num_kv_heads, cfg.topk)
            self._selections = torch.full(shape, -1, dtype=_index_type(max_length, cfg), device=device)
            self._deferred = []
        self.cache_seqlens = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.overflow = torch.zeros(1, dtype=torch.int32, device=device)
        self.block_table, self.block_table_c = self._new_tables(batch_size, tokens.max_pages, compressed.max_pages)
        self._longest = [0] * batch_size  # before the last rollback: the rings have lost what is older than 32 tokens
        if self.contiguous:
            self.reserve(max_length)

    @classmethod
    def from_tensors(
        cls,
        tensors: Sequence[Tensor],
        cfg: NSAConfig,
        max_length: int,
        *,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
    ) -> KVCache:
        """A cache in memory of the caller: the tensors of another one, in the order of `tensors`.

        Pages belong to the sequences as the tables say; the host reads them and the lengths. A cache of one page per
        sequence and as many pages as sequences is contiguous. `k_scale`, `v_scale`: as in the constructor. Sequences
        can share full pages, to which no step writes.

        Raises:
            ValueError: a tensor's shape, dtype, device or content does not fit the others, cfg or max_length, or
                sequences share a page that is not full.
        """
        check_order("tensors", tensors)
        if len(tensors) != len(NAMES):
            raise ValueError(f"tensors: {len(tensors)} tensors: must be {len(NAMES)}: {', '.join(NAMES)}")
        for name, tensor in zip(NAMES, tensors, strict=True):
            check_type(name, tensor, Tensor)
            check_usable(name, tensor)
        check_type("cfg", cfg, NSAConfig)
        check_type("max_length", max_length, int)
        check_sizes(_LARGEST, max_length=max_length)
        cache = cls.__new__(cls)
        cache.cfg, cache.max_length = cfg, max_length
        for name, tensor in zip(NAMES, tensors, strict=True):
            setattr(cache, name, tensor)
        cache._check_shapes()
        cache.k_scale, cache.v_scale = _scales(cache.k_slc, k_scale, v_scale)
        longest_c = max(1, cfg.num_compressed(max_length))
        pools = []
        for name, keys, table, longest in (
            ("block_table", cache.k_slc, cache.block_table, max_length),
            ("block_table_c", cache.k_c, cache.block_table_c, longest_c),
        ):
            pages = Pool("compressed tokens" if keys is cache.k_c else "tokens", *keys.shape[1::-1], *table.shape)
            if pages.max_pages < pages.pages_for(longest):
                what = f"{name}: {tuple(table.shape)}: must have {pages.pages_for(longest)} pages per sequence"
                raise ValueError(f"{what} for max_length = {max_length}")
            for b, row in enumerate(table.tolist()):
                held = [page for page in row if page >= 0]
                if row != held + [-1] * (len(row) - len(held)) or any(page >= keys.shape[0] for page in held):
                    raise ValueError(f"{name}[{b}]: must be pages below {keys.shape[0]}, then -1")
                pages.held[b] = held
                pages.share(held)
            pages.free = [page for page in range(keys.shape[0] - 1, -1, -1) if not pages.uses[page]]
            pools.append(pages)
        cache._pages, cache._prefix_rings, cache._longest_of_prefix = PageAllocator(cfg, pools[0], pools[1]), [], []
        cache._longest = cache.cache_seqlens.tolist()
        for b, length in enumerate(cache._longest):
            capacity = min(max_length, len(pools[0].held[b]) * pools[0].page_size)
            if not 0 <= length <= capacity:
                raise ValueError(f"cache_seqlens[{b}] = {length}: must be 0 ... {capacity}, what its pages hold")
        for i, (name, pages) in enumerate(zip(NAMES[10:], pools, strict=True)):
            full = [cache._pages.sizes(length)[i] // pages.page_size for length in cache._longest]
            check_sharing(name, pages.held, full)
        cache.contiguous = all(p.max_pages == 1 and len(p.uses) == len(p.held) and set(p.uses) == {1} for p in pools)
        return cache

    @property
    def batch_size(self) -> int:
        """B, the rows of the cache, a sequence each."""
        return self.cache_seqlens.shape[0]

    @property
    def free_pages(self) -> int:
        """Pages of selection keys and values that neither a sequence nor a cached prefix holds."""
        return len(self._pages.tokens.free)

    @checked
    def selected(self, sequence: int) -> Tensor:
        """The blocks that each token of a row selected: (length, Hkv, topk) as `selections`. Waits for the device.

        Raises:
            ValueError: the row, or a cache without record_selections.
        """
        if self.selections is None:
            raise ValueError("cache: keeps no selections: must be made with record_selections=True")
        length = int(self.cache_seqlens[self._row("sequence", sequence)])
        pages = self._pages.tokens.held[sequence][: self._pages.tokens.pages_for(length)]
        return self.selections[pages].flatten(0, 1)[:length]

    @property
    def selections(self) -> Tensor | None:
        """In the pages of the tokens, the blocks that each selected; None without record_selections.

        int16, or int32 beyond 32767 blocks, (num_pages + 1, page_size, Hkv, topk); the last page holds nothing.
        """
        self._write_deferred()
        return self._selections

    @selections.setter
    def selections(self, selections: Tensor | None) -> None:
        self._selections = selections

    def _record(self, before: Tensor, selected: Tensor, indices: Tensor | None) -> None:
        """Keeps what a step selected. Steps of decoding are written many at a time, as each would take a dozen kernels.

        Args:
            before: int32 (B), `cache_seqlens` before the step, a copy.
            selected: int32 (B, m, Hkv, topk), as the step returned it: -1 where a row took no token. A copy, too.
            indices: likewise, the blocks that were attended to instead.
        """
        steps = self._deferred
        graph = torch.compiler.is_compiling() or (selected.is_cuda and torch.cuda.is_current_stream_capturing())
        if graph or steps is None or indices is not None:  # a graph that runs again writes again
            self._write_selections(before[:, None], selected, selected if indices is None else indices)
            return
        if steps and steps[0][1].shape != selected.shape:
            self._write_deferred()
        steps.append((before, selected))
        if len(steps) * selected.shape[1] >= _DEFERRED:
            self._write_deferred()

    def _write_deferred(self) -> None:
        """Must run before a row loses tokens or pages."""
        if self._deferred:
            before, selected = zip(*self._deferred, strict=True)
            self._deferred.clear()
            blocks = torch.cat(selected, 1)
            self._write_selections(torch.stack(before, 1), blocks, blocks)

    @torch.no_grad()
    def _write_selections(self, before: Tensor, selected: Tensor, attended: Tensor) -> None:
        """Writes what steps of as many tokens attended to.

        Args:
            before: int32 (B, steps), lengths before each step.
            selected: int32 (B, tokens of all steps, Hkv, topk), -1 where a row took no token.
            attended: likewise, what is written.
        """
        assert self._selections is not None
        pages, size = self._selections.shape[:2]
        steps, tokens = before.shape[1], selected.shape[1]
        position = before[..., None] + torch.arange(tokens // steps, device=before.device)
        position = position.flatten(1)
        page = self.block_table.gather(1, (position // size).clamp(max=self.block_table.shape[1] - 1).long())
        page = page.where(selected[..., 0, 0] >= 0, pages - 1)
        self._selections.index_put_((page, position % size), attended.to(self._selections.dtype))

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors in the order in which the operators in torch.ops.nsa take them."""
        return tuple(getattr(self, name) for name in NAMES)

    def reserve(self, upper_bound: int | Sequence[int]) -> None:
        """Reserves capacity for sequences of up to `upper_bound` tokens in all (one number, or one per sequence).

        Raises:
            ValueError: a bound is negative or above max_length, or their number is not B.
            TypeError: a bound is no integer.
            RuntimeError: the pool has too few free pages; nothing was reserved.
        """
        check_order("upper_bound", upper_bound)
        given: Any = upper_bound
        if not hasattr(upper_bound, "__len__") or getattr(upper_bound, "ndim", 1) == 0:
            check_type("upper_bound", upper_bound, int)
            given = [upper_bound] * self.batch_size
        for i, bound in enumerate(given):
            check_type(f"upper_bound[{i}]", bound, int)
        bounds = [index(bound) for bound in given]
        if len(bounds) != self.batch_size:
            raise ValueError(f"upper_bound: {len(bounds)} numbers: must be one, or {self.batch_size}, one per sequence")
        for bound in bounds:
            if not 0 <= bound <= self.max_length:
                raise ValueError(f"upper_bound = {bound}: must be 0 ... max_length = {self.max_length}")
        self._pages.reserve(bounds)
        self._write_tables()

    def check(self) -> None:
        """Waits for the device. Raises RuntimeError if a step since the last check exceeded a capacity."""
        if int(self.overflow.item()):
            self.overflow.zero_()
            what = (
                "exceeded the capacity of a sequence, or gave a first chunk to one with tokens, and dropped its tokens"
            )
            raise RuntimeError(f"KVCache: a step {what}: reserve more")

    @checked
    def rollback(self, sequence: int, length: int) -> None:
        """Removes the tokens of a row from `length` on, as if they had never been appended. Waits for the device.

        Raises:
            ValueError: the row, or a length above its own or more than 32 below the longest that it has been.
            RuntimeError: pages shared with a fork would have to be copied, and too few are free; nothing was forgotten.
        """
        self._check_going_back("sequence", sequence, length)
        self._go_back({sequence: length})

    @checked
    def crop(self, length: int | Sequence[int]) -> None:
        """Shortens rows as `rollback` does. Waits for the device.

        Args:
            length: of every row that is longer, or if negative how many tokens every row loses; or one length per row.

        Raises:
            ValueError: a row would lose more than 32 tokens of the longest that it has been, or more than it has.
            RuntimeError: as `rollback`. In both cases no row was changed.
        """
        lengths = self.cache_seqlens.tolist()
        if isinstance(length, Sequence):
            if len(length) != self.batch_size:
                raise ValueError(f"length: {len(length)} numbers: must be one, or {self.batch_size}, one per row")
            for i, one in enumerate(length):
                check_type(f"length[{i}]", one, int)
            wanted = [index(one) for one in length]
        else:
            length = index(length)
            wanted = [min(one, length) if length >= 0 else one + length for one in lengths]
        for row, one in enumerate(wanted):
            self._check_going_back("row", row, one)
        self._go_back({row: one for row, one in enumerate(wanted) if one < lengths[row]})

    def _go_back(self, lengths: dict[int, int]) -> None:
        self._copy_pages(self._pages.rollback(lengths))
        self._write_tables()
        for row, length in lengths.items():
            self.cache_seqlens[row] = length

    @checked
    def fork(self, parent: int, child: int, length: int | None = None) -> None:
        """Makes the empty row `child` continue row `parent` after `length` tokens (default: all). Waits for the device.

        Full pages before `length` are shared, and full pages of compressed tokens whose blocks end before it; the rest
        is copied. A contiguous cache copies everything.

        Raises:
            ValueError: a row, a child that is not empty, or a length above the parent's or more than 32 below the
                longest that it has been.
            RuntimeError: the pool has too few free pages; nothing was changed.
        """
        length = int(self.cache_seqlens[self._row("parent", parent)]) if length is None else length
        self._check_going_back("parent", parent, length)
        if self._row("child", child) == parent or int(self.cache_seqlens[child]):
            raise ValueError(f"child = {child}: must be an empty row and not the parent")
        if not self.contiguous:
            before = self._pages.copy()
            self._pages.fork(parent, child, length)
            self._write_tables()
        try:
            call(ops.fork, *self.tensors(), self.cfg.as_list(), parent, child, length)
        except Exception:
            if not self.contiguous:
                self._pages = before
                self._pages.changed.add(child)
                self._write_tables()
            raise
        if self.selections is not None:
            held = self._pages.tokens.held
            for old, new in zip(held[parent], held[child], strict=False):
                if old != new:
                    self.selections[new] = self.selections[old]
        self._longest[child] = self._longest[parent]

    @checked
    def release(self, sequence: int) -> None:
        """Empties a row and gives its pages back to the pool (a contiguous row keeps its page)."""
        self.cache_seqlens[self._row("sequence", sequence)] = 0
        self._release([sequence])

    def reset(self) -> None:
        """Empties every row, as `release` does, and forgets that a step exceeded a capacity."""
        self.cache_seqlens.zero_()
        self._release(range(self.batch_size))
        self.overflow.zero_()

    def _release(self, rows: Sequence[int]) -> None:
        self._write_deferred()
        for row in rows:
            self._longest[row] = 0
            if not self.contiguous:
                self._pages.release(row)
        self._write_tables()

    @checked
    def keep_prefix(self, sequence: int, tokens: Sequence[int] | Tensor) -> int:
        """Keeps the row's first tokens, up to the last full page, beyond its release. Waits for the device.

        When pages or slots run out, the prefix that was used least recently is dropped.

        Args:
            sequence: the row.
            tokens: the ids of its first tokens, at most as many as it has.

        Returns:
            How many tokens are cached: 0 where the last full page ends more than 32 tokens below the longest that the
            row has been, or where nothing is free for it.

        Raises:
            ValueError: the row, or more tokens than it has.
        """
        length = int(self.cache_seqlens[self._row("sequence", sequence)])
        ids = _token_ids(tokens)
        if len(ids) > length:
            raise ValueError(f"tokens: {len(ids)}: must be at most as many as the row has, {length}")
        longest = self._longest[sequence] = max(self._longest[sequence], length)
        size = self._pages.tokens.page_size
        if self.contiguous or longest - len(ids) // size * size > ROLLBACK:
            return 0
        kept = self._pages.keep_prefix(sequence, ids)
        if kept is None:
            return 0
        prefix, copies = kept
        if copies is not None:
            self._copy_pages(copies)
            for ring, stored in zip(self._rings(), self._prefix_rings, strict=True):
                stored[prefix.slot] = ring[sequence]
            self._longest_of_prefix[prefix.slot] = longest
        return len(prefix.tokens)

    @checked
    def match_prefix(self, sequence: int, tokens: Sequence[int] | Tensor) -> int:
        """Lets an empty row begin with the longest cached prefix of a prompt that leaves a token to compute.

        What follows has the same bits as after computing those tokens. Waits for the device.

        Args:
            sequence: the row.
            tokens: the ids of the prompt.

        Returns:
            How many tokens the row has now; 0: no prefix fits.

        Raises:
            ValueError: the row, or one that is not empty.
        """
        if int(self.cache_seqlens[self._row("sequence", sequence)]):
            raise ValueError(f"sequence = {sequence}: must be an empty row")
        matched = None if self.contiguous else self._pages.match_prefix(sequence, _token_ids(tokens))
        if matched is None:
            return 0
        prefix, copies = matched
        self._copy_pages(copies)
        for ring, stored in zip(self._rings(), self._prefix_rings, strict=True):
            ring[sequence] = stored[prefix.slot]
        self._write_tables()
        self._longest[sequence] = self._longest_of_prefix[prefix.slot]
        self.cache_seqlens[sequence] = len(prefix.tokens)
        return len(prefix.tokens)

    @property
    def max_positions(self) -> int:
        """Maximum length of a sequence, max_length rounded up to pages; `rope` needs as many positions."""
        size = int(self.k_slc.shape[1])
        return -(-self.max_length // size) * size

    @checked
    def select(self, rows: Sequence[int] | Tensor) -> None:
        """Row b becomes row rows[b] (beam search); the result has len(rows) rows. Waits for the device.

        With pages the first successor of a row takes its pages and its reserved capacity. Others share the full ones
        and must reserve what follows. If the number of rows changes, the tensors are new ones, except the pools of a
        cache with pages.

        Raises:
            ValueError: no rows, or a row that there is not.
            RuntimeError: the pool has too few free pages; nothing was changed.
        """
        if isinstance(rows, Tensor) and rows.dim() != 1:
            raise ValueError(f"rows: {rows.dim()} dimensions: must be (rows,)")
        check_usable("rows", rows)
        rows = rows.tolist() if isinstance(rows, Tensor) else list(rows)
        if not rows:
            raise ValueError("rows: none: must be at least one")
        for i, row in enumerate(rows):
            check_type(f"rows[{i}]", row, int)
            self._row(f"rows[{i}]", row)
        lengths = self.cache_seqlens.tolist()
        place = torch.tensor(rows, device=self.cache_seqlens.device)
        if self.contiguous:
            for (pages, table), names in zip(self._pools(), (("k_slc", "v_slc"), ("k_c", "v_c")), strict=True):
                at = table[place, 0].to(torch.int64)
                if len(rows) == self.batch_size:
                    at = at.new_zeros(at.shape).index_copy_(0, table[:, 0].to(torch.int64), at)
                else:
                    pages.held, pages.uses, pages.free = [[b] for b in range(len(rows))], [1] * len(rows), []
                    self._pages.changed = set(range(len(rows)))
                self._take_rows(names, at)
                if self.selections is not None and pages is self._pages.tokens:
                    none = at.new_full((1,), self.selections.shape[0] - 1)
                    self._take_rows(("selections",), torch.cat((at, none)))
        else:
            self._copy_pages(self._pages.select(rows, lengths))
        self._take_rows(NAMES[4:9], place)
        if len(rows) != len(lengths):
            widths = [pages.max_pages for pages in self._pages.pools]
            self.block_table, self.block_table_c = self._new_tables(len(rows), *widths)
        self._write_tables()
        self._longest = [max(self._longest[row], lengths[row]) for row in rows]

    @checked
    def repeat(self, count: int) -> None:
        """Puts `count` copies of every row next to each other, as `select` does."""
        check_sizes(_LARGEST // self.batch_size, count=count)
        self.select([row for row in range(self.batch_size) for _ in range(count)])

    @checked
    def grow(self, max_length: int, num_pages: int | None = None) -> None:
        """Longer sequences, or more pages. The contents stay, the tensors that must be larger are new ones.

        Args:
            max_length: at least what it is.
            num_pages: as in the constructor, at least what it is.

        Raises:
            ValueError: a size is not allowed.
            RuntimeError: torch cannot allocate the memory; lengths and contents are as they were, in tensors that
                may be new ones.
        """
        check_sizes(_LARGEST, max_length=max_length, num_pages=num_pages)
        if max_length < self.max_length:
            raise ValueError(f"max_length = {max_length}: must be at least what it is, {self.max_length}")
        now, now_c = self._pages.pools
        if num_pages is not None and (self.contiguous or num_pages < len(now.uses)):
            rule = "goes with page_size" if self.contiguous else f"must be at least what it is, {len(now.uses)}"
            raise ValueError(f"num_pages = {num_pages}: {rule}")
        longest_c = max(1, self.cfg.num_compressed(max_length))
        sizes = now.page_size, now_c.page_size
        if self.contiguous:
            sizes = _multiple_of_16(max_length), _multiple_of_16(longest_c)
        num_pages_c = None if num_pages is None else self._compressed_pages(num_pages, *sizes, self.batch_size)
        per_sequence = [-(-longest // size) for longest, size in zip((max_length, longest_c), sizes, strict=True)]
        pools, more = self._pages.pools, (0, len(self._longest_of_prefix))
        counts = [
            max(len(pages.uses), (self.batch_size * per if given is None else given) + extra)
            for pages, given, per, extra in zip(pools, (num_pages, num_pages_c), per_sequence, more, strict=True)
        ]
        widths = [max(pages.max_pages, per) for pages, per in zip(pools, per_sequence, strict=True)]
        tables: tuple[Tensor, Tensor] | None = None
        before: dict[str, torch.Size] = {}
        try:
            for names, count, size in zip((("k_slc", "v_slc"), ("k_c", "v_c")), counts, sizes, strict=True):
                for name in names:
                    old = getattr(self, name)
                    if (count, size) != old.shape[:2]:
                        with torch.inference_mode(False):
                            larger = old.new_zeros(count, size, *old.shape[2:])
                        larger[: old.shape[0], : old.shape[1]] = old
                        before[name] = old.shape
                        setattr(self, name, larger)
            if self.selections is not None and (counts[0] + 1, sizes[0]) != self.selections.shape[:2]:
                old, dtype = self.selections, _index_type(max_length, self.cfg)
                with torch.inference_mode(False):
                    larger = old.new_full((counts[0] + 1, sizes[0], *old.shape[2:]), -1, dtype=dtype)
                larger[: old.shape[0], : old.shape[1]] = old
                before["selections"] = old.shape
                self.selections = larger
            if widths != [pages.max_pages for pages in pools]:
                tables = self._new_tables(self.batch_size, *widths)
        except BaseException:  # out of memory
            for name, shape in before.items():
                setattr(self, name, getattr(self, name)[: shape[0], : shape[1]])
            raise
        for pages, size, count, width in zip(pools, sizes, counts, widths, strict=True):
            pages.page_size = size
            pages.extend(count, width)
        self.max_length = max_length
        if tables is not None:
            self.block_table, self.block_table_c = tables
            self._pages.changed = set(range(self.batch_size))
            self._write_tables()

    @torch.inference_mode(False)
    def _new_tables(self, rows: int, *widths: int) -> tuple[Tensor, Tensor]:
        """Allocates both tables, without pages, in one tensor, so that one copy uploads them."""
        both = torch.full((rows * sum(widths),), -1, dtype=torch.int32, device=self.k_slc.device)
        table, table_c = both.split([rows * width for width in widths])
        return table.view(rows, -1), table_c.view(rows, -1)

    def _pools(self) -> tuple[tuple[Pool, Tensor], tuple[Pool, Tensor]]:
        return (self._pages.tokens, self.block_table), (self._pages.compressed, self.block_table_c)

    def _rings(self) -> list[Tensor]:
        return [getattr(self, name) for name in NAMES[4:8]]

    def _write_tables(self) -> None:
        self._pages.flush(self.block_table, self.block_table_c)

    def _copy_pages(self, copies: Copies) -> None:
        of_tokens = [self.k_slc, self.v_slc] + ([] if self.selections is None else [self.selections])
        for moves, stores in zip(copies, (of_tokens, [self.k_c, self.v_c]), strict=True):
            for old, new in moves:
                for store in stores:
                    store[new] = store[old]

    def _take_rows(self, names: Sequence[str], rows: Tensor) -> None:
        """Tensors of these names with their rows replaced: in their own memory, if as many."""
        for name in names:
            old = getattr(self, name)
            with torch.inference_mode(False):
                chosen = old[rows]
            if chosen.shape == old.shape:
                old.copy_(chosen)
            else:
                setattr(self, name, chosen)

    def _compressed_pages(self, num_pages: int | None, size: int, size_c: int, batch: int) -> int | None:
        """Pages of compressed tokens that match `num_pages` of tokens."""
        if num_pages is None:
            return None
        tokens_c = -(-num_pages * size // self.cfg.kernel_stride)
        return -(-tokens_c // size_c) + batch  # each sequence may hold a page in part

    def _check_tensors(self, name: str) -> None:
        """Raises TypeError or ValueError for a member that has been replaced by what no step can compute with."""
        for member in NAMES:
            tensor = getattr(self, member)
            check_type(f"{name}.{member}", tensor, Tensor)
            if member in NAMES[8:] and tensor.dtype != torch.int32:
                raise ValueError(f"{name}.{member}: dtype {str(tensor.dtype).removeprefix('torch.')}: must be int32")
            check_usable(f"{name}.{member}", tensor)
        for member in ("k_scale", "v_scale"):
            check_type(f"{name}.{member}", getattr(self, member), Tensor | None)
            check_usable(f"{name}.{member}", getattr(self, member))

    def _check_shapes(self) -> None:
        keys, values = self.k_slc, self.v_slc
        for name in ("k_slc", "v_slc", "k_c"):
            if getattr(self, name).dim() != 4:
                raise ValueError(f"{name}: {tuple(getattr(self, name).shape)}: must be (pages, page_size, Hkv, D)")
        if self.cache_seqlens.dim() != 1:
            raise ValueError(f"cache_seqlens: {tuple(self.cache_seqlens.shape)}: must be (B,)")
        batch, heads = self.cache_seqlens.shape[0], keys.shape[2]
        dims = {"k": keys.shape[3], "v": values.shape[3]}
        shapes = {"cache_seqlens": (batch,), "overflow": (1,), "v_slc": (*keys.shape[:3], dims["v"])}
        shapes |= {f"{x}_c": (*self.k_c.shape[:2], heads, dim) for x, dim in dims.items()}
        for branch, tokens in (("swa", self.cfg.window_size), ("cmp", self.cfg.kernel_size)):
            shapes |= {f"{x}_{branch}_ring": (batch, tokens + ROLLBACK, heads, dim) for x, dim in dims.items()}
        shapes |= {name: (batch, *getattr(self, name).shape[1:2]) for name in ("block_table", "block_table_c")}
        for i, name in enumerate(NAMES):
            tensor = getattr(self, name)
            dtype = keys.dtype if i < 8 else torch.int32
            if keys.dtype == torch.float8_e4m3fn and 6 <= i < 8:
                dtype = self.k_cmp_ring.dtype
            if tensor.shape != shapes.get(name, tensor.shape) or tensor.dtype != dtype or tensor.device != keys.device:
                what = f"{name}: {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
                wanted = f"{dtype} {shapes.get(name, tuple(tensor.shape))} on {keys.device}"
                raise ValueError(f"{what}: must be {wanted}".replace("torch.", ""))
        for name in ("k_slc", "k_c"):
            if (size := getattr(self, name).shape[1]) < 16 or size % 16:
                raise ValueError(f"{name}: pages of {size} tokens: must be a positive multiple of 16")

    def _row(self, name: str, row: int) -> int:
        if not 0 <= row < self.batch_size:
            raise ValueError(f"{name} = {row}: must be 0 ... B - 1 = {self.batch_size - 1}")
        return row

    def _check_going_back(self, name: str, row: int, length: int) -> None:
        available = int(self.cache_seqlens[self._row(name, row)])
        longest = self._longest[row] = max(self._longest[row], available)
        if not 0 <= length <= available:
            raise ValueError(f"length = {length}: must be 0 ... the row's length, {available}")
        if longest - length > ROLLBACK:
            raise ValueError(f"length = {length}: must be at most {ROLLBACK} below the longest it has been, {longest}")


def check_rings(cfg: NSAConfig) -> None:
    """Raises ValueError if a ring has 2^31 tokens or more."""
    for name in ("window_size", "kernel_size"):
        if (value := getattr(cfg, name)) >= 2**31 - ROLLBACK:
            raise ValueError(f"cfg.{name} = {value}: must be below 2^31 - {ROLLBACK} in a cache")


def _raw_dtype(dtype: torch.dtype, raw_dtype: torch.dtype | None) -> torch.dtype:
    """dtype of raw tokens in a cache of this dtype."""
    for name, one, allowed in (("dtype", dtype, (*_DTYPES, torch.float8_e4m3fn)), ("raw_dtype", raw_dtype, _DTYPES)):
        check_type(name, one, torch.dtype | None)
        if one is not None and one not in allowed:
            raise ValueError(f"{name} = {one}: must be {', '.join(map(str, allowed))}")
    if dtype != torch.float8_e4m3fn and raw_dtype not in (None, dtype):
        raise ValueError(f"raw_dtype = {raw_dtype}: another than dtype goes with dtype = torch.float8_e4m3fn")
    if raw_dtype is None:
        return torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
    return raw_dtype


def head_scales(name: str, scale: float | Tensor, heads: int, device: torch.device) -> Tensor:
    """float32 (heads) of a scale that is one number, or one for each head."""
    check_type(name, scale, float | Tensor)
    if isinstance(scale, Tensor) and (scale.dtype == torch.bool or scale.is_complex()):
        raise ValueError(f"{name}: dtype {str(scale.dtype).removeprefix('torch.')}: must be floating-point or integer")
    check_usable(name, scale)
    scales = torch.as_tensor(scale, dtype=torch.float32, device=None if isinstance(scale, Tensor) else device)
    if scales.dim() > 1 or scales.numel() not in (1, heads):
        raise ValueError(f"{name}: {tuple(scales.shape)}: must be one number, or {heads}, one for each KV head")
    if scales.device != device:
        raise ValueError(f"{name}: on {scales.device}: expected {device} as the keys and values")
    return scales.expand(heads)


def _scales(keys: Tensor, *given: float | Tensor | None) -> list[Tensor | None]:
    """Scales of a cache's keys and values."""
    result: list[Tensor | None] = []
    for name, scale in zip(("k_scale", "v_scale"), given, strict=True):
        if keys.dtype == torch.float8_e4m3fn:
            scales = head_scales(name, 1.0 if scale is None else scale, keys.shape[2], keys.device)
            if not scales.is_meta and not is_fake(scales):
                if not bool(((scales > 0) & scales.isfinite()).all()):
                    raise ValueError(f"{name}: {scales.tolist()}: must be positive and finite")
                if bool((scales < torch.finfo(torch.float32).tiny).any()):
                    raise ValueError(f"{name}: {scales.tolist()}: must be at least 2^-126")
            result.append(scales)
        elif scale is None:
            result.append(None)
        else:
            raise ValueError(f"{name}: goes with dtype = torch.float8_e4m3fn")
    return result


def _token_ids(tokens: Sequence[int] | Tensor) -> tuple[int, ...]:
    if isinstance(tokens, Tensor):
        if tokens.dim() != 1 or tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
            what = f"{str(tokens.dtype).removeprefix('torch.')} {tuple(tokens.shape)}"
            raise ValueError(f"tokens: {what}: must be whole numbers (tokens,)")
        check_usable("tokens", tokens)
        return tuple(tokens.tolist())
    for i, token in enumerate(tokens):
        check_type(f"tokens[{i}]", token, int)
    return tuple(index(token) for token in tokens)


def _index_type(max_length: int, cfg: NSAConfig) -> torch.dtype:
    return torch.int16 if max_length <= 2**15 * cfg.block_size else torch.int32


def _multiple_of_16(count: int) -> int:
    return -(-count // 16) * 16
