"""nsa.compat.fla against a rendering of fla's definition in plain torch, one query at a time."""

import pytest
import torch

from devices import on_gpu
from nsa.compat.fla import parallel_nsa

BLOCK = 16


def definition(q, k, v, g_cmp, g_slc, g_swa, block_indices, counts, window, scale):
    """One sequence: q (Sq, H, Dk), k and v (Sk, Hkv, D), gates (Sq, H), blocks (Sq, Hkv, S), counts (Sq, Hkv)."""
    sk, group = k.shape[0], q.shape[1] // k.shape[1]
    means = [torch.stack([x[i : i + BLOCK].mean(0) for i in range(0, sk, BLOCK)]) if sk else x for x in (k, v)]
    rows = []
    for i, t in enumerate(range(sk - q.shape[0], sk)):
        heads = []
        for h in range(q.shape[1]):
            kv, own = h // group, t // BLOCK

            def attend(keys, values, scale, h=h, i=i):
                return torch.softmax(keys @ q[i, h] * scale, 0) @ values

            complete = (t + 1) // BLOCK
            o = q.new_zeros(v.shape[-1])
            if g_cmp is not None and complete:
                o = g_cmp[i, h] * attend(means[0][:complete, kv], means[1][:complete, kv], scale)
            if block_indices is not None:
                blocks = set(block_indices[i, kv][: counts[i, kv]].tolist())
            else:
                mine = range(kv * group, (kv + 1) * group)
                p = sum(torch.softmax(means[0][:complete, kv] @ q[i, g] * scale, 0) for g in mine).tolist()
                forced = {0, own, max(own - 1, 0)}
                others = sorted(set(range(own)) - forced, key=lambda j, p=p: -p[j])
                blocks = forced | set(others[: max(0, int(counts[i, kv]) - len(forced))])
            tokens = [u for u in range(t + 1) if u // BLOCK in blocks]
            slc = attend(k[tokens, kv], v[tokens, kv], scale) if tokens else torch.zeros_like(o)
            o = o + (slc if g_slc is None else g_slc[i, h] * slc)
            if window:
                first = max(0, t - window + 1)
                swa = attend(k[first : t + 1, kv], v[first : t + 1, kv], q.shape[-1] ** -0.5)
                o = o + g_swa[i, h] * swa
            heads.append(o)
        rows.append(torch.stack(heads))
    return torch.stack(rows) if rows else q.new_zeros(0, q.shape[1], v.shape[-1])


CASES = {
    "all branches": {},
    "one head a group": {"heads": (2, 2)},
    "sixteen heads a group": {"heads": (16, 1)},
    "no window": {"window": 0, "gates": "cmp slc"},
    "selected alone is not gated": {"gates": "", "window": 0, "indices": True},
    "g_slc None": {"gates": "cmp swa"},
    "indices": {"indices": True},
    "indices and counts": {"indices": True, "counts": True},
    "counts": {"counts": True},
    "queries at the end": {"lengths": [(9, 100)]},
    "packed": {"lengths": [(70, 70), (0, 0), (15, 15), (33, 33)], "packed": True},
    "packed queries at the end": {"lengths": [(7, 70), (15, 15), (1, 90)], "packed": True, "counts": True},
    "scale": {"scale": 0.1},
}


@pytest.mark.parametrize("name", CASES)
def test_definition(device, name):
    case = {"heads": (6, 2), "window": 20, "gates": "cmp slc swa", "lengths": [(90, 90)]} | CASES[name]
    if on_gpu():
        case["dims"] = (64, 64)
    (h, hkv), (dk, dv), lengths = case["heads"], case.get("dims", (16, 24)), case["lengths"]
    sq, sk = sum(n for n, _ in lengths), sum(n for _, n in lengths)
    q, k, v = torch.randn(1, sq, h, dk), torch.randn(1, sk, hkv, dk), torch.randn(1, sk, hkv, dv)
    gates = {f"g_{b}": torch.rand(1, sq, h) if b in case["gates"] else None for b in ("cmp", "slc", "swa")}
    inputs = {n: t.requires_grad_() for n, t in {"q": q, "k": k, "v": v, **gates}.items() if t is not None}
    counts = torch.randint(3, 6, (1, sq, hkv)) if case.get("counts") else torch.full((1, sq, hkv), 4)
    indices = torch.randint(-1, 7, (1, sq, hkv, 4)) if case.get("indices") else None
    options = {"block_indices": indices, "block_counts": counts if case.get("counts") else 4, "block_size": BLOCK}
    offsets = [torch.tensor([0, *(sum(n[i] for n in lengths[: j + 1]) for j in range(len(lengths)))]) for i in (0, 1)]
    if case.get("packed"):
        options["cu_seqlens"] = offsets[0] if torch.equal(*offsets) else tuple(offsets)
    out = parallel_nsa(q, k, v, **gates, window_size=case["window"], scale=case.get("scale"), **options)
    parts = []
    for (q0, q1), (k0, k1) in zip(*(zip(o[:-1].tolist(), o[1:].tolist(), strict=True) for o in offsets), strict=True):
        mine = [None if t is None else t[0, q0:q1].double() for t in gates.values()]
        blocks = None if indices is None else indices[0, q0:q1]
        rows = q[0, q0:q1].double(), k[0, k0:k1].double(), v[0, k0:k1].double()
        scale = case.get("scale", dk**-0.5)
        parts.append(definition(*rows, *mine, blocks, counts[0, q0:q1], case["window"], scale))
    expected = torch.cat(parts)[None]
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    d_out = torch.randn_like(out)
    found = torch.autograd.grad(out, list(inputs.values()), d_out)
    wanted = torch.autograd.grad(expected, list(inputs.values()), d_out.double())
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "block_indices: not given: must be without g_cmp"),
        ({"g_cmp": True, "window_size": 8}, "g_swa: not given: must be with window_size = 8"),
        ({"g_cmp": True, "block_counts": 2}, "block_counts = 2: must be >= 3"),
        ({"g_cmp": True, "block_size": 24}, "block_size = 24: must be a positive multiple of 16"),
        ({"g_cmp": True, "g_slc": torch.rand(1, 20, 1)}, r"g_slc: \(1, 20, 1\): must be \(1, 20, 2\)"),
        ({"g_cmp": True, "block_counts": torch.full((1, 20), 3)}, r"block_counts: \(1, 20\): must be \(1, 20, 2\)"),
        ({"batch": 2, "cu_seqlens": torch.tensor([0, 20])}, "must have a batch of 1 with cu_seqlens"),
    ],
)
def test_refused(options, message):
    options = dict(options)
    x = torch.randn(options.pop("batch", 1), 20, 2, 16)
    if "g_cmp" in options:
        options["g_cmp"] = torch.rand(1, 20, 2)
    with pytest.raises(ValueError, match=message):
        parallel_nsa(x, x, x, **options)
