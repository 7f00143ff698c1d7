"""The selector loss compared with plain loops, its gradients, and how its queries are drawn."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import nsa
from devices import head_dims
from nsa.selector import _draw, divergence, sampled_divergence

CFG = nsa.NSAConfig(kernel_size=8, kernel_stride=4, block_size=16, topk=4, init_blocks=1, local_blocks=2, window_size=8)
FIRST = CFG.topk * CFG.block_size  # the first position with a choice
ALL = 1 << 20
KINDS = {
    "own keys": {},
    "shared": {"share_kv": True},
    "own keys, mean": {"phi": "mean"},
    "shared, linear, norms": {"share_kv": True, "phi": "linear", "qk_norm": True},
    "a phi for each head": {"phi_per_kv_head": True},
    "no rotation": {"share_kv": True, "rope_theta": None},
    "partial": {"share_kv": True, "rope": nsa.rotary_tables(torch.arange(200), 8, 50.0)},
}


def layer_of(module=nsa, spread=0.3, **options):
    """A layer with parameters far from their initial values, where block selection is far from its target."""
    dim, _ = head_dims(16, 16)
    options = {"cfg": CFG, "selector_queries": ALL} | options
    layer = module.NativeSparseAttention(32, 4, 2, dim, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=spread * (16 / dim) ** 0.5)
    return layer


def rendering(layer, x):
    """Of all queries with a choice of one sequence x (S, hidden), one key after the other."""
    (length, _), (size, stride, block) = x.shape, (CFG.kernel_size, CFG.kernel_stride, CFG.block_size)
    kinds = (layer.k_proj[b] if isinstance(layer.k_proj, torch.nn.ModuleDict) else layer.k_proj for b in ("cmp", "slc"))
    q, k_cmp, k_slc = (p(x).unflatten(-1, (-1, 16)) for p in (layer.q_proj, *kinds))
    if layer.q_norm is not None:
        q, k_cmp, k_slc = layer.q_norm(q), layer.k_norm(k_cmp), layer.k_norm(k_slc)
    tables = layer._tables(length, x.device)

    def rotated(vector, position):
        if tables is None:
            return vector
        angle = torch.complex(*(table[position].double() for table in tables))
        low, high, rest = vector.split((len(angle), len(angle), 16 - 2 * len(angle)))
        out = torch.complex(low, high) * angle
        return torch.cat((out.real, out.imag, rest))

    def compressed(kv, i):
        w = layer.phi_k(x.dtype)
        rows = k_cmp[i * stride : i * stride + size, kv]
        if w.kind == "mean":
            return rows.mean(0)
        own = kv if len(w.pe) > 1 else 0
        hidden = (rows + w.pe[own]).flatten() @ w.w1[own] + w.b1[own]
        return hidden if w.kind == "linear" else torch.nn.functional.silu(hidden) @ w.w2[own] + w.b2[own]

    mean = 0
    for kv in range(2):
        total, masses = 0, 0
        k_c = [rotated(compressed(kv, i), i * stride) for i in range(CFG.num_compressed(length))]
        keys = [rotated(k_slc[u, kv], u) for u in range(length)]
        for t in range(FIRST, length):
            blocks = t // block + 1
            importance, attention = [0] * blocks, [0] * blocks
            for head in (2 * kv, 2 * kv + 1):
                query = rotated(q[t, head], t) / 4
                seen = [k_c[i] for i in range(len(k_c)) if i * stride + size - 1 <= t]
                for i, p in enumerate((torch.stack(seen) @ query).softmax(0)):
                    for u in range(i * stride, i * stride + size):
                        importance[u // block] += p / stride
                for u, p in enumerate((torch.stack(keys[: t + 1]) @ query).softmax(0)):
                    attention[u // block] += p
            free = [j for j in range(blocks) if j >= CFG.init_blocks and j <= t // block - CFG.local_blocks]
            target = torch.stack([attention[j] for j in free])
            found = torch.stack([importance[j] for j in free])
            mass, found = target.sum(), found / found.sum()
            total, masses = total + (target * (target / mass / found).log()).sum(), masses + mass
        mean += total / masses / 2
    return mean


@pytest.mark.parametrize("name", KINDS)
def test_is_that_of_plain_loops(name):
    layer = layer_of(nsa.reference, **KINDS[name]).double()
    x = torch.randn(300, 32, dtype=torch.float64)
    layer(x[None, :83])
    one = rendering(layer, x[:83])
    assert one > 0.001
    torch.testing.assert_close(nsa.selector_loss(layer), one, rtol=1e-6, atol=0)  # tables are float32
    # The second is too short; the last rows belong to none, as in a batch of fixed size.
    layer(x[:200], torch.tensor([0, 83, 140, 170], dtype=torch.int32), 83)
    torch.testing.assert_close(nsa.selector_loss(layer), one, rtol=1e-6, atol=0)
    learning = [p for n, p in layer.named_parameters() if n.startswith(("phi_k", "k_proj.cmp"))]
    found, wanted = (torch.autograd.grad(loss, learning) for loss in (layer.selector_loss, one))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-9)


def test_gradient_is_finite_differences():
    q, k_slc = torch.randn(3, 4, 6, dtype=torch.float64), torch.randn(90, 2, 6, dtype=torch.float64)
    k_c = torch.randn(CFG.num_compressed(90), 2, 6, dtype=torch.float64, requires_grad=True)
    positions, rope = torch.tensor([64, 77, 89]), nsa.rotary_tables(torch.arange(90), 6)
    shares = torch.tensor([0.5, 0.5, 0])
    assert torch.autograd.gradcheck(lambda k_c: divergence(q, k_c, k_slc, positions, shares, CFG, rope), (k_c,))


@pytest.mark.parametrize("name, moved", [("shared", ("phi_k",)), ("own keys", ("phi_k", "k_proj.cmp"))])
def test_what_learns(device, name, moved):
    layer, x = layer_of(**KINDS[name]), torch.randn(2, 150, 32, requires_grad=True)
    layer(x)
    nsa.selector_loss(layer).backward()
    for n, parameter in layer.named_parameters():
        assert (parameter.grad is not None and bool(parameter.grad.any())) == n.startswith(moved), n
    assert (x.grad is None) == (name == "shared")


def test_the_loss_falls(device):
    layer, x = layer_of(share_kv=True, selector_queries=16, spread=0.2), torch.randn(2, 150, 32)
    optimizer, losses = torch.optim.Adam(layer.parameters(), 3e-3), []
    keys = layer.k_proj.weight.clone()
    for _ in range(60):
        layer(x)
        losses.append(nsa.selector_loss(layer))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
    assert torch.equal(layer.k_proj.weight, keys)


def test_draws():
    offsets = torch.tensor([0, 150, 190, 290])  # 86, 0 and 36 queries with a choice
    of_first, places = 0, set()
    for seed in range(200):
        torch.manual_seed(seed)
        begin, positions, shares = _draw(offsets, offsets.diff(), FIRST, 150, 40)
        assert begin.item() in (0, 190)
        of_first += begin.item() == 0
        count = 86 if begin.item() == 0 else 36
        kept = min(count, 40)
        assert shares.tolist() == pytest.approx([1 / kept] * kept + [0] * (40 - kept))
        for i, position in enumerate(positions[:kept].tolist()):
            assert i * count // kept <= position - FIRST < (i + 1) * count // kept
        assert positions.max() < 150
        places |= set(positions.tolist()) if begin.item() == 0 else set()
    assert abs(of_first / 200 - 86 / 122) < 0.1
    assert places == set(range(FIRST, 150))


def test_draws_with_few_selecting_queries():
    offsets, begins = torch.tensor([0, 10, 10 + FIRST + 1, 11 + 2 * FIRST + 2]), []  # 0, 1 and 2 queries
    for seed in range(60):
        torch.manual_seed(seed)
        begin, positions, shares = _draw(offsets, offsets.diff(), FIRST, FIRST + 2, 2)
        begins.append(begin.item())
        count = 1 if begins[-1] == 10 else 2
        assert positions[:count].tolist() == [FIRST, FIRST + 1][:count]
        assert shares.tolist() == [1 / count, (count - 1) / 2]
    assert set(begins) == {10, 11 + FIRST} and abs(begins.count(10) - 20) < 12


@pytest.mark.bits
def test_torch_seeds_them():
    layer, x = layer_of(selector_queries=3), torch.randn(2, 120, 32)

    def loss(seed):
        torch.manual_seed(seed)
        layer(x)
        return nsa.selector_loss(layer).item()

    assert loss(1) == loss(1)
    assert len({loss(seed) for seed in range(5)}) == 5


def test_batch_and_pack_are_the_same(device):
    layer, x = layer_of(selector_queries=7), torch.randn(2, 110, 32)
    for seed in range(4):
        torch.manual_seed(seed)
        layer(x)
        batched = nsa.selector_loss(layer)
        torch.manual_seed(seed)
        layer(x.flatten(0, 1), torch.tensor([0, 110, 220], dtype=torch.int32), 110)
        torch.testing.assert_close(nsa.selector_loss(layer), batched)


def test_too_short_to_select(device):
    layer, x = layer_of(), torch.randn(3, FIRST, 32)
    layer(x)
    assert nsa.selector_loss(layer) == 0
    out = layer(x.flatten(0, 1), torch.tensor([0, 64, 128, 192], dtype=torch.int32))
    assert nsa.selector_loss(layer) == 0
    (out.sum() + nsa.selector_loss(layer)).backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    layer(torch.randn(0, 200, 32))
    assert nsa.selector_loss(layer) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype):
    layer, x = layer_of(spread=0.2), torch.randn(1, 100, 32)
    layer(x)
    exact = nsa.selector_loss(layer)
    q = layer._heads(layer.q_proj(x), 4)
    k = layer._branches(layer.k_proj, None, x)
    inputs, weights = (t.to(dtype) for t in (q, k["cmp"], k["slc"])), layer.phi_k(dtype)
    rope, compress = layer._tables(100, x.device), nsa.reference.compress
    found = sampled_divergence(*inputs, weights, CFG, rope, ALL, compress=compress)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact, rtol=0.05, atol=0)


@pytest.mark.bits
def test_autocast(device):
    layer, x = layer_of(spread=0.2), torch.randn(1, 100, 32)
    layer(x)
    exact = nsa.selector_loss(layer)
    with torch.autocast(device, torch.bfloat16):
        layer(x)
    assert nsa.selector_loss(layer).dtype == torch.float32
    torch.testing.assert_close(nsa.selector_loss(layer), exact, rtol=0.05, atol=0)
    q, k_c, k_slc = (torch.randn(n, heads, 16) for n, heads in ((3, 4), (18, 2), (77, 2)))
    arguments = q, k_c, k_slc, torch.tensor([64, 70, 76]), torch.ones(3) / 3, CFG, None
    with torch.autocast(device, torch.bfloat16):
        inside = divergence(*arguments)
    assert torch.equal(inside, divergence(*arguments))


@pytest.mark.bits
def test_sum_over_a_model():
    model = torch.nn.Sequential(layer_of(), torch.nn.Linear(32, 32), layer_of(selector_queries=0), layer_of())
    with pytest.raises(ValueError, match=r"^model: 0 has no selector loss: its last forward must be one in training"):
        nsa.selector_loss(model)
    x = torch.randn(1, 90, 32)
    model(x)
    assert nsa.selector_loss(model) == model[0].selector_loss + model[3].selector_loss > 0
    assert model[2].selector_loss is None
    copied = copy.deepcopy(model)
    assert copied[0].selector_loss is None and torch.equal(copied(x), model(x))
    with torch.no_grad():
        model[3](x)
    with pytest.raises(ValueError, match=r"^model: 3 has no selector loss"):
        nsa.selector_loss(model)
    model.eval()(x)
    with pytest.raises(ValueError, match=r"^model: 0 has no selector loss"):
        nsa.selector_loss(model)
    with pytest.raises(ValueError, match=r"^model: no NativeSparseAttention in it has selector_queries > 0"):
        nsa.selector_loss(layer_of(selector_queries=0))


def test_refused():
    message = "selector_queries = 5: must be 0 with share_kv and phi = mean"
    with pytest.raises(ValueError, match=message):
        layer_of(selector_queries=5, share_kv=True, phi="mean")
    with pytest.raises(ValueError, match=r"selector_queries = -1: must be >= 0"):
        layer_of(selector_queries=-1)
    layer = layer_of(selector_queries=0, share_kv=True, phi="mean")
    layer.selector_queries = 5
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(1, 90, 32))
    layer = layer_of(selector_queries=5)
    layer.context_parallel = object()
    with pytest.raises(ValueError, match="selector_queries = 5: must be 0 with context_parallel"):
        layer._check_selector_queries()


@pytest.mark.bits
def test_checkpointing():
    """The recomputation draws the same queries; one without gradients in forward is reported."""
    layer, x = layer_of(selector_queries=5), torch.randn(1, 110, 32, requires_grad=True)

    def gradients(run):
        torch.manual_seed(4)
        out = run()
        loss = nsa.selector_loss(layer)
        return torch.autograd.grad(out.square().sum() + loss, list(layer.parameters()))

    plain = gradients(lambda: layer(x))
    for a, b in zip(gradients(lambda: checkpoint(layer, x, use_reentrant=False)), plain, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        gradients(lambda: checkpoint(layer, x, use_reentrant=True))


def test_compiled_in_one_graph():
    layer, x = layer_of(selector_queries=ALL), torch.randn(1, 110, 32)

    def step(x):
        return layer(x).square().sum() + nsa.selector_loss(layer)

    wanted = torch.autograd.grad(step(x), list(layer.parameters()))
    found = torch.autograd.grad(torch.compile(step, backend="aot_eager", fullgraph=True)(x), list(layer.parameters()))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
