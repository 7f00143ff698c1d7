"""A sequence's ranks, and copies between them. Nothing is summed on the way, unless that is asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._arguments import check_type, check_usable, checked
from .layout import chunk_owners

REDUCTIONS = ("all_to_all", "reduce_scatter")


class ContextParallel:
    """The processes that share sequences, and which chunks of them each one has.

    Args:
        group: a process group, or a DeviceMesh of one dimension; None: this process alone. Its backend must know the
            device of the tensors; with "cpu:gloo,cuda:nccl" checks do not wait for the GPU.
        layout: "head_tail", in which all ranks have about equally much to do, or "contiguous".
        chunks: N, how many chunks a sequence has: a multiple of 2P in head_tail (default 2P), of P in contiguous
            (default P). Results depend on N and the layout's chunks alone, not on P.
        reduction: how gradients of keys and values are added. "all_to_all": their owner gets every chunk's share in
            the inputs' dtype and adds them in the chunks' order in float32. "reduce_scatter": a rank adds its chunks'
            shares and the backend adds the ranks' on the way, in float32. On several machines that may be fewer bytes
            on the slow links; the gradients' bits then depend on P and on the order in which the backend adds.

    Raises:
        ValueError: a layout, number of chunks or reduction that is not allowed, or a mesh of several dimensions.
        TypeError: `group` is of another type.
    """

    @checked
    def __init__(
        self,
        group: DeviceMesh | dist.ProcessGroup | None = None,
        layout: str = "head_tail",
        chunks: int | None = None,
        reduction: str = "all_to_all",
    ) -> None:
        check_type("group", group, DeviceMesh | dist.ProcessGroup | None)
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction = {reduction!r}: must be {' or '.join(REDUCTIONS)}")
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(f"group: a mesh of {group.ndim} dimensions: must have one; take mesh[name]")
            group = group.get_group()
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self.layout, self.reduction = layout, reduction
        self.owners = chunk_owners(layout, self.size, chunks)
        self.own = self.chunks_of(self.rank)

    def __deepcopy__(self, memo: object) -> ContextParallel:
        """This one: a copy of a layer belongs to the same processes."""
        return self

    def chunks_of(self, rank: int) -> list[int]:
        """The chunks that a rank has, ascending."""
        return [chunk for chunk, owner in enumerate(self.owners) if owner == rank]

    @checked
    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Returns this rank's part, along `dim`, of a tensor that every rank has in full.

        Raises:
            ValueError: the length is no multiple of the number of chunks, or x has no such dimension.
            TypeError: an argument of another type.
        """
        size = self._size(_length(x, dim))
        return torch.cat([x.narrow(dim, chunk * size, size) for chunk in self.own], dim)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Gathers the full tensor on every rank from the ranks' parts. No gradient.

        Raises:
            ValueError: on every rank, if the length along `dim` is no multiple of a rank's chunks, x has no such
                dimension, or the ranks' arguments differ.
            TypeError: an argument of another type; on the other ranks ValueError.
        """

        def describe() -> dict[str, Any]:
            check_type("dim", dim, int)
            length = _length(x, dim)
            check_usable("x", x)
            if length % len(self.own):
                raise ValueError(f"x: {length} rows: must be a multiple of the rank's {len(self.own)} chunks")
            return {"x": (tuple(x.shape), x.dtype, x.device.type), "dim": dim, "owners": self.owners}

        agree(self.group, describe)
        return torch.cat(self.gather([x.detach()], dim)()[0], dim)

    @checked
    def positions(self, length: int, device: torch.device | str | None = None) -> Tensor:
        """int64: positions of this rank's rows in a sequence of `length` tokens over all ranks.

        Raises:
            ValueError: as `shard`.
        """
        size = self._size(length)
        return torch.cat([torch.arange(chunk * size, (chunk + 1) * size, device=device) for chunk in self.own])

    def gather(self, tensors: Sequence[Tensor], dim: int) -> Callable[[], list[list[Tensor]]]:
        """Begins to bring every rank's tensors here; the result waits and gives each one's chunks in their order."""
        flat = torch.cat([t.reshape(-1) for t in tensors])
        work = None
        if self.size == 1:
            received = flat[None]
        else:
            received = flat.new_empty((self.size, flat.numel()))
            work = dist.all_gather_into_tensor(
                received.view(-1).view(torch.uint8), flat.view(torch.uint8), group=self.group, async_op=True
            )

        def finish() -> list[list[Tensor]]:
            if work is not None:
                work.wait()
            chunks, start = [], 0
            for t in tensors:
                rows = received[:, start:][:, : t.numel()]
                parts = [row.view(t.shape).tensor_split(len(self.own), dim) for row in rows]
                slots = [iter(part) for part in parts]
                chunks.append([next(slots[owner]) for owner in self.owners])
                start += t.numel()
            return chunks

        return finish

    def send(self, parts: list[list[Tensor]], shapes: list[list[tuple[int, ...]]], like: Tensor) -> list[list[Tensor]]:
        """Sends parts[r] to rank r; returns what rank r sent here, whose shapes are shapes[r], in the dtype of like."""
        if self.size == 1:
            return parts
        sent = [sum(t.numel() for t in row) for row in parts]
        counts = [[torch.Size(shape).numel() for shape in row] for row in shapes]
        flat = torch.cat([like.new_empty(0), *(t.reshape(-1) for row in parts for t in row)])
        received = like.new_empty(sum(map(sum, counts)))
        width = like.element_size()
        dist.all_to_all_single(
            *(received.view(torch.uint8), flat.view(torch.uint8)),
            output_split_sizes=[sum(row) * width for row in counts],
            input_split_sizes=[count * width for count in sent],
            group=self.group,
        )
        tensors = iter(received.split([count for row in counts for count in row]))
        return [[next(tensors).view(shape) for shape in row] for row in shapes]

    def reduce_scatter(self, flat: Tensor) -> Tensor:
        """This rank's of P equal parts of the sum over the ranks."""
        if self.size == 1:
            return flat
        mine = flat.new_empty(flat.numel() // self.size)
        try:
            dist.reduce_scatter_tensor(mine, flat, group=self.group)
        except RuntimeError as error:
            if "not support" not in str(error):
                raise
            raise NotImplementedError(f"reduction = 'reduce_scatter': {error}; use 'all_to_all'") from error
        return mine

    def _size(self, length: int) -> int:
        chunks = len(self.owners)
        if length % chunks:
            shortest = -(-length // chunks) * chunks
            raise ValueError(
                f"{length} tokens: must be a multiple of {chunks} chunks; the next is {shortest}: pad the end"
            )
        return length // chunks


def agree(group: dist.ProcessGroup | None, describe: Callable[[], dict[str, Any]]) -> None:
    """Calls describe() and raises on every rank if that fails on one, or if the ranks' results differ.

    Results are compared by their repr(). Ranks exchange digests, and JSON where these differ: nothing is unpickled.
    """
    error: Exception | None = None
    mine: dict[str, str] = {}
    try:
        mine = {name: repr(value) for name, value in describe().items()}
    except Exception as failure:  # whatever it is, the others must hear of it
        error = failure
    text = json.dumps([None if error is None else str(error), mine]).encode()
    if group is not None and dist.get_world_size(group) > 1:
        size = len(text).to_bytes(8, "little")
        digests = _gather_bytes(size + hashlib.sha256(text).digest(), group)
        if any(digest != digests[0] for digest in digests):
            sizes = [int.from_bytes(digest[:8], "little") for digest in digests]
            texts = _gather_bytes(text.ljust(max(sizes)), group)
            error = error or _difference([json.loads(text) for text in texts])
    if error is not None:
        raise error


def _difference(found: list[tuple[str | None, dict[str, str]]]) -> ValueError:
    """The error of a rank that is not at fault, from every rank's error and description."""
    for rank, (message, _) in enumerate(found):
        if message is not None:
            return ValueError(f"rank {rank} of the group: {message}")
    first = found[0][1]
    differences = (
        f"{name}: {first.get(name)} on rank 0 of the group, {theirs.get(name)} on rank {rank}"
        for rank, (_, theirs) in enumerate(found)
        for name in {**first, **theirs}
        if first.get(name) != theirs.get(name)
    )
    return ValueError(next(differences))


def _gather_bytes(mine: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Every rank's bytes, as many on each; in host memory if the group has a backend for it."""
    device = "cpu" if "cpu:" in dist.get_backend_config(group) else "cuda"
    sent = torch.tensor(list(mine), dtype=torch.uint8, device=device)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, sent, group=group)
    return [bytes(row.tolist()) for row in received]


def _length(x: Tensor, dim: int) -> int:
    """Length of a tensor along `dim`."""
    check_type("x", x, Tensor)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim = {dim}: must be one of the {x.dim()} dimensions of x")
    return x.shape[dim]
