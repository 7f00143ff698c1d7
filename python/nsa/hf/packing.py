"""Padded and padding-free batches as sequences, with sizes that do not depend on what the masks hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


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
        starts = torch.arange(0, batch * length, length, device=self.count.device)
        both = torch.stack((starts, starts + self.count), 1).flatten()
        return nn.functional.pad(both, (0, 1), value=batch * length).to(torch.int32)


def is_padded(tokens: Tensor, mask: Tensor, *, wait: bool = True) -> bool:
    """Returns whether a slot of `tokens` (bool) holds none. True without `wait` if that is not known on the host.

    Raises:
        ValueError: `mask`, which `tokens` come from, holds another value than 0 and 1. Compiled code does not look.
    """
    compiling = torch.compiler.is_compiling()
    if not wait and (compiling or mask.device.type != "cpu"):
        return True
    if compiling or mask.dtype == torch.bool:
        return not bool(tokens.all())
    other = (mask != 0) & (mask != 1)
    padded, wrong = torch.stack((~tokens.all(), other.any())).tolist()  # of a GPU both are read at once
    if wrong:
        raise ValueError(f"attention_mask: {mask[other][0].item()}: must be 1 for a token or 0 for padding")
    return bool(padded)


def offsets_of_restarts(position_ids: Tensor, batch: int, length: int) -> Tensor | None:
    """int32 offsets of the sequences in the flattened batch; None: one sequence per row.

    position_ids (B or 1, S): a position that does not follow the one before starts a sequence.
    """
    if position_ids.dim() != 2 or position_ids.shape[1] != length:
        return None
    position_ids = position_ids.expand(batch, -1)
    restarts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if torch.compiler.is_compiling():
        message = "position_ids restart: give cu_seq_lens_q and cu_seq_lens_k in compiled code"
        torch._assert_async(~restarts.any(), message)
        return None
    if not bool(restarts.any()):
        return None
    starts = nn.functional.pad(restarts, (1, 0), value=True).flatten().nonzero().flatten()
    return nn.functional.pad(starts, (0, 1), value=batch * length).to(torch.int32)


def _gather(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(1, order.view(*order.shape, *[1] * (x.dim() - 2)).expand_as(x))
