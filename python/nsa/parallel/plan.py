"""Communication between the ranks in a call of context parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import CompressionWeights, NSAConfig
from ..functional import compress
from ..rotary import rotate
from .exchange import ContextParallel
from .layout import Chunk, halo


@dataclass(frozen=True)
class Plan:
    """Settings that a forward shares with its backward."""

    cp: ContextParallel
    chunks: list[Chunk]
    cfg: NSAConfig
    at_once: int
    packed: bool
    softmax_scale: float | None
    noise: float
    seed: int
    rope: tuple[Tensor, Tensor] | None
    indices: Tensor | None
    return_indices: bool

    @property
    def dim(self) -> int:
        """Dimension of the rows in q, k, v and gates."""
        return 0 if self.packed else 1

    @property
    def size(self) -> int:
        """Rows of a chunk."""
        return self.chunks[0].rows[1]

    def own(self, t: Tensor) -> list[Tensor]:
        """The rows of each of this rank's chunks."""
        return list(t.split(self.size, self.dim))

    def groups(self, kv_heads: int) -> list[tuple[int, int]]:
        """Groups of KV heads that are gathered at once: (begin, end) of each."""
        return [(first, first + self.at_once) for first in range(0, kv_heads, self.at_once)]

    def block_rows(self, t: Tensor, count: int) -> tuple[int, ...]:
        """The shape of t with `count` rows."""
        return (*t.shape[: self.dim], count, *t.shape[self.dim + 1 :])

    def with_halo(self, tensors: list[Tensor]) -> list[list[Tensor]]:
        """The tokens that each own chunk's blocks are made of."""
        cp, reach = self.cp, halo(self.cfg, self.packed)
        parts = [self.own(t) for t in tensors]
        slots = {chunk: slot for slot, chunk in enumerate(cp.own)}
        sent = [
            [p[slots[c + 1]].narrow(self.dim, 0, reach) for c in cp.chunks_of(r) if c + 1 in slots for p in parts]
            for r in range(cp.size)
        ]
        shapes = [
            [self.block_rows(t, reach) for c in cp.own if c + 1 in cp.chunks_of(r) for t in tensors]
            for r in range(cp.size)
        ]
        received = [iter(row) for row in cp.send(sent, shapes, tensors[0])]
        whole = []
        for c in cp.own:
            begin, end = self.chunks[c].squeezed
            rows = [p[slots[c]] for p in parts]
            if c + 1 < len(self.chunks):
                source = received[cp.owners[c + 1]]
                rows = [torch.cat((row, next(source)), self.dim) for row in rows]
            whole.append([row.narrow(self.dim, begin, end - begin) for row in rows])
        return whole

    def halo_to_owners(self, gradients: list[list[Tensor]], like: list[Tensor]) -> list[Tensor]:
        """Sends the gradients of `with_halo`'s rows to their owners. Rows of two chunks are added in float32."""
        cp, reach, dim, size = self.cp, halo(self.cfg, self.packed), self.dim, self.size
        wide = torch.promote_types(like[0].dtype, torch.float32)
        found = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in like]
        over = {}
        for slot, c in enumerate(cp.own):
            begin, end = self.chunks[c].squeezed
            first, last = min(begin, size), max(min(begin, size), min(end, size))
            over[c] = [t.new_zeros(self.block_rows(t, reach)) for t in like]
            for gradient, t, beyond in zip(gradients[slot], found, over[c], strict=True):
                rows = t.narrow(dim, slot * size, size)
                rows.narrow(dim, 0, first).zero_()
                rows.narrow(dim, first, last - first).copy_(gradient.narrow(dim, 0, last - first))
                rows.narrow(dim, last, size - last).zero_()
                if (start := max(begin, size)) < end:
                    rows = gradient.narrow(dim, start - begin, end - start)
                    beyond.narrow(dim, start - size, end - start).copy_(rows)
        sent = [[t for c in cp.own if c + 1 in cp.chunks_of(r) for t in over[c]] for r in range(cp.size)]
        shapes = [
            [self.block_rows(t, reach) for c in cp.chunks_of(r) if c + 1 in cp.own for t in like]
            for r in range(cp.size)
        ]
        received = [iter(row) for row in cp.send(sent, shapes, like[0])]
        for slot, c in enumerate(cp.own):
            for t in found if c else ():
                rows = t.narrow(dim, slot * size, reach)
                rows.copy_(rows.to(wide) + next(received[cp.owners[c - 1]]))
        return found

    def compressed(self, tokens: Tensor, weights: CompressionWeights, chunk: Chunk, rotated: bool) -> Tensor:
        """The compressed tokens whose blocks start in a chunk; rotated, if they are keys."""
        count = chunk.own_blocks[1] - chunk.own_blocks[0]
        if count == 0:
            return tokens.narrow(self.dim, 0, 0)
        out = compress(tokens, weights, self.cfg, self.offsets(chunk.squeezed_lengths, tokens))
        out = out.narrow(self.dim, 0, count)
        if not rotated or self.rope is None:
            return out
        d = self.cfg.kernel_stride
        rows = torch.cat([torch.arange(i * d, (i + n) * d, d, device=tokens.device) for i, n in chunk.block_numbers])
        return rotate(out, self.rope[0][rows], self.rope[1][rows])

    def offsets(self, lengths: tuple[int, ...], like: Tensor) -> Tensor | None:
        """cu_seqlens of documents of these lengths; None in a batched call."""
        if not self.packed:
            return None
        total, offsets = 0, [0]
        for length in lengths:
            total += length
            offsets.append(total)
        return torch.tensor(offsets, dtype=torch.int32, device=like.device)

    def gather(self, compressed: list[list[Tensor]], tensors: list[Tensor], heads: tuple[int, int]) -> Any:
        """Starts to gather a group's heads; calling the result waits and returns the full k_c, v_c and others."""
        dim, most = self.dim, max(c.own_blocks[1] - c.own_blocks[0] for c in self.chunks)
        padded = []
        for x in (0, 1):
            rows = []
            for pair in compressed:
                t = pair[x][..., slice(*heads), :]
                missing = t.new_zeros(self.block_rows(t, most - t.shape[dim]))
                rows += [t, missing]
            padded.append(torch.cat(rows, dim))
        finish = self.cp.gather([*padded, *(t[..., slice(*heads), :] for t in tensors)], dim)

        def gathered() -> list[Tensor]:
            gathered = finish()
            for x in (0, 1):
                parts = [
                    t.narrow(dim, 0, c.own_blocks[1] - c.own_blocks[0])
                    for t, c in zip(gathered[x], self.chunks, strict=True)
                ]
                if self.packed:  # a call's compressed keys have a row for every kernel_stride tokens
                    rows = self.chunks[-1].rows[1] // self.cfg.kernel_stride - self.chunks[-1].own_blocks[1]
                    parts.append(parts[0].new_zeros(self.block_rows(parts[0], rows)))
                gathered[x] = parts
            return [torch.cat(parts, dim) for parts in gathered]

        return gathered

    def seen(self, chunk: Chunk, whole: list[Tensor]) -> list[Tensor]:
        """Keys and values of a chunk's call: k_c, v_c, k_slc, v_slc, k_swa, v_swa."""
        keys = chunk.rows[1] - chunk.first_key
        blocks = keys // self.cfg.kernel_stride if self.packed else chunk.seen_blocks
        views = [t.narrow(self.dim, chunk.first_block, blocks) for t in whole[:2]]
        views += [t.narrow(self.dim, chunk.first_key, keys) for t in whole[2:]]
        return views if len(views) == 6 else [*views, *views[2:]]

    def lengths(self, chunk: Chunk, like: Tensor) -> tuple[Any, ...]:
        """The packed arguments of a chunk's call: offsets of q and of k, and the longest of each."""
        if not self.packed:
            return None, None, 0, 0
        cu_q, cu_k = self.offsets(chunk.lengths_q, like), self.offsets(chunk.lengths_k, like)
        return cu_q, cu_k, max(chunk.lengths_q), max(chunk.lengths_k)

    def given(self, slot: int, heads: tuple[int, int]) -> Tensor | None:
        """The given indices of an own chunk, if any are."""
        return None if self.indices is None else self.own(self.indices)[slot][..., slice(*heads), :].contiguous()

    def shares_to_owners(self, shares: dict[int, list[Tensor]], like: Tensor) -> list[list[Tensor]]:
        """Sends gradients of each own chunk, ordered as in `seen`, to the owners; returns those of the own rows."""
        cp, kinds = self.cp, next(iter(shares.values()))
        if cp.reduction == "reduce_scatter":
            return self._summed_on_the_way(shares, kinds, like)

        def overlaps(readers: list[int], owners: list[int]) -> list[tuple[int, int, int, int, int]]:
            found = [(c, o, i, *self._overlap(c, o, i)[:2]) for c in readers for o in owners for i in range(len(kinds))]
            return [overlap for overlap in found if overlap[3] < overlap[4]]

        sent = [
            [
                shares[c][i].narrow(self.dim, begin, end - begin)
                for c, _, i, begin, end in overlaps(cp.own, cp.chunks_of(r))
            ]
            for r in range(cp.size)
        ]
        incoming = [overlaps(cp.chunks_of(r), cp.own) for r in range(cp.size)]
        shapes = [[self.block_rows(kinds[i], end - begin) for *_, i, begin, end in row] for row in incoming]
        received = cp.send(sent, shapes, like)
        arrived = {
            overlap[:3]: t
            for row, parts in zip(incoming, received, strict=True)
            for overlap, t in zip(row, parts, strict=True)
        }
        return [[self._sum(arrived, o, i, t) for i, t in enumerate(kinds)] for o in cp.own]

    def _sum(self, arrived: dict[tuple[int, int, int], Tensor], owner: int, i: int, like: Tensor) -> Tensor:
        """Sums the shares of tensor i of a chunk's rows, in the fixed order of their source chunks."""
        dim, wide, rows = self.dim, torch.promote_types(like.dtype, torch.float32), self._rows(owner, i)
        total = None
        for c in range(owner, len(self.chunks)):
            if (part := arrived.get((c, owner, i))) is None:
                continue
            if total is None and part.shape[dim] == rows:
                total = part.to(wide, copy=True)
                continue
            if total is None:
                total = like.new_zeros(self.block_rows(like, rows), dtype=wide)
            total.narrow(dim, self._overlap(c, owner, i)[2], part.shape[dim]).add_(part)
        return like.new_zeros(self.block_rows(like, rows), dtype=wide) if total is None else total

    def _summed_on_the_way(
        self, shares: dict[int, list[Tensor]], kinds: list[Tensor], like: Tensor
    ) -> list[list[Tensor]]:
        """`shares_to_owners` by one reduce-scatter; every rank adds its own chunks' shares first."""
        cp, dim = self.cp, self.dim
        most = max(c.own_blocks[1] - c.own_blocks[0] for c in self.chunks)
        shapes = [self.block_rows(t, self.size if i >= 2 else most) for i, t in enumerate(kinds)]
        sizes = [torch.Size(shape).numel() for shape in shapes] * len(cp.own)
        flat = like.new_zeros(cp.size * sum(sizes), dtype=torch.promote_types(like.dtype, torch.float32))
        parts = iter(flat.split(sizes * cp.size))
        for o in (o for rank in range(cp.size) for o in cp.chunks_of(rank)):
            for i, shape in enumerate(shapes):
                total = next(parts).view(shape)
                for c in cp.own:
                    begin, end, start = self._overlap(c, o, i)
                    total.narrow(dim, start, end - begin).add_(shares[c][i].narrow(dim, begin, end - begin))
        parts = iter(cp.reduce_scatter(flat).split(sizes))
        return [
            [next(parts).view(shape).narrow(dim, 0, self._rows(o, i)) for i, shape in enumerate(shapes)] for o in cp.own
        ]

    def _rows(self, owner: int, i: int) -> int:
        """Number of rows of tensor i of `seen` that a chunk owns."""
        begin, end = self.chunks[owner].own_blocks
        return self.size if i >= 2 else end - begin

    def _overlap(self, reader: int, owner: int, i: int) -> tuple[int, int, int]:
        """Rows of tensor i of `seen` that a chunk reads from another: begin and end there, and begin in the owner's."""
        a, b = self.chunks[reader], self.chunks[owner]
        begin, end = a.blocks_of(b) if i < 2 else a.keys_of(b)
        if begin >= end:
            return 0, 0, 0
        return begin, end, begin + (a.first_block - b.own_blocks[0] if i < 2 else a.first_key - b.rows[0])
