"""Layout of context parallelism: each rank's chunks and the keys that each chunk attends to. Host integers only."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from ..config import NSAConfig

LAYOUTS = ("head_tail", "contiguous")


def chunk_owners(layout: str, ranks: int, chunks: int | None) -> list[int]:
    """The rank of each chunk of a sequence.

    head_tail deals chunks to the ranks there and back (0 ... P-1, P-1 ... 0), so that all see about equally many keys:
    with 2P chunks it is the order of torch's context_parallel, TransformerEngine and Megatron. contiguous gives each
    rank one stretch.

    Raises:
        ValueError: an unknown layout, or a number of chunks that it cannot deal.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout = {layout!r}: must be {' or '.join(LAYOUTS)}")
    multiple = 2 * ranks if layout == "head_tail" else ranks
    chunks = multiple if chunks is None else chunks
    if chunks < 1 or chunks % multiple:
        raise ValueError(f"chunks = {chunks}: must be a multiple of {multiple} for {ranks} ranks in layout {layout}")
    if layout == "contiguous":
        return [chunk * ranks // chunks for chunk in range(chunks)]
    there_and_back = [*range(ranks), *reversed(range(ranks))]
    return there_and_back * (chunks // multiple)


@dataclass(frozen=True)
class Chunk:
    """One call's queries, and the rows of gathered keys and compressed keys that it sees.

    Attributes:
        rows: of the sequence, begin and end: the queries.
        first_key: where the keys begin, which end with the queries: 0, or the start of the queries' first document.
        first_block: the compressed row of the first key's block.
        seen_blocks: how many compressed rows from there on belong to blocks that end before the chunk does.
        own_blocks: begin and end of the compressed rows whose blocks start in this chunk.
        squeezed: begin and end, from the chunk's first row on, of the tokens that own_blocks are made of.
        squeezed_lengths: of the documents in `squeezed`; empty in a batched call.
        block_numbers: of own_blocks within their documents, as (first number, how many) for each document.
        lengths_q, lengths_k: of the documents in the call; empty in a batched one.
    """

    rows: tuple[int, int]
    first_key: int
    first_block: int
    seen_blocks: int
    own_blocks: tuple[int, int]
    squeezed: tuple[int, int]
    squeezed_lengths: tuple[int, ...]
    block_numbers: tuple[tuple[int, int], ...]
    lengths_q: tuple[int, ...] = ()
    lengths_k: tuple[int, ...] = ()

    def keys_of(self, other: Chunk) -> tuple[int, int]:
        """The keys of `other` that this one sees, begin and end, from this one's first key on."""
        begin = max(self.first_key, other.rows[0])
        return begin - self.first_key, max(begin, min(self.rows[1], other.rows[1])) - self.first_key

    def blocks_of(self, other: Chunk) -> tuple[int, int]:
        """Likewise of compressed keys."""
        begin = max(self.first_block, other.own_blocks[0])
        end = min(self.first_block + self.seen_blocks, other.own_blocks[1])
        return begin - self.first_block, max(begin, end) - self.first_block


def halo(cfg: NSAConfig, packed: bool) -> int:
    """Tokens after a chunk that the blocks which start in it reach into at most."""
    return cfg.kernel_size - (1 if packed else cfg.kernel_stride)


def divide(length: int, chunks: int, cfg: NSAConfig, offsets: list[int] | None) -> list[Chunk]:
    """The chunks of a sequence of `length` tokens; `offsets` of packed documents.

    Raises:
        ValueError: chunks of this length are not possible, or the offsets do not cover it.
    """
    size, d = length // chunks, cfg.kernel_stride
    step = 1 if offsets else d
    if length % chunks or size < cfg.kernel_size or size % step:
        shortest = -(-max(-(-length // chunks), cfg.kernel_size) // step) * step * chunks
        rule = f"at least kernel_size = {cfg.kernel_size}" + ("" if offsets else f" and a multiple of {d}")
        raise ValueError(
            f"S = {length} tokens in {chunks} chunks: a chunk must have {rule} tokens; "
            f"the shortest length that works is {shortest}: pad the end"
        )
    if offsets is not None and (offsets[0] != 0 or offsets[-1] != length or offsets != sorted(offsets)):
        raise ValueError(
            f"cu_seqlens: from {offsets[0]} to {offsets[-1]}: must rise from 0 to S = {length}, the tokens of all "
            "ranks; padding is a document of its own"
        )
    documents = [0, length] if offsets is None else offsets
    blocks = [0]
    for begin, end in pairwise(documents):
        blocks.append(blocks[-1] + cfg.num_compressed(end - begin))
    made: list[Chunk] = []
    for begin in range(0, length, size):
        made.append(_chunk(begin, begin + size, cfg, documents, blocks, offsets is not None, made))
    return made


def _chunk(
    begin: int, end: int, cfg: NSAConfig, documents: list[int], blocks: list[int], packed: bool, before: list[Chunk]
) -> Chunk:
    d, reach = cfg.kernel_stride, end + halo(cfg, packed)
    first = bisect_right(documents, begin) - 1
    lengths_q, lengths_k, squeezed, numbers = [], [], [], []
    start, seen = begin, 0
    for i in range(first, bisect_right(documents, end - 1)):
        low, high = documents[i], documents[i + 1]
        if low == high:
            continue
        keys = min(high, end) - low
        lengths_k.append(keys)
        lengths_q.append(min(high, end) - max(low, begin))
        seen += cfg.num_compressed(keys)
        skipped = max(0, -(-(begin - low) // d))  # blocks that start before the chunk
        from_here, until = low + skipped * d, min(high, reach)
        if i == first:
            start = min(from_here, until)
        squeezed.append(max(0, until - max(from_here, start)))
        numbers.append((skipped, cfg.num_compressed(squeezed[-1])))
    made = before[-1].own_blocks[1] if before else 0
    return Chunk(
        rows=(begin, end),
        first_key=documents[first],
        first_block=blocks[first],
        seen_blocks=seen,
        own_blocks=(made, made + sum(count for _, count in numbers)),
        squeezed=(start - begin, start - begin + sum(squeezed)),
        squeezed_lengths=tuple(squeezed) if packed else (),
        block_numbers=tuple(numbers),
        lengths_q=tuple(lengths_q) if packed else (),
        lengths_k=tuple(lengths_k) if packed else (),
    )
