"""Rollout and training with the same blocks: selections recorded during generation, replayed in training.

In reinforcement learning one program samples and another one learns. Where their arithmetic differs, so do some of the
selected blocks, and then the log-probabilities. A training forward that attends to the recorded blocks has no such
difference::

    with nsa.replay.record(model):
        out = model.generate(prompt, return_dict_in_generate=True, ...)
    records = nsa.replay.collect(out.cache)
    with nsa.replay.replay(model, records):
        loss(model(out.sequences)).backward()

MoE models do the same with the experts of their router ("routing replay").
"""

from __future__ import annotations

import ctypes
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ._arguments import check_order, check_type
from .cache import KVCache
from .config import NSAConfig
from .layer import NativeSparseAttention
from .selector import block_mask

__all__ = ["Replay", "SelectionRecord", "collect", "record", "replay"]

_MAGIC = b"nsa selections 1\n"
_MASK = 2**24  # elements of a mask of tokens and blocks, at most 1024 tokens at a time
_LIMIT = 2**31  # bytes of one record when it is read: more is no record


@dataclass(frozen=True, eq=False)  # tensors are not equal or unequal as one
class SelectionRecord:
    """The blocks that a model's sparse layers selected for the tokens of one sequence.

    Attributes:
        indices: int16 or int32 (layers, tokens, Hkv, topk), ascending, padded with -1, as `nsa.select_blocks` has them.
        cfg: hyperparameters of the layers.
    """

    indices: Tensor
    cfg: NSAConfig

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError for what is no record."""
        check_type("indices", self.indices, Tensor)
        check_type("cfg", self.cfg, NSAConfig)
        shape = tuple(self.indices.shape)
        is_record = len(shape) == 4 and shape[0] > 0 and shape[2] > 0 and shape[3] == self.cfg.topk
        if self.indices.dtype not in (torch.int16, torch.int32) or not is_record:
            what = f"{str(self.indices.dtype).removeprefix('torch.')} {shape}"
            raise ValueError(f"indices: {what}: must be int16 or int32 (layers, tokens, Hkv, topk = {self.cfg.topk})")

    def __len__(self) -> int:
        """Number of tokens."""
        return self.indices.shape[1]

    def resized(self, length: int) -> SelectionRecord:
        """The record of the first `length` tokens, at most one more than it has.

        Generation does not feed back the last token that it samples, so a record may lack it. It then attends to the
        forced blocks. No log-probability of the sequence depends on it.

        Raises:
            ValueError: a length that is negative or too large.
        """
        check_type("length", length, int)
        if not 0 <= length <= len(self) + 1:
            raise ValueError(f"length = {length}: must be 0 ... {len(self) + 1}, one more than the record has")
        indices = self.indices[:, :length]
        if length > len(self):
            layers, _, heads, topk = indices.shape
            mask = _forced(torch.tensor([length - 1]), -(-length // self.cfg.block_size), self.cfg)[0]
            blocks = mask.nonzero()[:topk, 0]
            last = nn.functional.pad(blocks, (0, topk - len(blocks)), value=-1).to(indices)
            indices = torch.cat((indices, last.expand(layers, 1, heads, topk)), 1)
        return SelectionRecord(indices, self.cfg)

    def to_bytes(self) -> bytes:
        """A compact form: what differs from the forced blocks, as changes from token to token, compressed."""
        layers, tokens, heads, _ = self.indices.shape
        header = {"layers": layers, "tokens": tokens, "heads": heads, "cfg": self.cfg.as_list()}
        header["dtype"] = str(self.indices.dtype).removeprefix("torch.")
        streams = self.indices.cpu().transpose(1, 2).reshape(layers * heads, tokens, self.cfg.topk)
        counts, places = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
        for stream in streams:
            last = torch.zeros(-(-tokens // self.cfg.block_size), dtype=torch.bool)
            for some, forced in _chunks(tokens, self.cfg):
                mask = block_mask(stream[some], forced.shape[1]) ^ forced
                changed = mask ^ torch.cat((last[None], mask[:-1]))
                last = mask[-1]
                counts.append(changed.sum(1))
                places.append(changed.nonzero()[:, 1])
        parts = [torch.cat(part) for part in (counts, places)]
        planes = [_to_planes(part) for part in parts]
        body = zlib.compress(b"".join(planes), 9)
        head = json.dumps(header | {"changes": len(parts[1]), "size": len(body)}).encode()
        return b"".join((_MAGIC, head, b"\n", body))

    @staticmethod
    def from_bytes(data: bytes) -> SelectionRecord:
        """The record that `to_bytes` wrote.

        Raises:
            ValueError: damaged, or no record.
        """
        check_type("data", data, bytes)
        try:
            return _read(data)
        except (ValueError, KeyError, TypeError, IndexError, zlib.error, OverflowError, RecursionError) as error:
            raise ValueError(f"data: no record of selections, or damaged: {error}") from None


@contextmanager
def record(model: nn.Module) -> Iterator[None]:
    """Lets caches that the sparse layers of `model` make keep their selections, for `collect`.

    That holds for caches of the transformers models. One that is made by hand keeps them with
    `nsa.KVCache(..., record_selections=True)`.
    """
    layers = _sparse_layers(model)
    before = [layer.record_selections for layer in layers]
    for layer in layers:
        layer.record_selections = True
    try:
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer.record_selections = value


def collect(cache: Any) -> list[SelectionRecord]:
    """A record of each row, from the `KVCache` of every sparse layer in their order, or from a transformers cache.

    Rejected drafts, padding and reordered beams are as in the cache: a record has the tokens that the row holds.
    Waits for the device.

    Raises:
        ValueError: a cache without selections, or caches whose rows differ.
    """
    layers = [layer.cache for layer in cache.layers if hasattr(layer, "step")] if hasattr(cache, "layers") else cache
    if isinstance(layers, KVCache):
        layers = [layers]
    check_type("cache", layers, Sequence)
    if not layers:
        raise ValueError("cache: no sparse layer has run: must hold at least one KVCache")
    for i, layer in enumerate(layers):
        check_type(f"cache[{i}]", layer, KVCache)
        if layer.selections is None:
            raise ValueError(f"cache[{i}]: keeps no selections: must be made in nsa.replay.record(model)")
        if layer.batch_size != layers[0].batch_size or layer.cfg != layers[0].cfg:
            raise ValueError(f"cache[{i}]: must have the rows and hyperparameters of cache[0]")
    rows = []
    for row in range(layers[0].batch_size):
        selected = [layer.selected(row) for layer in layers]
        if len({one.shape for one in selected}) != 1:
            raise ValueError(f"cache: row {row}: the layers must hold as many tokens and KV heads as each other")
        rows.append(SelectionRecord(torch.stack([one.to(selected[0].device) for one in selected]), layers[0].cfg))
    return rows


class LayerReplay:
    """A layer's part of the records, in its attribute `replayed`.

    Attributes:
        compares: whether forwards also select blocks, for `compare`.
        counts: of each forward that compared, how many (token, KV head) differ, and of how many: int64 (2).
    """

    def __init__(self, indices: Tensor, lengths: list[int], compare: bool) -> None:
        self._indices, self._lengths = indices, lengths
        self.compares = compare
        self.counts: list[Tensor] = []

    def given(
        self, tokens: Tensor | None, shape: Sequence[int], device: torch.device, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """int32 (shape..., Hkv, topk) for the layer's rows; `tokens`: bool, which of them are tokens, None: all.

        cu_seqlens: of packed sequences; on a GPU and in compiled code their number of tokens is compared alone.
        """
        indices = self._indices.to(device, torch.int32)
        found, expected = self._lengths, [shape[-1]] * math.prod(shape[:-1])
        if tokens is not None:
            expected = tokens.sum(1).tolist()
        elif cu_seqlens is not None and cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
            expected = cu_seqlens.diff().tolist()
        elif cu_seqlens is not None:
            found, expected = [sum(found)], [sum(expected)]
        if sum(found) != sum(expected):
            raise ValueError(
                f"records: {sum(found)} tokens: must be {sum(expected)}, the tokens of the batch; a last token that a "
                "record lacks: give lengths"
            )
        found, expected = ([length for length in lengths if length] for lengths in (found, expected))
        if found != expected:
            raise ValueError(f"records: {found} tokens: must be {expected}, those of the batch's sequences")
        if tokens is None:
            return indices.view(*shape, *indices.shape[1:])
        rows = indices.new_full((*shape, *indices.shape[1:]), -1)
        rows[tokens] = indices
        return rows

    def compare(self, given: Tensor, selected: Tensor) -> None:
        """Counts the rows of (..., Hkv, topk) that differ as sets. Rows of padding have no blocks and do not count."""
        real = (given >= 0).any(-1)
        different = (_ascending(given) != _ascending(selected)).any(-1) & real
        self.counts.append(torch.stack((different.sum(), real.sum())))


class Replay:
    """What a training forward compared, in `replay(model, records, compare=True)`.

    The last tokens of sequences, which generation did not feed back, count like the others.
    """

    def __init__(self, counts: Sequence[list[Tensor]]) -> None:
        self._counts = counts  # of each layer: of each forward, how many differ and of how many

    def by_layer(self) -> list[tuple[int, int]]:
        """For each layer that ran, how many (token, KV head) selected other blocks than recorded, and of how many.

        Waits for the device.
        """
        found = [torch.stack(counts).sum(0).tolist() for counts in self._counts if counts]
        return [(different, compared) for different, compared in found]


@contextmanager
def replay(
    model: nn.Module, records: Sequence[SelectionRecord], lengths: Sequence[int] | None = None, *, compare: bool = False
) -> Iterator[Replay]:
    """Lets forwards of `model` without a cache attend to the recorded blocks, gradients included.

    Backwards that compute activations again (checkpointing) belong inside, too.

    Args:
        records: one for each sequence of the batch, in its order: rows of a padded batch, or sequences of a packed one.
            The records cover all tokens, padding excepted. With context parallelism every rank gives all of them.
        lengths: of the sequences in tokens, default those of the records; see `SelectionRecord.resized`.
        compare: also count how often the layers would have selected other blocks; else they do not select.

    Raises:
        ValueError: records of another number of layers or KV heads, or of other hyperparameters than the model's; in
            the forward, of other numbers of tokens than the batch's sequences have.
        TypeError: an argument of another type.
    """
    layers = _sparse_layers(model)
    check_type("records", records, Sequence)
    if not isinstance(lengths, Tensor):
        check_order("lengths", lengths)
        check_type("lengths", lengths, Sequence[int] | None)
    if not records:
        raise ValueError("records: none: must be one for each sequence of the batch")
    if lengths is not None and len(lengths) != len(records):
        raise ValueError(f"lengths: {len(lengths)}: must be {len(records)}, one for each record")
    for i, one in enumerate(records):
        check_type(f"records[{i}]", one, SelectionRecord)
        found = {"layers": one.indices.shape[0], "num_kv_heads": one.indices.shape[2], "cfg": one.cfg}
        expected = {"layers": len(layers), "num_kv_heads": layers[0].num_kv_heads, "cfg": layers[0].cfg}
        for name, value in found.items():
            if value != expected[name]:
                raise ValueError(f"records[{i}]: {name} = {value}: must be {expected[name]}, the model's")
    if lengths is not None:
        records = [one.resized(length) for one, length in zip(records, lengths, strict=True)]
    tokens = [len(one) for one in records]
    parts = [LayerReplay(indices, tokens, compare) for indices in torch.cat([one.indices for one in records], 1)]
    before = [layer.replayed for layer in layers]
    for layer, part in zip(layers, parts, strict=True):
        layer.replayed = part
    try:
        yield Replay([part.counts for part in parts])
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer.replayed = value


def _sparse_layers(model: nn.Module) -> list[NativeSparseAttention]:
    check_type("model", model, nn.Module)
    layers = [module for module in model.modules() if isinstance(module, NativeSparseAttention)]
    if not layers:
        raise ValueError("model: has no sparse layer: must have at least one nsa.NativeSparseAttention")
    return layers


def _ascending(indices: Tensor) -> Tensor:
    """The blocks of each row once, in one order."""
    rows = indices.sort(-1).values
    return rows.masked_fill(nn.functional.pad(rows.diff(dim=-1) == 0, (1, 0)), -1).sort(-1).values


def _forced(positions: Tensor, blocks: int, cfg: NSAConfig) -> Tensor:
    """bool (tokens, blocks): the blocks that every token at these positions selects."""
    block, own = torch.arange(blocks), (positions // cfg.block_size)[:, None]
    return ((block < cfg.init_blocks) | (block > own - cfg.local_blocks)) & (block <= own)


def _chunks(tokens: int, cfg: NSAConfig) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a sequence, some at a time, and their forced blocks (rows, blocks of the sequence)."""
    blocks = -(-tokens // cfg.block_size)
    rows = max(1, min(1024, _MASK // max(1, blocks)))
    for begin in range(0, tokens, rows):
        some = slice(begin, min(begin + rows, tokens))
        yield some, _forced(torch.arange(some.start, some.stop), blocks, cfg)


def _to_planes(numbers: Tensor) -> bytes:
    """The bytes of 32-bit numbers, the lowest of all first: the high ones are nearly all the same."""
    planes = torch.stack([(numbers >> shift & 255).to(torch.uint8) for shift in (0, 8, 16, 24)])
    return ctypes.string_at(planes.data_ptr(), planes.numel())


def _of_planes(planes: Tensor) -> Tensor:
    """int64 numbers whose `_to_planes` is given as uint8."""
    low, second, third, high = planes.view(4, -1).long()
    return low | second << 8 | third << 16 | high << 24


def _read(data: bytes) -> SelectionRecord:
    if not data.startswith(_MAGIC):
        raise ValueError("wrong first bytes")
    head, separator, body = data[len(_MAGIC) :].partition(b"\n")
    if not separator:
        raise ValueError("no header")
    header = json.loads(head)
    layers, tokens, heads, changes, size = (header[x] for x in ("layers", "tokens", "heads", "changes", "size"))
    # A few bytes unpack to millions of zeros, and each sequence of blocks takes a loop.
    streams = layers * heads
    for name, value, least, most in (
        *((name, header[name], 0, _LIMIT) for name in ("layers", "heads", "changes", "size")),
        ("tokens", tokens, 0, 2**24),
        ("layers * heads", streams, 1, 65536),
    ):
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{name} = {value}: must be {least} ... {most}")
    cfg = NSAConfig(*header["cfg"])
    expected = 4 * (streams * tokens + changes)
    if len(body) != size or header["dtype"] not in ("int16", "int32"):
        raise ValueError(f"{len(body)} bytes behind the header: expected {size}")
    if streams * tokens * cfg.topk * 4 > _LIMIT or expected > _LIMIT:
        raise ValueError(f"more than {_LIMIT} bytes of indices")
    decompress = zlib.decompressobj()
    plain = decompress.decompress(body, expected + 1)
    if len(plain) != expected or not decompress.eof:
        raise ValueError("unexpected size of the numbers")
    numbers = torch.frombuffer(bytearray(plain), dtype=torch.uint8) if plain else torch.zeros(0, dtype=torch.uint8)
    counts = _of_planes(numbers[: 4 * streams * tokens]).view(streams, tokens)
    places = _of_planes(numbers[4 * streams * tokens :])
    blocks = -(-tokens // cfg.block_size)
    if int(counts.sum()) != changes or (changes and int(places.max()) >= blocks):
        raise ValueError("blocks beyond the sequence")
    result = torch.full((streams, tokens, cfg.topk), -1, dtype=getattr(torch, header["dtype"]))
    begin = 0
    for stream in range(streams):
        last = torch.zeros(blocks, dtype=torch.bool)
        for some, forced in _chunks(tokens, cfg):
            count = counts[stream, some]
            end = begin + int(count.sum())
            changed = torch.zeros_like(forced, dtype=torch.int32)
            changed[torch.arange(len(count)).repeat_interleave(count), places[begin:end]] = 1
            changed[0] += last
            mask = changed.cumsum(0) % 2 == 1
            last, begin = mask[-1], end
            mask = mask ^ forced
            found = mask.sum(1)
            if int(found.max()) > cfg.topk:
                raise ValueError("more blocks than topk")
            row, block = mask.nonzero(as_tuple=True)
            slot = torch.arange(len(row)) - (found.cumsum(0) - found).repeat_interleave(found)
            result[stream, some][row, slot] = block.to(result.dtype)
    indices = result.view(layers, heads, tokens, cfg.topk).transpose(1, 2).contiguous()
    return SelectionRecord(indices, cfg)
