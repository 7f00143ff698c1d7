"""Layers of a transformers cache that hold a `KVCache`: DynamicCache and StaticCache make them for sparse layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, StaticLayer

from ..cache import NAMES, ROLLBACK, KVCache
from ..config import NSAConfig
from ..decoding import MAX_DECODE_TOKENS, decode, prefill
from .configuration import LAYER_TYPE, Mixin

GROWTH = 1.5
"""A cache that grows gets this much longer at least, so that growing costs a constant time per token."""


class _NsaLayer(Mixin):
    """A KVCache with as many rows as the batch: a row holds its tokens without padding.

    transformers counts slots instead, padding included.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False  # its sizes come with the first step

    cache: KVCache | None = None
    record_selections = False
    rotation: tuple[Tensor, Tensor] | None = None
    """Tables (B, positions, D / 2) that rotate the cached tokens, in the first sparse layer; None: by their numbers."""

    empty = True  # no step has been made since there is a cache, or since the last reset

    def _append(self, new: int, tokens: Tensor | None, k: Tensor, v: Tensor, cfg: NSAConfig) -> KVCache:
        """Allocates `new` slots, in a cache that is made with the first."""
        raise NotImplementedError

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Tensor,
        *,
        cfg: NSAConfig,
        tokens: Tensor | None,
        rope: tuple[Tensor, Tensor],
        record_selections: bool = False,
        **inputs: Any,
    ) -> Tensor:
        """Appends the tokens in front of each row and attends.

        Args:
            q, k, v, gates: (B, m, heads, ...), as `nsa.decode` takes them; `inputs` are what else it takes.
            rope: as there, or tables of each row, (B, positions, D / 2).
            cfg: of a cache that is made now.
            tokens: bool (B, m), which of the new slots hold tokens; None: all.
            record_selections: of a cache that is made now.
        """
        if self.cache is not None and self.cache.cfg is not cfg and self.cache.cfg != cfg:
            raise ValueError(f"cache: of {self.cache.cfg}: must be of the model's {cfg}")
        self.record_selections = record_selections
        new = q.shape[1]
        cache = self._append(new, tokens, k, v, cfg)
        inputs["num_new"] = None if tokens is None else tokens.sum(1, dtype=torch.int32)
        step: Any = decode if new <= MAX_DECODE_TOKENS else partial(prefill, first_chunk=self.empty)
        self.empty = False
        if rope[0].dim() == 2:
            return step(q, k, v, gates, cache, rope=rope, **inputs)
        rows = [slice(row, row + 1) for row in range(cache.batch_size)]
        return torch.cat(
            [
                step(
                    *(branch[row] for branch in (q, k, v, gates)),
                    _row(cache, row),
                    rope=(rope[0][row][0], rope[1][row][0]),
                    **{name: given[row] if isinstance(given, Tensor) else given for name, given in inputs.items()},
                )
                for row in rows
            ]
        )

    def _new_cache(self, batch: int, max_length: int, k: Tensor, v: Tensor, cfg: NSAConfig) -> KVCache:
        return KVCache(
            *(batch, k.shape[-2], k.shape[-1], v.shape[-1], cfg),
            max_length=max_length,
            dtype=k.dtype,
            device=k.device,
            record_selections=self.record_selections,
        )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("a sparse layer is initialized by its first step")

    def update(self, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("a sparse layer of a cache takes steps; only the models of nsa.hf make them")

    def _select_rotation(self, rows: Tensor) -> None:
        if self.rotation is not None:
            self.rotation = self.rotation[0][rows], self.rotation[1][rows]

    def offload(self) -> None:
        raise ValueError("cache_implementation: a sparse layer's cache cannot be offloaded")

    @property
    def device(self) -> torch.device | None:
        return None if self.cache is None else self.cache.cache_seqlens.device


class NsaDynamicLayer(_NsaLayer, CacheLayerMixin):
    """Grows: what it holds is copied when it becomes longer, into memory for half as many tokens more."""

    _layer_type = LAYER_TYPE

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.slots = 0
        self.seen: Tensor | None = None  # bool (B, slots), which of them were tokens; None: all

    def get_seq_length(self) -> int:
        return self.slots

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots + query_length, 0

    def check_mask(self, mask: Tensor) -> None:
        """Raises ValueError where a mask of the slots says otherwise of those in the cache than when they came."""
        before = mask[:, : self.slots].bool()
        seen = torch.ones_like(before) if self.seen is None else self.seen
        if before.shape == seen.shape and not torch.equal(before, seen):
            raise ValueError("attention_mask: must keep what it was for the tokens in the cache")

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove slots, to at most 32 tokens below a row's maximum length so far."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove = {tokens_to_remove}: must be 0 or negative")
        if tokens_to_remove == 0 or self.cache is None:
            return
        left = self.slots + tokens_to_remove
        if left < 0:
            raise ValueError(f"tokens_to_remove = {tokens_to_remove}: must be at least -{self.slots}")
        length: int | list[int] = tokens_to_remove
        if self.seen is not None:
            length = (self.cache.cache_seqlens - self.seen[:, left : self.slots].sum(1)).tolist()
        try:
            self.cache.crop(length)
        except ValueError as error:
            options = f"num_assistant_tokens and prompt_lookup_num_tokens must be at most {ROLLBACK}"
            raise ValueError(f"tokens_to_remove = {tokens_to_remove}: {error}; {options}") from None
        self.seen = None if self.seen is None else self.seen[:, :left]
        self.slots = left

    def reset(self) -> None:
        self.cache = self.seen = self.rotation = None
        self.slots = 0
        self.empty = True
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.cache is not None:
            self.cache.select(indices)
            self._select_rotation(indices)
            self.seen = None if self.seen is None else self.seen[indices]

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.cache is not None:
            rows = torch.arange(self.cache.batch_size, device=self.cache.cache_seqlens.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def _append(self, new: int, tokens: Tensor | None, k: Tensor, v: Tensor, cfg: NSAConfig) -> KVCache:
        batch, needed = k.shape[0], self.slots + new
        if self.cache is None:
            self.cache = self._new_cache(batch, _rounded(needed + MAX_DECODE_TOKENS), k, v, cfg)
            self.is_initialized = True
        elif needed > self.cache.max_length:
            self.cache.grow(_rounded(max(needed, int(GROWTH * self.cache.max_length))))
        if tokens is not None or self.seen is not None:
            every = torch.ones(batch, needed, dtype=torch.bool, device=k.device)
            if self.seen is not None:
                every[:, : self.slots] = self.seen
            if tokens is not None:
                every[:, self.slots :] = tokens
            self.seen = every
        self.slots = needed
        return self.cache


class NsaStaticLayer(_NsaLayer, StaticLayer):  # type: ignore[misc]  # there `device` is a plain attribute
    """Layer of a static cache for compiled steps: nothing in a step depends on the lengths."""

    _layer_type = LAYER_TYPE
    is_croppable = False

    def __init__(self, max_cache_len: int, **_: object) -> None:
        super().__init__(max_cache_len)

    def reset(self) -> None:
        if self.cache is not None:
            self.cache.reset()
        self.rotation = None
        self.cumulative_length.zero_()
        self.empty = True

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders in place, because a compiled step holds the addresses."""
        if self.cache is not None:
            self.cache.select(beam_idx)
            self._select_rotation(beam_idx)

    def _append(self, new: int, tokens: Tensor | None, k: Tensor, v: Tensor, cfg: NSAConfig) -> KVCache:
        if k.device.type == "cpu" and not torch.compiler.is_compiling():  # a GPU would have to be waited for
            needed = int(self.cumulative_length) + new
            if needed > self.max_cache_len:
                raise ValueError(f"max_cache_len = {self.max_cache_len}: must be at least {needed}, the slots needed")
        if self.cache is None:
            self.cache = self._new_cache(k.shape[0], self.max_cache_len, k, v, cfg)
            self.cumulative_length = self.cumulative_length.to(k.device)
            self.is_initialized = True
            if not torch.compiler.is_compiling():
                for tensor in (*self.cache.tensors(), self.cache.selections, self.cumulative_length):
                    if tensor is not None:
                        torch._dynamo.mark_static_address(tensor)  # else CUDA graphs would copy it
        self.cumulative_length.add_(new)
        return self.cache


def _row(cache: KVCache, row: slice) -> KVCache:
    """One row of a cache as a cache on the same memory."""
    of_rows = (*NAMES[4:9], *NAMES[10:])
    tensors = [t[row] if name in of_rows else t for name, t in zip(NAMES, cache.tensors(), strict=True)]
    scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    one = KVCache.from_tensors(tensors, cache.cfg, cache.max_length, **scales)
    one.selections = cache.selections
    return one


def _rounded(length: int) -> int:
    return -(-length // 64) * 64
