"""The key/value cache of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import torch
from torch import Tensor

from ._arguments import check_sizes, check_type, checked
from ._registration import call, ops
from .config import NSAConfig

ROLLBACK = 32
"""How many tokens a rollback may go back: the rings keep this many more than attention needs."""

_LARGEST = 2**31 - 16
"""The largest size: a multiple of 16 in 32 bits, as positions and page numbers are."""


class _Pages:
    """Which pages of a pool each sequence holds; a page shared by several sequences is counted."""

    def __init__(self, name: str, page_size: int, table: Tensor, num_pages: int) -> None:
        self.name = name
        self.page_size = page_size
        self.table = table  # int32 (B, max_pages)
        self.owners = [0] * num_pages
        self.free = list(range(num_pages - 1, -1, -1))
        self.held: list[list[int]] = [[] for _ in range(table.shape[0])]

    def missing(self, sequence: int, tokens: int) -> int:
        """Pages that the sequence lacks to hold `tokens`."""
        return max(0, -(-tokens // self.page_size) - len(self.held[sequence]))

    def require(self, needed: int, max_needed_by_one: int) -> None:
        if max_needed_by_one > self.table.shape[1]:
            raise RuntimeError(
                f"{self.name}: a sequence needs {max_needed_by_one} pages, its table has {self.table.shape[1]}"
            )
        if needed > len(self.free):
            raise RuntimeError(f"{self.name}: {needed} more pages are needed, {len(self.free)} are free")

    def grow(self, sequence: int, tokens: int) -> None:
        if missing := self.missing(sequence, tokens):
            self.held[sequence] += [self._take() for _ in range(missing)]
            self._write(sequence)

    def share(self, parent: int, child: int, count: int) -> None:
        """Gives the child the parent's first `count` pages."""
        for page in self.held[parent][:count]:
            self.owners[page] += 1
            self.held[child].append(page)
        self._write(child)

    def own(self, sequence: int, first_written: int) -> list[tuple[int, int]]:
        """Replaces the shared pages that hold tokens from `first_written` on; returns (old, new) of each."""
        replaced = []
        pages = self.held[sequence]
        for i in range(first_written // self.page_size, len(pages)):
            if self.owners[pages[i]] > 1:
                old, new = pages[i], self._take()
                self.owners[old] -= 1
                pages[i] = new
                replaced.append((old, new))
        if replaced:
            self._write(sequence)
        return replaced

    def shared_from(self, sequence: int, first_written: int) -> int:
        """Shared pages that hold tokens from `first_written` on."""
        return sum(self.owners[page] > 1 for page in self.held[sequence][first_written // self.page_size :])

    def release(self, sequence: int) -> None:
        for page in self.held[sequence]:
            self.owners[page] -= 1
            if self.owners[page] == 0:
                self.free.append(page)
        self.held[sequence] = []
        self._write(sequence)

    def _take(self) -> int:
        page = self.free.pop()
        self.owners[page] = 1
        return page

    def _write(self, sequence: int) -> None:
        """Puts the pages of the sequence into its row of the table, behind what the device has to do already."""
        pages = self.held[sequence]
        row = torch.tensor(pages + [-1] * (self.table.shape[1] - len(pages)), dtype=torch.int32, device="cpu")
        self.table[sequence].copy_(row, non_blocking=True)


class KVCache:
    """Keys and values of `batch_size` sequences for `decode` and `prefill`.

    Selection keys and values lie in pages (num_pages, page_size, Hkv, D) that `block_table` (B, max_pages) assigns to
    the sequences; compressed tokens likewise in their own pages; the window's last window_size + 32 tokens and the last
    kernel_size + 32 raw tokens of compression lie in rings. Without `page_size` the cache is contiguous: one page per
    sequence, its own from the start.

    A step reads and advances `cache_seqlens` (int32 (B)) on the device, without waiting for it. Its room must have been
    reserved: a sequence without room writes nothing, keeps its length, gets o = 0 and sets a flag that `check` reads.

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
        dtype: of keys and values.
        device: of all tensors of the cache, default torch's default device.

    Raises:
        ValueError: a size is not allowed.
        TypeError: an argument is of another type.
    """

    @checked
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
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | int | None = None,
    ) -> None:
        cfg = NSAConfig() if cfg is None else cfg
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        sizes = {"batch_size": batch_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        check_sizes(_LARGEST, **sizes, v_head_dim=v_head_dim, max_length=max_length, num_pages=num_pages)
        if page_size is not None and (not 16 <= page_size <= _LARGEST or page_size % 16):
            raise ValueError(f"page_size = {page_size}: must be a positive multiple of 16, <= {_LARGEST}")
        if num_pages is not None and page_size is None:
            raise ValueError(f"num_pages = {num_pages}: must be >= 1, and goes with page_size")
        self.cfg = cfg
        self.max_length = max_length
        self.contiguous = page_size is None

        def pool(name: str, longest: int, size: int, count: int | None) -> tuple[_Pages, Tensor, Tensor]:
            per_sequence = -(-longest // size)
            count = batch_size * per_sequence if count is None else count
            table = torch.full((batch_size, per_sequence), -1, dtype=torch.int32, device=device)
            shape = (count, size, num_kv_heads)
            keys = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
            return _Pages(name, size, table, count), keys, torch.zeros(*shape, v_head_dim, dtype=dtype, device=device)

        def ring(tokens: int, dim: int) -> Tensor:
            return torch.zeros(batch_size, tokens + ROLLBACK, num_kv_heads, dim, dtype=dtype, device=device)

        longest_c = max(1, cfg.num_compressed(max_length))
        size, size_c = page_size or _multiple_of_16(max_length), _multiple_of_16(longest_c)
        num_pages_c = None
        if page_size is not None:
            size_c = min(size_c, _multiple_of_16(-(-page_size // cfg.kernel_stride)))
            if num_pages is not None:
                tokens_c = -(-num_pages * page_size // cfg.kernel_stride)
                num_pages_c = -(-tokens_c // size_c) + batch_size  # each sequence may hold a page in part
        self._pages, self.k_slc, self.v_slc = pool("KVCache", max_length, size, num_pages)
        self._pages_c, self.k_c, self.v_c = pool("KVCache, compressed", longest_c, size_c, num_pages_c)
        self.k_swa_ring, self.v_swa_ring = ring(cfg.window_size, head_dim), ring(cfg.window_size, v_head_dim)
        self.k_cmp_ring, self.v_cmp_ring = ring(cfg.kernel_size, head_dim), ring(cfg.kernel_size, v_head_dim)
        self.cache_seqlens = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.overflow = torch.zeros(1, dtype=torch.int32, device=device)
        self._longest = [0] * batch_size  # before the last rollback: the rings have lost what is older than 32 tokens
        if self.contiguous:
            self.reserve(max_length)

    @property
    def batch_size(self) -> int:
        return self.cache_seqlens.shape[0]

    @property
    def block_table(self) -> Tensor:
        """int32 (B, max_pages): page p of a sequence, -1: none."""
        return self._pages.table

    @property
    def block_table_c(self) -> Tensor:
        """int32 (B, max_pages_c): page p of a sequence's compressed tokens, -1: none."""
        return self._pages_c.table

    @property
    def free_pages(self) -> int:
        """Pages of selection keys and values that no sequence holds."""
        return len(self._pages.free)

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors in the order in which the operators in torch.ops.nsa take them."""
        rings = (self.k_swa_ring, self.v_swa_ring, self.k_cmp_ring, self.v_cmp_ring)
        state = (self.cache_seqlens, self.overflow, self.block_table, self.block_table_c)
        return self.k_slc, self.v_slc, self.k_c, self.v_c, *rings, *state

    def reserve(self, upper_bound: int | Sequence[int]) -> None:
        """Makes room for sequences of up to `upper_bound` tokens in all (one number, or one per sequence).

        Raises:
            ValueError: a bound is negative or above max_length, or their number is not B.
            TypeError: a bound is no integer.
            RuntimeError: the pool has too few free pages; nothing was reserved.
        """
        if not hasattr(upper_bound, "__len__") or getattr(upper_bound, "ndim", 1) == 0:
            check_type("upper_bound", upper_bound, int)
            upper_bound = [upper_bound] * self.batch_size
        for i, bound in enumerate(upper_bound):
            check_type(f"upper_bound[{i}]", bound, int)
        bounds = [index(bound) for bound in upper_bound]
        if len(bounds) != self.batch_size:
            raise ValueError(f"upper_bound: {len(bounds)} numbers: must be one, or {self.batch_size}, one per sequence")
        for bound in bounds:
            if not 0 <= bound <= self.max_length:
                raise ValueError(f"upper_bound = {bound}: must be 0 ... max_length = {self.max_length}")
        compressed = [self.cfg.num_compressed(bound) for bound in bounds]
        for pages, tokens in ((self._pages, bounds), (self._pages_c, compressed)):
            missing = [pages.missing(b, count) for b, count in enumerate(tokens)]
            pages.require(sum(missing), max(-(-count // pages.page_size) for count in tokens))
        for b in range(self.batch_size):
            self._pages.grow(b, bounds[b])
            self._pages_c.grow(b, compressed[b])

    def check(self) -> None:
        """Waits for the device. Raises RuntimeError if a step since the last check found no room for a sequence."""
        if int(self.overflow.item()):
            self.overflow.zero_()
            raise RuntimeError("KVCache: a step found no room for a sequence and dropped its tokens: reserve more")

    @checked
    def rollback(self, sequence: int, length: int) -> None:
        """Forgets the tokens of a row from `length` on, as if they had never been appended. Waits for the device.

        Raises:
            ValueError: the row, or a length above its own or more than 32 below the longest that it has been.
            RuntimeError: pages shared with a fork would have to be copied, and too few are free; nothing was forgotten.
        """
        self._check_going_back("sequence", sequence, length)
        plan = (
            (self._pages, length, (self.k_slc, self.v_slc)),
            (self._pages_c, self.cfg.num_compressed(length), (self.k_c, self.v_c)),
        )
        for pages, tokens, _ in plan:
            pages.require(pages.shared_from(sequence, tokens), 0)
        for pages, tokens, stores in plan:
            for old, new in pages.own(sequence, tokens):
                for store in stores:
                    store[new] = store[old]
        self.cache_seqlens[sequence] = length

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
            self.release(child)
            plan = ((self._pages, length), (self._pages_c, self.cfg.num_compressed(length)))
            for pages, tokens in plan:
                pages.require(int(tokens % pages.page_size > 0), 0)
            for pages, tokens in plan:
                pages.share(parent, child, tokens // pages.page_size)
                pages.grow(child, tokens)
        call(ops.fork, *self.tensors(), self.cfg.as_list(), parent, child, length)
        self._longest[child] = self._longest[parent]

    @checked
    def release(self, sequence: int) -> None:
        """Empties a row and gives its pages back to the pool (a contiguous row keeps its page)."""
        self.cache_seqlens[self._row("sequence", sequence)] = 0
        self._longest[sequence] = 0
        if not self.contiguous:
            self._pages.release(sequence)
            self._pages_c.release(sequence)

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


def _multiple_of_16(count: int) -> int:
    return -(-count // 16) * 16
