"""The operations as dense masked softmax in plain torch: every mask written out, gradients by torch's autograd.

Written from docs/operations.md, not from the C++ code, so that the two check each other. It runs in its inputs' dtype:
float64 makes the truth, float32 and bfloat16 the plain same-precision computation of the error bound. One sequence at a
time: q (Sq, H, Dk), k (Sk, Hkv, Dk), v (Sk, Hkv, Dv), query i at position i + Sk - Sq.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import silu

from nsa import CompressionWeights, NSAConfig


def positions(sq: int, sk: int) -> Tensor:
    return torch.arange(sq) + sk - sq


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """visible (Hkv or 1, Sq, Sk). Returns o (Sq, H, Dv) and lse (H, Sq)."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    visible = visible.expand(q.shape[1] // group, -1, -1).repeat_interleave(group, 0)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    seen = visible.any(-1)
    lse = torch.logsumexp(scores.masked_fill(~visible, -torch.inf), -1) if k.shape[0] else scores.new_zeros(seen.shape)
    lse = lse.masked_fill(~seen, -torch.inf)
    # A row that sees nothing is softmaxed over everything, then taken out: no NaN, and no gradient.
    probabilities = torch.softmax(scores.masked_fill(~visible & seen[..., None], -torch.inf), -1) * visible
    return torch.einsum("hqk,khd->qhd", probabilities, v), lse.detach()


def compress(k: Tensor, w: CompressionWeights, cfg: NSAConfig) -> Tensor:
    """k (S, Hkv, D) -> (N_c(S), Hkv, D)."""
    starts = range(0, k.shape[0] - cfg.kernel_size + 1, cfg.kernel_stride)
    if len(starts) == 0:
        return k[:0]
    blocks = torch.stack([k[s : s + cfg.kernel_size] for s in starts]).transpose(1, 2)  # (N_c, Hkv, l, D)
    if w.kind == "mean":
        return blocks.mean(2)
    if w.pe is not None:
        blocks = blocks + w.pe
    heads = k.shape[1]

    def layer(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.einsum("nhi,hio->nho", x, weight.expand(heads, -1, -1))
        return y if bias is None else y + bias

    hidden = layer(blocks.flatten(2), w.w1, w.b1)
    return hidden if w.kind == "linear" else layer(silu(hidden), w.w2, w.b2)


def visible_compressed(sq: int, sk: int, cfg: NSAConfig) -> Tensor:
    ends = torch.arange(cfg.num_compressed(sk)) * cfg.kernel_stride + cfg.kernel_size - 1
    return (ends <= positions(sq, sk)[:, None])[None]


def compressed_attention(q: Tensor, k_c: Tensor, v_c: Tensor, cfg: NSAConfig, sk: int, scale: float | None = None):
    return attention(q, k_c, v_c, visible_compressed(q.shape[0], sk, cfg), scale)


def importance(q: Tensor, k_c: Tensor, cfg: NSAConfig, sk: int, scale: float | None = None) -> Tensor:
    """(Hkv, Sq, selection blocks), summed over the group."""
    visible = visible_compressed(q.shape[0], sk, cfg)
    group = q.shape[1] // k_c.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("qhd,khd->hqk", q, k_c.repeat_interleave(group, 1)) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    p = torch.where(visible.any(-1, keepdim=True), torch.softmax(scores, -1), 0) if k_c.shape[0] else scores
    begin = torch.arange(k_c.shape[0])[:, None] * cfg.kernel_stride
    block = torch.arange(-(-sk // cfg.block_size))[None] * cfg.block_size
    overlap = torch.minimum(begin + cfg.kernel_size, block + cfg.block_size) - torch.maximum(begin, block)
    weights = overlap.clamp(min=0).to(p.dtype) / cfg.kernel_stride
    return (p @ weights).unflatten(0, (-1, group)).sum(1)


def selection_errors(indices: Tensor, q: Tensor, k_c: Tensor, cfg: NSAConfig, sk: int, rho: float = 1e-5) -> list[str]:
    """What is wrong with indices (Sq, Hkv, topk) by the specification's tolerance rule; q and k_c float64."""
    scores, rows = importance(q, k_c, cfg, sk).tolist(), indices.tolist()
    group = q.shape[1] // k_c.shape[1]
    errors = []
    for i, t in enumerate(positions(q.shape[0], sk).tolist()):
        own = t // cfg.block_size
        forced = {j for j in range(own + 1) if j < cfg.init_blocks or j > own - cfg.local_blocks}
        for h in range(k_c.shape[1]):
            row = rows[i][h]
            picks = [j for j in row if j >= 0]
            where = f"query {i}, KV head {h}: {row}"
            count = min(cfg.topk, own + 1)
            if row != sorted(set(picks)) + [-1] * (cfg.topk - len(picks)) or len(picks) != count:
                errors.append(f"{where}: not {count} ascending distinct blocks padded with -1")
            elif not forced <= set(picks) or picks[-1] > own:
                errors.append(f"{where}: a forced block is missing, or a block lies in the future")
            else:
                free = count - len(forced)
                others = [(scores[h][i][j], j) for j in range(own + 1) if j not in forced]
                if free == 0 or not others:
                    continue
                nth = sorted((s for s, _ in others), reverse=True)[free - 1]
                tolerance = rho * nth + 1e-7 * group
                if any((s < nth - tolerance) if j in picks else (s > nth + tolerance) for s, j in others):
                    errors.append(f"{where}: a pick is too low or a block left out too high")
    return errors


def visible_selected(indices: Tensor, sk: int, block_size: int) -> Tensor:
    sq = indices.shape[0]
    blocks = torch.arange(sk) // block_size
    chosen = (indices[..., None] == blocks).any(2).transpose(0, 1)  # (Hkv, Sq, Sk)
    return chosen & (torch.arange(sk) <= positions(sq, sk)[:, None])


def selected_attention(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block_size: int, scale: float | None = None):
    return attention(q, k, v, visible_selected(indices, k.shape[0], block_size), scale)


def sliding_window_attention(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None = None):
    t, u = positions(q.shape[0], k.shape[0])[:, None], torch.arange(k.shape[0])
    return attention(q, k, v, ((u <= t) & (u > t - window))[None], scale)


def combine(o_cmp: Tensor, o_slc: Tensor, o_swa: Tensor, gates: Tensor) -> Tensor:
    return gates[..., 0:1] * o_cmp + gates[..., 1:2] * o_slc + gates[..., 2:3] * o_swa


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (x[j], x[j + D/2]) of the rows (S, heads, D) by their rows of cos, sin (S, D/2)."""
    low, high = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def nsa_attention(q, k_c, v_c, k_slc, v_slc, k_swa, v_swa, gates, indices, cfg, scale=None) -> Tensor:
    o_cmp, _ = compressed_attention(q, k_c, v_c, cfg, k_slc.shape[0], scale)
    o_slc, _ = selected_attention(q, k_slc, v_slc, indices, cfg.block_size, scale)
    o_swa, _ = sliding_window_attention(q, k_swa, v_swa, cfg.window_size, scale)
    return combine(o_cmp, o_slc, o_swa, gates)


def select_with_noise(
    q: Tensor, k_c: Tensor, cfg: NSAConfig, sk: int, noise: float, seed: int, sequence: int
) -> Tensor:
    """Indices (Sq, Hkv, topk) under exploration noise, from float64 scores."""
    scores = importance(q, k_c, cfg, sk).tolist()
    group = q.shape[1] // k_c.shape[1]
    result = [[[-1] * cfg.topk for _ in range(k_c.shape[1])] for _ in range(q.shape[0])]
    for i, t in enumerate(positions(q.shape[0], sk).tolist()):
        own = t // cfg.block_size
        for h in range(k_c.shape[1]):
            keys = []
            for j in range(own + 1):
                if j < cfg.init_blocks or j > own - cfg.local_blocks:
                    keys.append(torch.inf)
                    continue
                u = ((philox4x32(seed, (j, t, h, sequence)) >> 9) + 0.5) * 2.0**-23
                share = scores[h][i][j] / (group * cfg.kernel_size / cfg.kernel_stride)
                keys.append(math.log(share + 1e-4) - noise * math.log(-math.log(u)))
            best = sorted(range(own + 1), key=lambda j: (-keys[j], j))[: cfg.topk]
            result[i][h][: len(best)] = sorted(best)
    return torch.tensor(result, dtype=torch.int32)


def philox4x32(seed: int, counter: tuple[int, int, int, int]) -> int:
    """First word of Philox4x32-10 (Salmon et al., 2011)."""
    mask = 0xFFFFFFFF
    key0, key1 = seed & mask, seed >> 32
    c0, c1, c2, c3 = counter
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) & mask, (key1 + 0xBB67AE85) & mask
    return c0
