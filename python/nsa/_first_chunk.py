"""The first chunk of a prompt: the operators of training compute attention, then the tokens are appended to the cache.

Nothing waits for the device, and sizes do not depend on the lengths. A token that a row does not take is written to a
slot that receives the same value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from ._arguments import check_type, check_usable, validates_devices
from ._pages import check_sharing
from ._registration import call, ops
from .config import NSAConfig
from .rotary import rotate_branches

_BRANCHES = ("q", "k_cmp", "v_cmp", "k_slc", "v_slc", "k_swa", "v_swa", "gates")


class _Cache(NamedTuple):
    """The tensors of a cache, as the operators take them."""

    k_slc: Tensor
    v_slc: Tensor
    k_c: Tensor
    v_c: Tensor
    k_swa_ring: Tensor
    v_swa_ring: Tensor
    k_cmp_ring: Tensor
    v_cmp_ring: Tensor
    cache_seqlens: Tensor
    overflow: Tensor
    block_table: Tensor
    block_table_c: Tensor


def prefill_empty_rows(*arguments: Any, names: Callable[[], Mapping[str, str]]) -> tuple[Tensor, Tensor]:
    """The operator `prefill` for empty rows. Other rows take no tokens."""
    branches, cache, others = arguments[:8], _Cache(*arguments[8:20]), arguments[20:]
    *layer, rotate, num_new, indices, k_scale, v_scale = others
    lengths = cache.cache_seqlens
    # An idle step of one token checks all arguments but m and num_new, and changes nothing.
    idle = (torch.zeros_like(lengths), None if indices is None else _first_token(indices), k_scale, v_scale)
    call(ops.prefill, *map(_first_token, branches), *cache, *layer, rotate, *idle, names=names)
    batch, m = branches[0].shape[:2]
    for name, tensor in zip(_BRANCHES, branches, strict=True):
        if tensor.shape[1] != m:
            what = f"{names().get(name, name)}: {tuple(tensor.shape)}"
            raise ValueError(f"{what}: expected the shape ({batch}, {m}, ...), as many tokens as q")
    if num_new is None:
        num_new = torch.full_like(lengths, m)
    else:
        _check_num_new(num_new, m, lengths)
    _check_written_pages(cache, num_new, NSAConfig(*layer[-4]))
    if cache.k_slc.dtype == torch.float8_e4m3fn:  # the chunk attends to itself as it is stored
        empty = lengths == 0
        with _writing():
            cache.overflow.masked_fill_((~empty & (num_new > 0)).any(), 1)
        num_new = num_new.where(empty, 0)
        rest = (num_new, indices, k_scale, v_scale)
        return call(ops.prefill, *branches, *cache, *layer, rotate, *rest, names=names)
    cos, sin = layer[-2:]
    if cos is not None:
        at = torch.arange(m, device=cos.device).clamp(max=cos.shape[0] - 1)  # beyond: no row has capacity
        if rotate:
            q, k_slc, k_swa = rotate_branches(branches[0], branches[3], branches[5], cos, sin, at, at)
            branches = (q, *branches[1:3], k_slc, branches[4], k_swa, *branches[6:])
        if cache.block_table.shape[1] * cache.k_slc.shape[1] <= cos.shape[0] < m:
            layer[-2:] = cos.index_select(0, at), sin.index_select(0, at)
    # In the order of the schema: no noise, nothing packed, nothing saved for a backward but compressed keys and values.
    o, selected, k_c, v_c, *_ = call(
        ops.native_sparse_attention,
        *branches,
        *layer,
        *(0.0, 0, None, None, 0, 0),
        *(indices, False, True, True),
        names=names,
    )
    with _writing():
        taken = _append(cache, branches[1:7], (k_c, v_c), num_new.clamp(0, m), NSAConfig(*layer[-4]))
    behind = (torch.arange(m, device=lengths.device) >= taken[:, None])[..., None, None]
    return o.masked_fill_(behind, 0.0), selected.masked_fill_(behind, -1)


def _writing() -> AbstractContextManager[Any]:
    """A cache may have been made in inference mode, whose tensors can be written only there."""
    return nullcontext() if torch.compiler.is_compiling() else torch.inference_mode()


def _check_num_new(num_new: Tensor, m: int, lengths: Tensor) -> None:
    """Raises what the operator raises; values on a GPU are clamped instead, as there."""
    compiling = torch.compiler.is_compiling()
    if not compiling:
        check_type("num_new", num_new, Tensor)
        check_usable("num_new", num_new)
    if num_new.dtype != torch.int32 or num_new.shape != lengths.shape or num_new.device != lengths.device:
        what = f"{num_new.dtype} {tuple(num_new.shape)} on {num_new.device}".removeprefix("torch.")
        raise ValueError(f"num_new: {what}: expected int32 {tuple(lengths.shape)} on {lengths.device}")
    if not compiling and num_new.device.type == "cpu" and bool(((num_new < 0) | (num_new > m)).any()):
        raise ValueError(f"num_new = {num_new.tolist()}: must be 0 ... m = {m}")


def _check_written_pages(cache: _Cache, num_new: Tensor, cfg: NSAConfig) -> None:
    """Raises ValueError for a page that two of the rows that begin would write to, or one of them twice."""
    lengths = cache.cache_seqlens
    hidden = lengths.device.type != "cpu" and not validates_devices()
    if hidden or lengths.is_meta or torch.compiler.is_compiling() or is_fake(lengths):
        return
    tokens = num_new.where(lengths == 0, 0).tolist()
    for name, table, pool, counts in (
        ("block_table", cache.block_table, cache.k_slc, tokens),
        ("block_table_c", cache.block_table_c, cache.k_c, [cfg.num_compressed(count) for count in tokens]),
    ):
        pages = [row[: -(-count // pool.shape[1])] for row, count in zip(table.tolist(), counts, strict=True)]
        check_sharing(f"cache.{name}", [[page for page in row if page >= 0] for row in pages], [0] * len(pages))


def _first_token(x: Tensor) -> Tensor:
    return x[:, :1] if x.dim() == 4 else x


def _append(
    cache: _Cache, branches: tuple[Tensor, ...], compressed: tuple[Tensor, Tensor], num_new: Tensor, cfg: NSAConfig
) -> Tensor:
    """Appends the first num_new tokens of empty rows with capacity to the cache; returns their number, (B)."""
    k_cmp, v_cmp, k_slc, v_slc, k_swa, v_swa = branches
    blocks = _num_compressed(num_new, cfg)
    capacity = _holds(cache.block_table, cache.k_slc, num_new) & _holds(cache.block_table_c, cache.k_c, blocks)
    fits = capacity & (cache.cache_seqlens == 0)
    cache.overflow.masked_fill_((~fits & (num_new > 0)).any(), 1)
    num_new = num_new.where(fits, 0)
    blocks = blocks.where(fits, 0)
    for pool, table, tokens, count in (
        (cache.k_slc, cache.block_table, k_slc, num_new),
        (cache.v_slc, cache.block_table, v_slc, num_new),
        (cache.k_c, cache.block_table_c, compressed[0], blocks),
        (cache.v_c, cache.block_table_c, compressed[1], blocks),
    ):
        _to_pages(pool, table, tokens, count)
    _to_ring(cache.k_swa_ring, k_swa, num_new)
    _to_ring(cache.v_swa_ring, v_swa, num_new)
    _to_ring(cache.k_cmp_ring, k_cmp, num_new)
    _to_ring(cache.v_cmp_ring, v_cmp, num_new)
    cache.cache_seqlens.add_(num_new)
    return num_new


def _num_compressed(lengths: Tensor, cfg: NSAConfig) -> Tensor:
    """`NSAConfig.num_compressed` of a tensor."""
    return ((lengths - cfg.kernel_size) // cfg.kernel_stride + 1).clamp(min=0)


def _holds(table: Tensor, pool: Tensor, tokens: Tensor) -> Tensor:
    """bool (B): a row's first pages have capacity for its `tokens`."""
    return (table >= 0).cumprod(1).sum(1) * pool.shape[1] >= tokens


def _to_pages(pool: Tensor, table: Tensor, tokens: Tensor, count: Tensor) -> None:
    """Writes the first count (B) of tokens (B, n, ...) to the pages that `table` gives a row."""
    if tokens.shape[1] == 0:
        return
    at = torch.arange(tokens.shape[1], device=pool.device)
    page = table[:, (at // pool.shape[1]).clamp(max=table.shape[1] - 1)].long()
    slot = (at % pool.shape[1]).expand_as(page)
    # A token that must not be written becomes the first token of the longest row, or the first slot of the pool.
    most, row = count.max(0, keepdim=True)  # (1): a number would have to be waited for
    spare = pool[0, :1].where((most == 0)[..., None, None], tokens[:, 0].index_select(0, row))
    valid = at < count[:, None]
    page = page.where(valid, page[:, 0].index_select(0, row).masked_fill(most == 0, 0))
    slot = slot.where(valid, 0)
    pool.index_put_((page, slot), tokens.where(valid[..., None, None], spare))


def _to_ring(ring: Tensor, tokens: Tensor, count: Tensor) -> None:
    """Token u goes to slot u mod ring size; if there are more tokens than slots, the last ones are kept."""
    last = count.long()[:, None] - 1
    token = last - (last - torch.arange(ring.shape[1], device=ring.device)) % ring.shape[1]
    place = token.clamp(min=0)[..., None, None].expand(-1, -1, *tokens.shape[2:])
    ring.copy_(tokens.gather(1, place).where((token >= 0)[..., None, None], ring))
