"""The gradients of keys and values, on their way from the chunks that saw them to the ranks that have them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .plan import Plan


class Shares:
    """Of one group of KV heads: every own chunk's gradients of what it saw, in the order of `Plan.seen`.

    Every rank adds its chunks in the same order of slots. A share is on its way while the next chunk is worked on.
    """

    def __init__(self, plan: Plan, like: Tensor) -> None:
        self.plan, self.like = plan, like
        self.wide = torch.promote_types(like.dtype, torch.float32)
        self.given: dict[int, list[Tensor]] = {}
        self.coming: list[Callable[[], dict[tuple[int, int, int], Tensor]]] = []
        self.reduced: Callable[[], Tensor] | None = None

    def add(self, slot: int, gradients: list[Tensor]) -> None:
        """Begins to send the share of an own chunk, or, to reduce, those of all."""
        self.given[slot] = gradients
        if self.plan.cp.reduction == "all_to_all":
            self.coming.append(self._send(slot))
        elif len(self.given) == len(self.plan.cp.own):
            self.reduced = self.plan.cp.reduce_scatter(self._added())

    def totals(self) -> list[list[Tensor]]:
        """Waits; gives every own chunk's gradients, and keeps nothing."""
        if self.reduced is not None:
            totals = self._parts(self.reduced())
        else:
            arrived = {piece: t for finish in self.coming for piece, t in finish().items()}
            totals = [[self._sum(arrived, o, i) for i in range(self._count)] for o in self.plan.cp.own]
        self.given, self.coming, self.reduced = {}, [], None
        return totals

    def _send(self, slot: int) -> Callable[[], dict[tuple[int, int, int], Tensor]]:
        """The result waits and gives the shares that came, by reader, owner and number of the tensor."""
        cp, dim = self.plan.cp, self.plan.dim
        readers = [cp.chunks_of(r)[slot] for r in range(cp.size)]

        def pieces(reader: int, owners: list[int]) -> list[tuple[int, int, int, int, int]]:
            found = [(reader, o, i, *self._overlap(reader, o, i)[:2]) for o in owners for i in range(self._count)]
            return [piece for piece in found if piece[3] < piece[4]]

        sent = [
            [
                self.given[slot][i].narrow(dim, begin, end - begin)
                for *_, i, begin, end in pieces(readers[cp.rank], cp.chunks_of(r))
            ]
            for r in range(cp.size)
        ]
        incoming = [pieces(reader, cp.own) for reader in readers]
        shapes = [[self._shape(i, end - begin) for *_, i, begin, end in row] for row in incoming]
        finish = cp.send(sent, shapes, self.like)

        def arrived() -> dict[tuple[int, int, int], Tensor]:
            received = finish()
            return {
                piece[:3]: t
                for row, parts in zip(incoming, received, strict=True)
                for piece, t in zip(row, parts, strict=True)
            }

        return arrived

    def _sum(self, arrived: dict[tuple[int, int, int], Tensor], owner: int, i: int) -> Tensor:
        """Of the shares of tensor i of a chunk's rows, always in the order of the chunks that they come of."""
        dim, rows = self.plan.dim, self._rows(owner, i)
        total = None
        for c in range(owner, len(self.plan.chunks)):
            if (part := arrived.get((c, owner, i))) is None:
                continue
            if total is None and part.shape[dim] == rows:
                total = part.to(self.wide, copy=True)
                continue
            if total is None:
                total = self._zeros(owner, i)
            total.narrow(dim, self._overlap(c, owner, i)[2], part.shape[dim]).add_(part)
        return self._zeros(owner, i) if total is None else total

    def _added(self) -> Tensor:
        """All own chunks' shares of every rank's rows, padded to equal parts, one after the other."""
        cp, dim = self.plan.cp, self.plan.dim
        shapes, sizes = self._padded()
        flat = self.like.new_zeros(cp.size * sum(sizes), dtype=self.wide)
        parts = iter(flat.split(sizes * cp.size))
        for o in (o for rank in range(cp.size) for o in cp.chunks_of(rank)):
            for i, shape in enumerate(shapes):
                total = next(parts).view(shape)
                for slot, c in enumerate(cp.own):
                    begin, end, start = self._overlap(c, o, i)
                    total.narrow(dim, start, end - begin).add_(self.given[slot][i].narrow(dim, begin, end - begin))
        return flat

    def _parts(self, mine: Tensor) -> list[list[Tensor]]:
        shapes, sizes = self._padded()
        parts = iter(mine.split(sizes))
        return [
            [next(parts).view(shape).narrow(self.plan.dim, 0, self._rows(o, i)) for i, shape in enumerate(shapes)]
            for o in self.plan.cp.own
        ]

    def _padded(self) -> tuple[list[tuple[int, ...]], list[int]]:
        """Shapes of a chunk's rows of each tensor, as large as any chunk's, and the sizes of an own part."""
        most = max(c.own_blocks[1] - c.own_blocks[0] for c in self.plan.chunks)
        shapes = [self._shape(i, self.plan.size if i >= 2 else most) for i in range(self._count)]
        return shapes, [torch.Size(shape).numel() for shape in shapes] * len(self.plan.cp.own)

    @property
    def _count(self) -> int:
        return len(next(iter(self.given.values())))

    def _shape(self, i: int, rows: int) -> tuple[int, ...]:
        return self.plan.block_rows(next(iter(self.given.values()))[i], rows)

    def _zeros(self, owner: int, i: int) -> Tensor:
        return self.like.new_zeros(self._shape(i, self._rows(owner, i)), dtype=self.wide)

    def _rows(self, owner: int, i: int) -> int:
        """How many rows of tensor i of `Plan.seen` a chunk owns."""
        begin, end = self.plan.chunks[owner].own_blocks
        return self.plan.size if i >= 2 else end - begin

    def _overlap(self, reader: int, owner: int, i: int) -> tuple[int, int, int]:
        """What a chunk sees of another's rows of tensor i: begin and end there, and begin in the owner's."""
        a, b = self.plan.chunks[reader], self.plan.chunks[owner]
        begin, end = a.blocks_of(b) if i < 2 else a.keys_of(b)
        if begin >= end:
            return 0, 0, 0
        return begin, end, begin + (a.first_block - b.own_blocks[0] if i < 2 else a.first_key - b.rows[0])
