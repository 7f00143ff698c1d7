"""Page numbers of a cache's sequences and of cached prefixes. The memory belongs to the caller."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from .config import NSAConfig

Method = TypeVar("Method", bound=Callable[..., Any])
Copies = tuple[list[tuple[int, int]], list[tuple[int, int]]]
"""(source, destination) of pages to copy: pages of tokens, and pages of compressed tokens."""


class Pool:
    """Pages of one kind: reference counts, the free list, and the pages of each sequence."""

    def __init__(self, name: str, page_size: int, num_pages: int, batch: int, max_pages: int) -> None:
        self.name, self.page_size, self.max_pages = name, page_size, max_pages
        self.uses = [0] * num_pages
        self.free = list(range(num_pages - 1, -1, -1))
        self.held: list[list[int]] = [[] for _ in range(batch)]
        self.uploaded = torch.empty(0, dtype=torch.int32, device="cpu")

    def table(self, changed: set[int]) -> Tensor:
        """int32 (B, max_pages) in host memory, -1: none. Updates only the sequences in `changed`."""
        shape = len(self.held), self.max_pages
        if self.uploaded.shape != shape:
            changed = set(range(len(self.held)))
            with torch.inference_mode(False):
                self.uploaded = torch.empty(shape, dtype=torch.int32, device="cpu")
        for sequence in changed:
            pages = self.held[sequence]
            numbers = torch.tensor(pages + [-1] * (self.max_pages - len(pages)), dtype=torch.int32, device="cpu")
            self.uploaded[sequence] = numbers
        return self.uploaded

    def copy(self) -> Pool:
        other = copy.copy(self)
        other.uses, other.free = self.uses.copy(), self.free.copy()
        other.held = [pages.copy() for pages in self.held]
        return other

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def take(self) -> int:
        page = self.free.pop()
        self.uses[page] = 1
        return page

    def share(self, pages: list[int]) -> list[int]:
        for page in pages:
            self.uses[page] += 1
        return pages

    def give_back(self, pages: list[int]) -> None:
        for page in pages:
            self.uses[page] -= 1
            if self.uses[page] == 0:
                self.free.append(page)

    def extend(self, num_pages: int, max_pages: int) -> None:
        """More pages, and longer rows of the table."""
        self.free = [*range(num_pages - 1, len(self.uses) - 1, -1), *self.free]
        self.uses += [0] * (num_pages - len(self.uses))
        self.max_pages = max(self.max_pages, max_pages)


def check_sharing(name: str, rows: Sequence[Sequence[int]], full: Sequence[int]) -> None:
    """Raises ValueError for a page that a row has twice, or several rows have beyond their first `full` ones."""
    own = [page for pages, count in zip(rows, full, strict=True) for page in pages[count:]]
    written = set(own)
    if len(written) == len(own) and all(
        len(set(pages)) == len(pages) and written.isdisjoint(pages[:count])
        for pages, count in zip(rows, full, strict=True)
    ):
        return  # quick: a step of an engine has tens of thousands of pages
    found: dict[int, tuple[int, int]] = {}
    for b, pages in enumerate(rows):
        for p, page in enumerate(pages):
            other, place = found.setdefault(page, (b, p))
            if (other, place) == (b, p):
                continue
            if other == b or p >= full[b] or place >= full[other]:
                rule = "only full pages can be shared, by different sequences"
                raise ValueError(f"{name}[{b}, {p}] = {page}: {name}[{other}, {place}] is this page too: {rule}")


class Prefix(NamedTuple):
    """A cached prefix: its tokens, their hash, its slot among the rings of prefixes, its pages of both kinds."""

    tokens: tuple[int, ...]
    hash: int
    slot: int
    pages: tuple[list[int], list[int]]


def _all_or_nothing(method: Method) -> Method:
    @functools.wraps(method)
    def run(self: PageAllocator, *arguments: Any) -> Any:
        before = self.copy()
        try:
            return method(self, *arguments)
        except RuntimeError:
            vars(self).update(vars(before))
            raise

    return cast(Method, run)


class PageAllocator:
    """Allocates pages to sequences and cached prefixes, with the same results as nsa::PageAllocator.

    Tracks page numbers only. The owner of the memory copies pages and rings, and uploads the tables of `changed`
    sequences (`flush`). Shared pages are full and read-only. When pages run out, cached prefixes are evicted, the least
    recently used first. A RuntimeError leaves the state unchanged.
    """

    def __init__(self, cfg: NSAConfig, tokens: Pool, compressed: Pool, num_prefixes: int = 0) -> None:
        self.cfg, self.tokens, self.compressed = cfg, tokens, compressed
        self.kept: list[Prefix] = []  # the least recently used first
        self.free_slots = list(range(num_prefixes - 1, -1, -1))
        self.changed: set[int] = set()

    @property
    def pools(self) -> tuple[Pool, Pool]:
        return self.tokens, self.compressed

    def copy(self) -> PageAllocator:
        other = copy.copy(self)
        other.tokens, other.compressed = self.tokens.copy(), self.compressed.copy()
        other.kept, other.free_slots, other.changed = self.kept.copy(), self.free_slots.copy(), self.changed.copy()
        return other

    def sizes(self, length: int) -> tuple[int, int]:
        """Tokens, and compressed tokens, of a sequence of this length."""
        return length, self.cfg.num_compressed(length)

    def has_capacity(self, sequence: int, length: int) -> bool:
        sizes = zip(self.pools, self.sizes(length), strict=True)
        return all(len(pool.held[sequence]) >= pool.pages_for(count) for pool, count in sizes)

    def reserve(self, lengths: Sequence[int]) -> None:
        """Pages for sequences of up to these lengths."""
        if not all(self.has_capacity(b, length) for b, length in enumerate(lengths)):
            self._reserve(lengths)

    @_all_or_nothing
    def _reserve(self, lengths: Sequence[int]) -> None:
        for b, length in enumerate(lengths):
            for pool, count in zip(self.pools, self.sizes(length), strict=True):
                self._extend(pool, b, count)

    @_all_or_nothing
    def rollback(self, lengths: dict[int, int]) -> Copies:
        """Truncates sequences to these lengths: shared pages that they would write to are replaced by copies."""
        copies: Copies = ([], [])
        for b, length in lengths.items():
            for pool, count, copied in zip(self.pools, self.sizes(length), copies, strict=True):
                self._own(pool, b, count, copied)
        return copies

    @_all_or_nothing
    def fork(self, parent: int, child: int, length: int) -> None:
        """The child gets the parent's full pages before `length`, and pages of its own for the rest."""
        self.release(child)
        for pool, count in zip(self.pools, self.sizes(length), strict=True):
            pool.held[child] = pool.share(pool.held[parent][: count // pool.page_size])
            self._extend(pool, child, count)

    def release(self, sequence: int) -> None:
        for pool in self.pools:
            pool.give_back(pool.held[sequence])
            pool.held[sequence] = []
        self.changed.add(sequence)

    @_all_or_nothing
    def select(self, rows: Sequence[int], lengths: Sequence[int]) -> Copies:
        """Row b becomes row rows[b] with its tokens.

        The first successor of a row takes its pages; others share the full ones and get a copy of the last.
        """
        copies: Copies = ([], [])
        counts = [self.sizes(length) for length in lengths]
        for i, (pool, copied) in enumerate(zip(self.pools, copies, strict=True)):
            before, pool.held = pool.held, [[] for _ in rows]
            for dropped in set(range(len(before))) - set(rows):
                pool.give_back(before[dropped])
            taken = set()
            for b, row in enumerate(rows):
                if row not in taken:
                    taken.add(row)
                    pool.held[b] = before[row].copy()
                    continue
                full, part = divmod(counts[row][i], pool.page_size)
                pool.held[b] = pool.share(before[row][:full])
                if part:
                    self._evict_for(pool, b, lambda: 1)
                    pool.held[b].append(pool.take())
                    copied.append((before[row][full], pool.held[b][-1]))
        self.changed = set(range(len(rows)))
        return copies

    def keep_prefix(self, sequence: int, tokens: tuple[int, ...]) -> tuple[Prefix, Copies | None] | None:
        """Keeps the full pages of the sequence's first tokens beyond its release; None: a page or a slot is missing.

        The copies are None where it is cached already; else the rings belong into its slot.
        """
        hashes = self._hashes(tokens)
        tokens = tokens[: len(hashes) * self.tokens.page_size]
        if not hashes or not self.has_capacity(sequence, len(tokens)):
            return None
        for i, prefix in enumerate(self.kept):
            if prefix.hash == hashes[-1] and prefix.tokens == tokens:
                self.kept.append(self.kept.pop(i))
                return prefix, None
        if not self.free_slots and not self.kept:
            return None
        try:
            return self._keep(sequence, tokens, hashes[-1])
        except RuntimeError:
            return None

    @_all_or_nothing
    def _keep(self, sequence: int, tokens: tuple[int, ...], name: int) -> tuple[Prefix, Copies]:
        if not self.free_slots:
            self._drop(0)
        full, part = divmod(self.cfg.num_compressed(len(tokens)), self.compressed.page_size)
        self._evict_for(self.compressed, sequence, lambda: int(part > 0))
        held, held_c = (pool.held[sequence] for pool in self.pools)
        pages = self.tokens.share(held[: len(tokens) // self.tokens.page_size])
        pages_c = self.compressed.share(held_c[:full])
        copies: Copies = ([], [])
        if part:  # the sequence still writes to this one
            pages_c.append(self.compressed.take())
            copies[1].append((held_c[full], pages_c[-1]))
        self.kept.append(Prefix(tokens, name, self.free_slots.pop(), (pages, pages_c)))
        return self.kept[-1], copies

    def match_prefix(self, sequence: int, tokens: tuple[int, ...]) -> tuple[Prefix, Copies] | None:
        """The sequence begins with the longest cached prefix of these tokens that leaves one over; None: none does."""
        hashes = self._hashes(tokens[:-1])

        def begins(prefix: Prefix) -> bool:
            count = len(prefix.pages[0])
            known = count <= len(hashes) and prefix.hash == hashes[count - 1]
            return known and prefix.tokens == tokens[: len(prefix.tokens)]

        fitting = [i for i, prefix in enumerate(self.kept) if begins(prefix)]
        if not fitting:
            return None
        found = max(fitting, key=lambda i: len(self.kept[i].tokens))
        prefix = self.kept.pop(found)
        self.kept.append(prefix)
        try:
            return prefix, self._match(sequence, prefix)
        except RuntimeError:
            return None

    @_all_or_nothing
    def _match(self, sequence: int, prefix: Prefix) -> Copies:
        self.release(sequence)
        # Its last page in part is the sequence's too until it is copied, so that it does not give way itself.
        for pool, pages in zip(self.pools, prefix.pages, strict=True):
            pool.held[sequence] = pool.share(pages.copy())
        copies: Copies = ([], [])
        self._own(self.compressed, sequence, self.cfg.num_compressed(len(prefix.tokens)), copies[1])
        return copies

    def flush(self, *tables: Tensor) -> None:
        """Uploads the tables if pages have changed, without waiting for the device.

        One copy does both where the second table lies behind the first.
        """
        if not self.changed:
            return
        numbers = [pool.table(self.changed) for pool in self.pools]
        pairs = list(zip(tables, numbers, strict=True))
        first, second = tables
        shared = first.untyped_storage()._cdata == second.untyped_storage()._cdata
        if shared and second.storage_offset() == first.storage_offset() + first.numel():
            both = first.as_strided((first.numel() + second.numel(),), (1,))
            pairs = [(both, torch.cat([rows.flatten() for rows in numbers]))]
        for table, rows in pairs:
            if table.is_cuda:  # torch keeps pinned memory until the copy has taken it
                rows = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True).copy_(rows)
            table.copy_(rows, non_blocking=True)
        self.changed = set()

    def _hashes(self, tokens: tuple[int, ...]) -> list[int]:
        """Hashes of the tokens up to the end of each full page."""
        size, found, last = self.tokens.page_size, [], 0
        for begin in range(0, len(tokens) - size + 1, size):
            last = hash((last, tokens[begin : begin + size]))
            found.append(last)
        return found

    def _drop(self, i: int) -> None:
        prefix = self.kept.pop(i)
        for pool, pages in zip(self.pools, prefix.pages, strict=True):
            pool.give_back(pages)
        self.free_slots.append(prefix.slot)

    def _evict_for(self, pool: Pool, sequence: int, need: Callable[[], int]) -> None:
        """Prefixes give way until there are as many free pages as `need()`, which may become less by that.

        First the least recently used that alone has a page of the pool; if none has, the least recently used.
        """
        which = self.pools.index(pool)
        while (needed := need()) > len(pool.free):
            if not self.kept:
                what = f"sequence {sequence} needs {needed} more pages of {pool.name}, {len(pool.free)} are free"
                raise RuntimeError(f"KVCache: {what}")
            gives = (i for i, p in enumerate(self.kept) if any(pool.uses[page] == 1 for page in p.pages[which]))
            self._drop(next(gives, 0))

    def _extend(self, pool: Pool, sequence: int, tokens: int) -> None:
        missing = max(0, pool.pages_for(tokens) - len(pool.held[sequence]))
        if missing:
            self._evict_for(pool, sequence, lambda: missing)
            pool.held[sequence] += [pool.take() for _ in range(missing)]
            self.changed.add(sequence)

    def _own(self, pool: Pool, sequence: int, tokens: int, copies: list[tuple[int, int]]) -> None:
        held, first = pool.held[sequence], tokens // pool.page_size
        self._evict_for(pool, sequence, lambda: sum(pool.uses[page] > 1 for page in held[first:]))
        for i in range(first, len(held)):
            if pool.uses[held[i]] > 1:
                copies.append((held[i], pool.take()))
                pool.give_back([held[i]])
                held[i] = copies[-1][1]
                self.changed.add(sequence)
