"""A layer's attention, end to end, over a sequence that several ranks share.

Compressed keys are made where their tokens are, with the first tokens of the next chunk as halo. Then every rank gets
all keys and values, and runs one `nsa_attention` for each of its chunks on views of them. The backward gathers them
again, sends each chunk's share of the gradients of keys and values to their owners, and those add the shares in the
order of the chunks in float32.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .._arguments import check_offsets, check_type, check_usable
from .._registration import call, needs_gradient, ops
from ..config import CompressionWeights, NSAConfig
from ..functional import MEAN, PAPER, _signed
from ..functional import native_sparse_attention as attend_alone
from ..rotary import check_positions, rotate, rows_within
from .exchange import ContextParallel, agree
from .layout import Chunk, divide
from .plan import Plan


def native_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    cp: ContextParallel,
    *,
    cfg: NSAConfig | None = None,
    weights_k: CompressionWeights | None = None,
    weights_v: CompressionWeights | None = None,
    k_slc: Tensor | None = None,
    v_slc: Tensor | None = None,
    k_swa: Tensor | None = None,
    v_swa: Tensor | None = None,
    indices: Tensor | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    softmax_scale: float | None = None,
    noise: float = 0.0,
    seed: int = 0,
    return_indices: bool = False,
    cu_seqlens: Tensor | None = None,
    kv_heads_at_once: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`nsa.native_sparse_attention` for queries and keys of one sequence S, of which every rank has its chunks' rows.

    Every rank calls it, and its backward, with the same shapes and settings. o and the gradients of q, k, v and gates
    are bitwise the same for the same chunks on any number of ranks (those of k and v not with the reduction
    "reduce_scatter"). Gradients of phi's weights are the rank's share: sum them over the ranks, as of any parameter
    that all have.

    Args:
        q: (B, S / P, H, Dk), or packed (S / P, H, Dk) with cu_seqlens: the rows of cp.shard.
        k, v, k_slc, v_slc, k_swa, v_swa, gates, indices: likewise, otherwise as in `nsa.native_sparse_attention`.
        cp: the ranks and the layout.
        cfg, weights_k, weights_v, softmax_scale, return_indices: as there.
        rope: as there; rows are positions in the global sequence (within a document, if packed).
        noise, seed: as there, but where documents are packed the draws are others than in one process.
        cu_seqlens: int32 (documents + 1) of the global sequence, the same on every rank; from 0 to S. Documents may
            end anywhere.
        kv_heads_at_once: gather keys and values of so many KV heads at a time, the next ones while these are attended
            to; the same bits. Must divide Hkv; noise must be 0. None: on a GPU as few as keep a chunk's call at 2^22
            rows of q, otherwise all.

    Returns:
        o, or (o, indices), of this rank's rows.

    Raises:
        ValueError: on every rank, if an argument is not allowed or the ranks' arguments differ in shape, dtype or
            setting.
        TypeError: an argument is of another type; on the other ranks ValueError.
        NotImplementedError: in the backward, a backend that has no reduce-scatter, with reduction="reduce_scatter".
    """
    cfg = PAPER if cfg is None else cfg
    weights_k, weights_v = MEAN if weights_k is None else weights_k, MEAN if weights_v is None else weights_v
    phi = ("k", weights_k), ("v", weights_v)
    branches = {"q": q, "k": k, "v": v, "gates": gates, "k_slc": k_slc, "v_slc": v_slc, "k_swa": k_swa, "v_swa": v_swa}
    check_type("cp", cp, ContextParallel)
    packed = cu_seqlens is not None
    made: list[tuple[list[Chunk], list[int] | None, int]] = []

    def describe() -> dict[str, Any]:
        tensors = branches | {"indices": indices}
        for name, value, kind in (("cfg", cfg, NSAConfig), *((f"weights_{x}", w, CompressionWeights) for x, w in phi)):
            check_type(name, value, kind)
        for name, t in tensors.items():
            check_type(name, t, Tensor if name in ("q", "k", "v", "gates") else Tensor | None)
        numbers: tuple[tuple[str, Any, Any], ...] = (
            *(("noise", noise, float), ("seed", seed, int), ("softmax_scale", softmax_scale, float | None)),
            *(("kv_heads_at_once", kv_heads_at_once, int | None), ("rope", rope, tuple | None)),
        )
        for name, number, hint in numbers:
            check_type(name, number, hint)
        phi_tensors = {name: t for x, w in phi for name, t in _named(f"weights_{x}", w).items()}
        for name, value in {**tensors, **phi_tensors, "rope": rope, "cu_seqlens": cu_seqlens}.items():
            check_usable(name, value)
        offsets = None
        if cu_seqlens is not None:
            check_offsets(cu_seqlens)
            offsets = cu_seqlens.tolist()
        at_once = _check(tensors, cp, packed, kv_heads_at_once, noise)
        chunks = divide(q.shape[0 if packed else 1] * cp.size, len(cp.owners), cfg, offsets)
        lengths = [q.shape[1] * cp.size] if offsets is None else [b - a for a, b in pairwise(offsets)]
        check_positions(rope, max(lengths), "the longest sequence")
        try_first_row()
        made.append((chunks, offsets, at_once))
        given = {name: t for name, t in {**tensors, **phi_tensors}.items() if t is not None}
        settings: dict[str, Any] = {
            "cfg": cfg,
            "softmax_scale": None if softmax_scale is None else float(softmax_scale),
            "noise": float(noise),
            "seed": int(seed),
            "cp": (cp.owners, cp.reduction),
            "weights": (weights_k.kind, weights_v.kind),
            "kv_heads_at_once": at_once,
            "rope": None if rope is None else tuple(table.shape[1] for table in rope),
            # A hash of the offsets, which may be many.
            "cu_seqlens": None if offsets is None else (f"{len(offsets)} offsets", hash(tuple(offsets))),
            "device": q.device.type,
            "backward": torch.is_grad_enabled() and needs_gradient(*given.values()),
        }
        return settings | {name: (tuple(t.shape), t.dtype, t.requires_grad) for name, t in given.items()}

    def try_first_row() -> None:
        """One process' call of the first row, which refuses what would otherwise be refused between exchanges."""

        def first(t: Tensor | None) -> Any:
            return None if t is None else t[:1][None] if packed else t[:, :1]

        attend_alone(
            **{name: first(t) for name, t in branches.items()},
            indices=first(indices),
            cfg=cfg,
            weights_k=weights_k,
            weights_v=weights_v,
            rope=rope,
            softmax_scale=softmax_scale,
            noise=noise,
            seed=seed,
        )

    agree(cp.group, describe)
    chunks, offsets, at_once = made[0]
    k_cmp = k
    k_slc, v_slc = k if k_slc is None else k_slc, v if v_slc is None else v_slc
    k_swa, v_swa = k if k_swa is None else k_swa, v if v_swa is None else v_swa
    own_window = k_slc is not k_swa or v_slc is not v_swa
    if rope is not None:
        rows = cp.positions(q.shape[0 if packed else 1] * cp.size, q.device)
        if cu_seqlens is not None:
            rows = rows_within(cu_seqlens.to(q.device), offsets[-1] if offsets else 0)[0][rows]
        cos, sin = rope[0][rows], rope[1][rows]
        q, k_slc = rotate(q, cos, sin), rotate(k_slc, cos, sin)
        k_swa = rotate(k_swa, cos, sin) if own_window else k_slc
    plan = Plan(
        cp, chunks, cfg, at_once, packed, softmax_scale, float(noise), _signed(seed), rope, indices, return_indices
    )
    window = (k_swa, v_swa) if own_window else (None, None)
    kinds = (weights_k.kind, weights_v.kind)
    weights = (*weights_k.as_arguments()[1:], *weights_v.as_arguments()[1:])
    apply: Any = _Attention.apply
    o, selected = apply(plan, kinds, q, gates, k_cmp, v, k_slc, v_slc, *window, *weights)
    return (o, selected) if return_indices else o


def _named(name: str, weights: CompressionWeights) -> dict[str, Tensor | None]:
    return {f"{name}[{i}]": t for i, t in enumerate(weights.as_arguments()[1:])}


def heads_at_once(rows: int, kv_heads: int) -> int:
    """Number of KV heads to gather at once if a GPU's calls have `rows` rows of q per KV head.

    The next gather overlaps with long calls, and the compressed keys of few heads fit into L2. Short calls leave SMs
    idle at their end. 2^22 rows are a chunk of 256k tokens with 16 query heads: a million tokens on two H200s
    (docs/guide/scale.md).
    """
    enough = (n for n in range(1, kv_heads) if kv_heads % n == 0 and n * rows >= 2**22)
    return next(enough, kv_heads)


def _check(
    tensors: dict[str, Tensor | None], cp: ContextParallel, packed: bool, kv_heads_at_once: int | None, noise: float
) -> int:
    """Refuses what could fail on one rank alone or after an exchange; returns how many KV heads to gather at once."""
    q, k = tensors["q"], tensors["k"]
    assert q is not None and k is not None
    dims = 3 if packed else 4
    shape = "(S / P, heads, D)" if packed else "(B, S / P, heads, D)"
    for name, t in tensors.items():
        if t is None:
            continue
        if t.dim() != dims or t.shape[:-2] != q.shape[:-2]:
            raise ValueError(f"{name}: {tuple(t.shape)}: expected {shape} with the batch and rows of q")
        if t.device != q.device:
            raise ValueError(f"{name}: on {t.device}: expected {q.device} as q")
        if name[0] in "kv" and t.shape[-2] != k.shape[-2]:
            raise ValueError(f"{name}: {t.shape[-2]} heads: expected {k.shape[-2]} as k")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"k: {kv_heads} heads: must divide the {heads} of q")
    at_once = kv_heads if kv_heads_at_once is None else kv_heads_at_once
    if kv_heads_at_once is None and q.is_cuda and not noise:
        at_once = heads_at_once(q.shape[:-1].numel() // len(cp.own) // kv_heads, kv_heads)
    if at_once < 1 or kv_heads % at_once:
        raise ValueError(f"kv_heads_at_once = {at_once}: must divide the {kv_heads} heads of k")
    if noise and at_once < kv_heads:
        raise ValueError(f"noise = {noise}: must be 0 with kv_heads_at_once, whose parts would draw the same")
    return at_once


class _Joined:
    """A result of all own rows and heads, into which chunks and groups of heads are copied as they come."""

    def __init__(self, plan: Plan, heads: int, dtype: torch.dtype | None = None) -> None:
        self.plan, self.heads, self.dtype = plan, heads, dtype
        self.whole: Tensor | None = None

    def put(self, part: Tensor, slot: int, first: int) -> None:
        """Writes the rows of an own chunk, for heads from `first` on. A complete tensor is stored without a copy."""
        dim, slots, heads = self.plan.dim, len(self.plan.cp.own), part.shape[-2]
        dtype = part.dtype if self.dtype is None else self.dtype
        if slots == 1 and heads == self.heads:
            self.whole = part.to(dtype)
            return
        rows = part.shape[dim]
        if self.whole is None:
            shape = [*self.plan.block_rows(part, slots * rows)]
            shape[-2] = self.heads
            self.whole = part.new_empty(shape, dtype=dtype)
        self.whole.narrow(dim, slot * rows, rows).narrow(-2, first, heads).copy_(part)

    def result(self) -> Tensor:
        assert self.whole is not None
        return self.whole


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, kinds: tuple[str, str], *tensors: Tensor | None) -> Any:
        s = plan
        q, gates, k, v, k_slc, v_slc, k_swa, v_swa, *weights = tensors
        assert q is not None and k is not None and v is not None and gates is not None
        raw = [t for t in (k_slc, v_slc, k_swa, v_swa) if t is not None]
        phi = CompressionWeights(kinds[0], *weights[:5]), CompressionWeights(kinds[1], *weights[5:])
        compressed = [
            [s.compressed(t, w, s.chunks[c], rotated) for t, w, rotated in zip(pair, phi, (True, False), strict=True)]
            for c, pair in zip(s.cp.own, s.with_halo([k, v]), strict=True)
        ]
        keep = any(ctx.needs_input_grad)
        ratio = q.shape[-2] // k.shape[-2]
        groups = s.groups(k.shape[-2])
        kept: list[Tensor] = []
        output, chosen = _Joined(s, q.shape[-2]), _Joined(s, k.shape[-2])
        coming = s.gather(compressed, raw, groups[0])
        for number, heads in enumerate(groups):
            whole = coming()
            if number + 1 < len(groups):
                coming = s.gather(compressed, raw, groups[number + 1])
            of_q = slice(heads[0] * ratio, heads[1] * ratio)
            for slot, c in enumerate(s.cp.own):
                chunk = s.chunks[c]
                o, selected, *others = call(
                    ops.nsa_attention,
                    *(s.own(q)[slot][..., of_q, :], *s.seen(chunk, whole), s.own(gates)[slot][..., of_q, :]),
                    *(s.cfg.as_list(), s.softmax_scale, s.noise, s.seed, *s.lengths(chunk, q)),
                    *(s.given(slot, heads), keep, s.return_indices),
                )
                output.put(o, slot, of_q.start)
                if s.return_indices:
                    chosen.put(selected, slot, heads[0])
                kept += [selected, *others]
                del o, others  # memory
            del whole
        ctx.plan, ctx.phi_kinds, ctx.given = s, kinds, len(tensors)
        ctx.save_for_backward(*tensors, *(kept if keep else ()))
        indices = chosen.result() if s.return_indices else q.new_empty(0, dtype=torch.int32)
        ctx.mark_non_differentiable(indices)
        ctx.set_materialize_grads(False)
        return output.result(), indices

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_o: Tensor | None, _: Any) -> Any:
        s, kinds = ctx.plan, ctx.phi_kinds
        saved = ctx.saved_tensors
        q, gates, k, v, k_slc, v_slc, k_swa, v_swa, *weights = saved[: ctx.given]
        # Another rank, which has one, waits for this one.
        d_o = q.new_zeros(*q.shape[:-1], v.shape[-1]) if d_o is None else d_o.contiguous()
        kept = iter(saved[ctx.given :])
        raw = [t for t in (k_slc, v_slc, k_swa, v_swa) if t is not None]
        with torch.enable_grad():
            leaves = [[t.detach().requires_grad_() for t in pair] for pair in s.with_halo([k, v])]
            weights = [None if t is None else t.detach().requires_grad_() for t in weights]
            phi = CompressionWeights(kinds[0], *weights[:5]), CompressionWeights(kinds[1], *weights[5:])
            graph = [
                [
                    s.compressed(t, w, s.chunks[c], rotated)
                    for t, w, rotated in zip(pair, phi, (True, False), strict=True)
                ]
                for c, pair in zip(s.cp.own, leaves, strict=True)
            ]
        compressed = [[t.detach() for t in pair] for pair in graph]
        kv_heads = k.shape[-2]
        ratio = q.shape[-2] // kv_heads
        groups = s.groups(kv_heads)
        d_q, d_gates = _Joined(s, q.shape[-2]), _Joined(s, q.shape[-2])
        d_raw = [_Joined(s, kv_heads, t.dtype) for t in raw]
        d_compressed: list[list[list[Tensor]]] = [[[], []] for _ in s.cp.own]  # by chunk, of keys and of values
        coming = s.gather(compressed, raw, groups[0])
        for number, heads in enumerate(groups):
            whole = coming()
            if number + 1 < len(groups):
                coming = s.gather(compressed, raw, groups[number + 1])
            of_q = slice(heads[0] * ratio, heads[1] * ratio)
            shares = {}
            for slot, c in enumerate(s.cp.own):
                chunk = s.chunks[c]
                seen = s.seen(chunk, whole)
                outputs = [next(kept) for _ in range(7)]
                dq, *d_seen, dg = ops.nsa_attention_backward(
                    *(s.own(d_o)[slot][..., of_q, :], s.own(q)[slot][..., of_q, :], *seen),
                    *(s.own(gates)[slot][..., of_q, :], *outputs),
                    *(s.cfg.as_list(), s.softmax_scale, *s.lengths(chunk, q), s.given(slot, heads), [True] * 8),
                )
                if len(raw) == 2:  # the window's keys are the selection's
                    d_seen = [*d_seen[:2], d_seen[2].add_(d_seen[4]), d_seen[3].add_(d_seen[5])]
                shares[c] = d_seen
                d_q.put(dq, slot, of_q.start)
                d_gates.put(dg, slot, of_q.start)
                del dq, dg, seen  # memory, for what follows
            del whole
            for slot, totals in enumerate(s.shares_to_owners(shares, q)):
                for i, total in enumerate(totals[:2]):
                    d_compressed[slot][i].append(total)
                for i, total in enumerate(totals[2:]):
                    d_raw[i].put(total, slot, heads[0])
        results, received = [], []
        for tensors, of_chunk in zip(graph, d_compressed, strict=True):
            for t, parts in zip(tensors, of_chunk, strict=True):
                if t.numel():
                    results.append(t)
                    received.append(torch.cat(parts, -2).to(t.dtype))
        inputs = [*(t for pair in leaves for t in pair), *(t for t in weights if t is not None)]
        found = iter(torch.autograd.grad(results, inputs, received, allow_unused=True, materialize_grads=True))
        d_tokens = [[next(found) for _ in pair] for pair in leaves]
        d_weights = [None if t is None else next(found) for t in weights]
        d_k, d_v = s.halo_to_owners(d_tokens, [k, v])
        d_keys = [d.result() for d in d_raw]
        window = d_keys[2:] if len(raw) == 4 else [None, None]
        return (
            *(None, None, d_q.result(), d_gates.result(), d_k, d_v, *d_keys[:2], *window),
            *d_weights,
        )
