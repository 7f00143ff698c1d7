"""The operations and the layer in plain torch: dense masked softmax, every mask written out, gradients by autograd.

Names, arguments, shapes and results are those of the functions in `nsa`; docs/operations.md says what they compute.
Here any device, dtype and head dim will do, everything is computed in the inputs' dtype (float64 makes the truth), and
derivatives of any order work. Time and memory grow with the square of the length, and packed calls read `cu_seqlens` on
the host. Nothing in `nsa` comes here by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from . import functional, layer
from ._arguments import checked, like
from .config import CompressionWeights, NSAConfig
from .functional import MEAN
from .rotary import check_positions, rotate

__all__ = [
    "NativeSparseAttention",
    "combine",
    "compress",
    "compressed_attention",
    "importance",
    "native_sparse_attention",
    "nsa_attention",
    "select_blocks",
    "selected_attention",
    "sliding_window_attention",
]


@checked
def compress(k: Tensor, weights: CompressionWeights, cfg: NSAConfig, cu_seqlens: Tensor | None = None) -> Tensor:
    """As `nsa.compress`."""
    if cu_seqlens is None:
        return _compress(k, weights, cfg)
    parts = [_compress(k[begin:end][None], weights, cfg)[0] for begin, end in _spans(cu_seqlens)]
    return _filled(parts, k.shape[0] // cfg.kernel_stride, like=k)


@checked
def compressed_attention(
    q: Tensor,
    k_c: Tensor,
    v_c: Tensor,
    cfg: NSAConfig,
    softmax_scale: float | None = None,
    seqlen_k: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `nsa.compressed_attention`; lse in q's dtype."""

    def one(q: Tensor, k_c: Tensor, v_c: Tensor, sk: int) -> tuple[Tensor, Tensor]:
        return _attention(q, k_c, v_c, _visible_compressed(q, k_c, cfg, sk), softmax_scale)

    return _attended(one, q, k_c, v_c, _Lengths(q, cu_seqlens_q, cu_seqlens_k, seqlen_k, cfg))


@checked
def select_blocks(
    q: Tensor,
    k_c: Tensor,
    lse: Tensor,
    cfg: NSAConfig,
    softmax_scale: float | None = None,
    seqlen_k: int | None = None,
    noise: float = 0.0,
    seed: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Tensor:
    """As `nsa.select_blocks`; recomputes lse."""
    lengths = _Lengths(q, cu_seqlens_q, cu_seqlens_k, seqlen_k, cfg)
    q, k_c = q.detach(), k_c.detach()

    def one(q: Tensor, k_c: Tensor, sk: int, first: int) -> Tensor:
        ranks = importance(q, k_c, cfg, sk, softmax_scale)
        if noise:
            share = ranks / (q.shape[2] // k_c.shape[2] * cfg.kernel_size / cfg.kernel_stride)
            ranks = (share + 1e-4).log() + noise * _gumbel(ranks, seed, sk, first)
        return _select(ranks, cfg, sk)

    if not lengths.packed:
        return one(q, k_c, lengths.seqlen_k, 0)
    parts = [one(q[at_q][None], k_c[at_c][None], sk, i)[0] for i, (at_q, _, at_c, sk) in enumerate(lengths.sequences)]
    like = q.new_empty((0, k_c.shape[-2], cfg.topk), dtype=torch.int32)
    return _filled(parts, q.shape[0], like, fill=-1)


@checked
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    block_size: int = 64,
    softmax_scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `nsa.selected_attention`; lse in q's dtype."""

    def one(q: Tensor, k: Tensor, v: Tensor, sk: int, indices: Tensor) -> tuple[Tensor, Tensor]:
        tokens = torch.arange(sk, device=q.device)
        chosen = (indices[..., None] == tokens // block_size).any(3).transpose(1, 2)  # (B, Hkv, Sq, Sk)
        return _attention(q, k, v, chosen & (tokens <= _positions(q, sk)[:, None]), softmax_scale)

    return _attended(one, q, k, v, _Lengths(q, cu_seqlens_q, cu_seqlens_k, k.shape[1]), indices)


@checked
def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window_size: int,
    softmax_scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `nsa.sliding_window_attention`; lse in q's dtype."""

    def one(q: Tensor, k: Tensor, v: Tensor, sk: int) -> tuple[Tensor, Tensor]:
        t, u = _positions(q, sk)[:, None], torch.arange(sk, device=q.device)
        return _attention(q, k, v, ((u <= t) & (u > t - window_size))[None, None], softmax_scale)

    return _attended(one, q, k, v, _Lengths(q, cu_seqlens_q, cu_seqlens_k, k.shape[1]))


@checked
def combine(o_cmp: Tensor, o_slc: Tensor, o_swa: Tensor, gates: Tensor) -> Tensor:
    """As `nsa.combine`."""
    return gates[..., 0:1] * o_cmp + gates[..., 1:2] * o_slc + gates[..., 2:3] * o_swa


@like(functional.nsa_attention)
@checked
def nsa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    *,
    k_c: Tensor,
    v_c: Tensor,
    cfg: NSAConfig | None = None,
    k_swa: Tensor | None = None,
    v_swa: Tensor | None = None,
    indices: Tensor | None = None,
    softmax_scale: float | None = None,
    noise: float = 0.0,
    seed: int = 0,
    return_indices: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """As `nsa.nsa_attention`."""
    cfg = NSAConfig() if cfg is None else cfg
    packed: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "softmax_scale": softmax_scale,
    }
    seqlen_k = None if cu_seqlens_q is not None else k.shape[1]
    o_cmp, lse = compressed_attention(q, k_c, v_c, cfg, seqlen_k=seqlen_k, **packed)
    selected = indices
    if selected is None or return_indices:
        selected = select_blocks(q, k_c, lse, cfg, seqlen_k=seqlen_k, noise=noise, seed=seed, **packed)
    o_slc, _ = selected_attention(q, k, v, selected if indices is None else indices, cfg.block_size, **packed)
    window = (k if k_swa is None else k_swa, v if v_swa is None else v_swa)
    o_swa, _ = sliding_window_attention(q, *window, cfg.window_size, **packed)
    o = combine(o_cmp, o_slc, o_swa, gates)
    return (o, selected) if return_indices else o


@like(functional.native_sparse_attention)
@checked
def native_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
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
    recompute_compressed: bool = False,
    return_indices: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """As `nsa.native_sparse_attention`; recompute_compressed changes nothing."""
    cfg = NSAConfig() if cfg is None else cfg
    lengths = _Lengths(q, cu_seqlens_q, cu_seqlens_k, k.shape[1])
    cu_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    k_c = compress(k, MEAN if weights_k is None else weights_k, cfg, cu_k)
    v_c = compress(v, MEAN if weights_v is None else weights_v, cfg, cu_k)
    k_slc, k_swa = (k if t is None else t for t in (k_slc, k_swa))
    v_slc, v_swa = (v if t is None else t for t in (v_slc, v_swa))
    if rope is not None:
        at_q, at_k, at_c = lengths.positions(q, k, k_c, cfg)
        check_positions(rope, 1 + int(max([-1, *at_k.tolist()])))

        def rotated(x: Tensor, at: Tensor) -> Tensor:
            return rotate(x, rope[0][at], rope[1][at])

        q, k_slc, k_swa, k_c = rotated(q, at_q), rotated(k_slc, at_k), rotated(k_swa, at_k), rotated(k_c, at_c)
    return nsa_attention(
        *(q, k_slc, v_slc, gates),
        k_c=k_c,
        v_c=v_c,
        cfg=cfg,
        k_swa=k_swa,
        v_swa=v_swa,
        indices=indices,
        softmax_scale=softmax_scale,
        noise=noise,
        seed=seed,
        return_indices=return_indices,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )


class NativeSparseAttention(layer.NativeSparseAttention):
    """`nsa.NativeSparseAttention` on the operations of this module; with a cache it runs as that one does."""

    _attend = staticmethod(native_sparse_attention)
    _compress = staticmethod(compress)


def importance(q: Tensor, k_c: Tensor, cfg: NSAConfig, seqlen_k: int, softmax_scale: float | None = None) -> Tensor:
    """Importance scores of blocks (eq. 9 and 10): (B, Hkv, Sq, blocks), summed over a KV head's query heads."""
    visible = _visible_compressed(q, k_c, cfg, seqlen_k)
    group = q.shape[2] // k_c.shape[2]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k_c.repeat_interleave(group, 2)) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    p = torch.where(visible.any(-1, keepdim=True), torch.softmax(scores, -1), 0) if k_c.shape[1] else scores
    begin = torch.arange(k_c.shape[1], device=q.device)[:, None] * cfg.kernel_stride
    block = torch.arange(-(-seqlen_k // cfg.block_size), device=q.device)[None] * cfg.block_size
    overlap = torch.minimum(begin + cfg.kernel_size, block + cfg.block_size) - torch.maximum(begin, block)
    weights = overlap.clamp(min=0).to(p.dtype) / cfg.kernel_stride
    return (p @ weights).unflatten(1, (-1, group)).sum(2)


def _select(ranks: Tensor, cfg: NSAConfig, sk: int) -> Tensor:
    """The forced blocks and the highest of the others, (B, Sq, Hkv, topk), from their ranks (B, Hkv, Sq, blocks)."""
    blocks = torch.arange(ranks.shape[-1], device=ranks.device)
    own = (_positions(ranks.transpose(1, 2), sk) // cfg.block_size)[:, None]
    forced = (blocks < cfg.init_blocks) | (blocks > own - cfg.local_blocks)
    ranks = ranks.masked_fill(forced, torch.inf).masked_fill(blocks > own, -torch.inf)
    order = ranks.argsort(dim=-1, descending=True, stable=True)[..., : cfg.topk]
    chosen = torch.where(order <= own, order, ranks.shape[-1]).sort(-1).values
    chosen = torch.where(chosen < ranks.shape[-1], chosen, -1)
    return pad(chosen, (0, cfg.topk - chosen.shape[-1]), value=-1).transpose(1, 2).to(torch.int32)


def _gumbel(like: Tensor, seed: int, sk: int, sequence: int) -> Tensor:
    """The exploration noise of (B, Hkv, Sq, blocks) ranks; row b is sequence `sequence` + b."""
    batch, heads, rows, blocks = like.shape
    sizes = (batch, heads, rows, blocks)

    def axis(values: Tensor, dim: int) -> Tensor:
        return values.to(torch.int64).reshape([-1 if i == dim else 1 for i in range(4)]).expand(sizes)

    b, h, j = (torch.arange(n, device=like.device) for n in (batch, heads, blocks))
    t = _positions(like.transpose(1, 2), sk)
    words = _philox4x32(seed, (axis(j, 3), axis(t, 2), axis(h, 1), axis(b + sequence, 0)))
    return -(-(((words >> 9) + 0.5) * 2.0**-23).to(torch.float64).log()).log().to(like.dtype)


def _philox4x32(seed: int, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """First word of Philox4x32-10 (Salmon et al., 2011) as int64."""
    mask = 0xFFFFFFFF

    def product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
        """High and low 32 bits of a * b, by halves that fit into 63 bits."""
        low, high = a * (b & 0xFFFF), a * (b >> 16)
        high = high + (low >> 16)
        return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)

    key0, key1 = seed & mask, seed >> 32 & mask
    c0, c1, c2, c3 = counter
    for _ in range(10):
        high0, low0 = product(0xD2511F53, c0)
        high1, low1 = product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) & mask, (key1 + 0xBB67AE85) & mask
    return c0


def _compress(k: Tensor, w: CompressionWeights, cfg: NSAConfig) -> Tensor:
    """k (B, S, Hkv, D) -> (B, N_c(S), Hkv, D)."""
    if k.shape[1] < cfg.kernel_size:
        return k[:, :0]
    blocks = k.unfold(1, cfg.kernel_size, cfg.kernel_stride).transpose(-1, -2)  # (B, N_c, Hkv, l, D)
    if w.kind == "mean":
        return blocks.mean(3)
    if w.pe is not None:
        blocks = blocks + w.pe
    heads = k.shape[2]

    def linear(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if weight is None:
            raise ValueError(f"weights: w1 or w2: not given: must be with kind = {w.kind!r}")
        y = torch.einsum("bnhi,hio->bnho", x, weight.expand(heads, -1, -1))
        return y if bias is None else y + bias

    hidden = linear(blocks.flatten(3), w.w1, w.b1)
    return hidden if w.kind == "linear" else linear(silu(hidden), w.w2, w.b2)


def _attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, softmax_scale: float | None) -> tuple[Tensor, Tensor]:
    """visible (B or 1, Hkv or 1, Sq, Sk). Returns o (B, Sq, H, Dv) and lse (B, H, Sq)."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    visible = visible.expand(q.shape[0], k.shape[2] // group, -1, -1).repeat_interleave(group, 1)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    seen = visible.any(-1)
    lse = torch.logsumexp(scores.masked_fill(~visible, -torch.inf), -1) if k.shape[1] else scores.new_zeros(seen.shape)
    lse = lse.masked_fill(~seen, -torch.inf)
    # A row that sees nothing is softmaxed over everything, then taken out: no NaN, and no gradient.
    probabilities = torch.softmax(scores.masked_fill(~visible & seen[..., None], -torch.inf), -1) * visible
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, v), lse.detach()


def _positions(q: Tensor, sk: int) -> Tensor:
    return torch.arange(q.shape[1], device=q.device) + sk - q.shape[1]


def _visible_compressed(q: Tensor, k_c: Tensor, cfg: NSAConfig, sk: int) -> Tensor:
    ends = torch.arange(k_c.shape[1], device=q.device) * cfg.kernel_stride + cfg.kernel_size - 1
    return (ends <= _positions(q, sk)[:, None])[None, None]


def _spans(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    ends = cu_seqlens.tolist()
    return list(pairwise(ends))


class _Lengths:
    """Offsets of a call's sequences: rows of queries, keys and compressed tokens, and the number of raw keys.

    `cfg` means that the call's keys are compressed.
    """

    def __init__(
        self,
        q: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        seqlen_k: int | None,
        cfg: NSAConfig | None = None,
    ) -> None:
        self.packed, self.cfg = cu_seqlens_q is not None, cfg
        self.seqlen_k = q.shape[1] if seqlen_k is None else seqlen_k
        self.sequences: list[tuple[slice, slice, slice, int]] = []
        if cu_seqlens_q is None:
            return
        begin_c = 0
        keys = _spans(cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k)
        for (begin_q, end_q), (begin_k, end_k) in zip(_spans(cu_seqlens_q), keys, strict=True):
            end_c = begin_c + (0 if cfg is None else cfg.num_compressed(end_k - begin_k))
            spans = slice(begin_q, end_q), slice(begin_k, end_k), slice(begin_c, end_c)
            self.sequences.append((*spans, end_k - begin_k))
            begin_c = end_c

    def positions(self, q: Tensor, k: Tensor, k_c: Tensor, cfg: NSAConfig) -> tuple[Tensor, Tensor, Tensor]:
        """Positions of queries, keys and first tokens of compressed keys; 0 past the last sequence."""
        device = q.device
        if not self.packed:
            keys = torch.arange(k.shape[1], device=device)
            first = torch.arange(k_c.shape[1], device=device) * cfg.kernel_stride
            return keys[k.shape[1] - q.shape[1] :], keys, first
        at_q, at_k, at_c = (torch.zeros(t.shape[0], dtype=torch.int64, device=device) for t in (q, k, k_c))
        begin_c = 0
        for rows_q, rows_k, _, sk in self.sequences:
            at_k[rows_k] = torch.arange(sk, device=device)
            at_q[rows_q] = torch.arange(rows_q.start - rows_q.stop, 0, device=device) + sk
            count = cfg.num_compressed(sk)
            at_c[begin_c : begin_c + count] = torch.arange(count, device=device) * cfg.kernel_stride
            begin_c += count
        return at_q, at_k, at_c


def _attended(
    one: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: _Lengths,
    indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """one(q, k, v, number of raw keys, ...) of the batch, or of each packed sequence."""
    if not lengths.packed:
        return one(q, k, v, lengths.seqlen_k, *(() if indices is None else (indices,)))
    outs = []
    for at_q, at_k, at_c, sk in lengths.sequences:
        at = at_k if lengths.cfg is None else at_c
        own = () if indices is None else (indices[at_q][None],)
        outs.append(one(q[at_q][None], k[at][None], v[at][None], sk, *own))
    o = _filled([o[0] for o, _ in outs], q.shape[0], like=q.new_empty((0, q.shape[1], v.shape[-1])))
    lse = [lse[0].transpose(0, 1) for _, lse in outs]
    return o, _filled(lse, q.shape[0], like=q.new_empty((0, q.shape[1])), fill=-torch.inf).transpose(0, 1)


def _filled(parts: Sequence[Tensor], rows: int, like: Tensor, fill: float = 0.0) -> Tensor:
    """The parts one after the other, then rows of `fill`."""
    rest = rows - sum(part.shape[0] for part in parts)
    return torch.cat((*parts, like.new_full((rest, *like.shape[1:]), fill)))
