"""Padded and padding-free batches as sequences, with sizes that do not depend on what the masks hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .._arguments import check_type

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass
class Rows:
    """A permutation of a padded batch that moves the tokens of each row to the front.

    Attributes:
        order: int64 (B, S), the slot at each position.
        count: int32 (B), tokens of each row.
    """

    order: Tensor
    count: Tensor

    @staticmethod
    def of(tokens: Tensor) -> Rows:
        """tokens: bool (B, S), True where a slot holds a token."""
        return Rows(torch.argsort((~tokens).int(), dim=1, stable=True), tokens.sum(1, dtype=torch.int32))

    def to(self, device: torch.device) -> Rows:
        """Copies to another device."""
        return Rows(self.order.to(device), self.count.to(device))

    def front(self, x: Tensor) -> Tensor:
        """x (B, S, ...) with the tokens of each row in front."""
        return _gather(x, self.order)

    def back(self, x: Tensor) -> Tensor:
        """The inverse of `front`."""
        return _gather(x, self.order.argsort(dim=1))

    def offsets(self) -> Tensor:
        """int32 (2 B + 1): each row as two packed sequences, its tokens, and the rest, whose results mean nothing."""
        batch, length = self.order.shape
        # Of `length` a step of arange and a value of pad would make constants of a graph.
        starts = torch.arange(batch + 1, device=self.count.device) * length
        both = torch.stack((starts[:-1], starts[:-1] + self.count), 1).flatten()
        return torch.cat((both, starts[-1:])).to(torch.int32)


def is_padded(tokens: Tensor, mask: Tensor, *, wait: bool = True) -> bool:
    """Returns whether a slot of `tokens` (bool) holds none.

    True in compiled code, whose graph would depend on it, and without `wait` if that is not known on the host.

    Raises:
        ValueError: `mask`, which `tokens` come from, holds another value than 0 and 1. Compiled code does not look.
    """
    if torch.compiler.is_compiling() or (not wait and mask.device.type != "cpu"):
        return True
    if mask.dtype == torch.bool:
        return not bool(tokens.all())
    other = (mask != 0) & (mask != 1)
    padded, wrong = torch.stack((~tokens.all(), other.any())).tolist()  # of a GPU both are read at once
    if wrong:
        raise ValueError(f"attention_mask: {mask[other][0].item()}: must be 1 for a token or 0 for padding")
    return bool(padded)


def int32_offsets(name: str, offsets: Tensor) -> Tensor:
    """transformers' offsets of packed sequences as int32. Raises TypeError or ValueError for what is no offsets."""
    check_type(name, offsets, Tensor)
    if offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: {str(offsets.dtype).removeprefix('torch.')}: must be int32 or int64")
    return offsets.clamp(-1, 2**31 - 1).to(torch.int32)  # out of range they stay, and the operators refuse them


def self_attention_offsets(cu_seq_lens_q: Tensor | None, cu_seq_lens_k: Tensor | None) -> Tensor | None:
    """Offsets of sequences whose queries are those of the keys. Raises ValueError where both differ, as far as read."""
    if cu_seq_lens_q is not None:
        cu_seq_lens_q = int32_offsets("cu_seq_lens_q", cu_seq_lens_q)
    if cu_seq_lens_k is not None:
        k = int32_offsets("cu_seq_lens_k", cu_seq_lens_k)
        read = k.device.type == "cpu" and not torch.compiler.is_compiling()
        if cu_seq_lens_q is None or k.shape != cu_seq_lens_q.shape or (read and not torch.equal(k, cu_seq_lens_q)):
            raise ValueError("cu_seq_lens_k: must be equal to cu_seq_lens_q, and given with it")
    return cu_seq_lens_q


def length_bound(name: str, length: object) -> int | None:
    """transformers' longest of packed sequences. Raises TypeError for what is no integer."""
    check_type(name, length, int | None)
    return None if length is None else int(length)  # type: ignore[call-overload]


def offsets_of_restarts(position_ids: Tensor, batch: int, length: int, tokens: Tensor | None = None) -> Tensor | None:
    """int32 offsets of the sequences in the flattened batch; None: one sequence per row.

    Args:
        position_ids: (B or 1, S): a position that does not follow the one before starts a sequence.
        tokens: bool (B, S), of compiled code, which slots hold tokens: in a padded batch none starts.
    """
    if position_ids.dim() != 2 or position_ids.shape[1] != length:
        return None
    position_ids = position_ids.expand(batch, -1)
    restarts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if torch.compiler.is_compiling():
        message = "position_ids restart: give cu_seq_lens_q and cu_seq_lens_k in compiled code"
        torch._assert_async(~restarts.any() if tokens is None else ~(restarts.any() & tokens.all()), message)
        return None
    if not bool(restarts.any()):
        return None
    starts = nn.functional.pad(restarts, (1, 0), value=True).flatten().nonzero().flatten()
    return nn.functional.pad(starts, (0, 1), value=batch * length).to(torch.int32)


def _gather(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(1, order.view(*order.shape, *[1] * (x.dim() - 2)).expand_as(x))
