"""The layer against the functional operations, its parameters and their initial values."""

import copy
import dataclasses
import math
import warnings

import pytest
import torch
from torch.nn.utils import parametrize, prune

import nsa
from devices import head_dims, on_gpu
from problem import SMALL

PHI = [f"{phi}.{name}" for phi in ("phi_k", "phi_v") for name in ("pe", "w1", "b1", "w2", "b2")]
GATE = ["gate.0.weight", "gate.0.bias", "gate.2.weight", "gate.2.bias"]


def layer_of(**options):
    options = {"hidden_size": 32, "num_heads": 6, "num_kv_heads": 2, "head_dim": 16} | options
    dims = head_dims(options["head_dim"], options.get("v_head_dim", options["head_dim"]))
    return nsa.NativeSparseAttention(**options | dict(zip(("head_dim", "v_head_dim"), dims, strict=True)))


def test_parameter_names():
    separate = [f"{x}_proj.{branch}.weight" for x in "kv" for branch in ("cmp", "slc", "swa")]
    names = [name for name, _ in layer_of(cfg=SMALL).named_parameters()]
    assert names == ["q_proj.weight", *separate, *PHI, *GATE, "o_proj.weight"]
    names = [name for name, _ in layer_of(cfg=SMALL, share_kv=True).named_parameters()]
    assert names == ["q_proj.weight", "k_proj.weight", "v_proj.weight", *PHI, *GATE, "o_proj.weight"]
    assert not any("phi" in n for n, _ in layer_of(cfg=SMALL, phi="mean").named_parameters())


def test_parameter_shapes():
    layer = layer_of(cfg=SMALL, v_head_dim=24, phi_per_kv_head=True)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes["q_proj.weight"] == (6 * 16, 32) and shapes["o_proj.weight"] == (32, 6 * 24)
    assert shapes["k_proj.slc.weight"] == (2 * 16, 32) and shapes["v_proj.slc.weight"] == (2 * 24, 32)
    assert shapes["phi_k.pe"] == (2, 8, 16) and shapes["phi_k.w1"] == (2, 8 * 16, 32)
    assert shapes["phi_v.w1"] == (2, 8 * 24, 48) and shapes["phi_v.w2"] == (2, 48, 24)
    assert shapes["gate.0.weight"] == (8, 32) and shapes["gate.2.weight"] == (18, 8)
    assert layer_of(cfg=SMALL).phi_k.w1.shape[0] == 1


@pytest.mark.parametrize("further", [0, 13])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_phi_starts_as_the_mean(backend, kind, further):
    hidden = 32 + (16 if on_gpu() and further else further)  # whole vectors of 16 bytes there
    weights = nsa.initial_compression_weights(kind, 8, 16, 2, hidden, torch.Generator().manual_seed(1))
    k = torch.randn(2, 40, 2, 16)
    mean = nsa.compress(k, nsa.CompressionWeights("mean"), SMALL)
    torch.testing.assert_close(nsa.compress(k, weights, SMALL), mean, rtol=1e-5, atol=1e-6)
    assert not any(t.any() for t in (weights.pe, weights.b1, weights.b2) if t is not None)


def test_further_hidden_units():
    weights = nsa.initial_compression_weights("mlp", 32, 64, 1, 1128, torch.Generator().manual_seed(1))
    units = weights.w1[..., 128:]
    assert abs(units.std().item() * (32 * 64) ** 0.5 - 1) < 0.01
    again = nsa.initial_compression_weights("mlp", 32, 64, 1, 1128, torch.Generator().manual_seed(1))
    assert torch.equal(weights.w1, again.w1)


def test_too_few_hidden_units_warn():
    with pytest.warns(UserWarning, match="Xavier weights, not as the mean: hidden = 31"):
        weights = nsa.initial_compression_weights("mlp", 8, 16, 1, 31)
    assert weights.w2.any()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"share_kv": True},
        {"phi_per_kv_head": True, "v_head_dim": 24},
        {"rope_theta": None},
        {"rope_theta": 50.0, "partial_rotary_factor": 0.7},
    ],
)
def test_layer_is_its_operations(backend, options):
    layer = layer_of(cfg=SMALL, **options)
    torch.nn.init.normal_(layer.gate[2].weight)
    x = torch.randn(2, 60, 32)

    def heads(linear, count):
        return linear(x).unflatten(-1, (count, -1))

    def of(projection, branch):
        return heads(projection if options.get("share_kv") else projection[branch], 2)

    def rotated_rows(t, positions):
        if layer.rope_theta is None:
            return t
        pairs = layer.head_dim // 2
        numbers = torch.arange(pairs, dtype=torch.float64)
        turning = numbers < math.floor(layer.partial_rotary_factor * pairs)
        angles = positions[:, None, None] * layer.rope_theta ** (-numbers / pairs) * turning
        half = torch.view_as_complex(torch.stack((t[..., :pairs], t[..., pairs:]), -1).double())
        out = torch.view_as_real(half * torch.polar(torch.ones_like(angles), angles))
        return torch.cat((out[..., 0], out[..., 1]), -1).float()

    rows = torch.arange(60)
    k_c = nsa.compress(of(layer.k_proj, "cmp"), layer.phi_k(torch.float32), SMALL)
    v_c = nsa.compress(of(layer.v_proj, "cmp"), layer.phi_v(torch.float32), SMALL)
    o, indices = nsa.nsa_attention(
        rotated_rows(heads(layer.q_proj, 6), rows),
        *(rotated_rows(of(layer.k_proj, "slc"), rows), of(layer.v_proj, "slc")),
        torch.sigmoid(layer.gate(x)).unflatten(-1, (6, 3)),
        k_c=rotated_rows(k_c, torch.arange(k_c.shape[1]) * 4),
        v_c=v_c,
        k_swa=rotated_rows(of(layer.k_proj, "swa"), rows),
        v_swa=of(layer.v_proj, "swa"),
        cfg=SMALL,
        return_indices=True,
    )
    found, found_indices = layer(x, return_indices=True)
    torch.testing.assert_close(found, layer.o_proj(o.flatten(-2)), rtol=1e-4, atol=1e-5)
    assert (found_indices == indices).all(-1).double().mean() > 0.99


def test_packed_equals_alone(backend):
    layer = layer_of(cfg=SMALL)
    x = torch.randn(100, 32)
    packed = layer(x, torch.tensor([0, 55, 55, 62, 100], dtype=torch.int32), 55)
    for begin, end in ((0, 55), (55, 62), (62, 100)):
        alone = layer(x[None, begin:end])[0]
        torch.testing.assert_close(packed[begin:end], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rotation", [{}, {"rope_theta": None}, {"rope": nsa.rotary_tables(torch.arange(0), 16)}])
def test_without_tokens(backend, rotation):
    """Batches, packs and a batch without rows: outputs of their shapes, and gradients that are zero."""
    layer = layer_of(cfg=SMALL, head_dim=head_dims(16, 16)[0], **({} if on_gpu() and "rope" in rotation else rotation))
    offsets = torch.tensor([0, 0, 0], dtype=torch.int32)
    for x, *given in ((torch.randn(2, 0, 32),), (torch.randn(0, 32), offsets), (torch.randn(0, 0, 32),)):
        layer.zero_grad()
        out, indices = layer(x.requires_grad_(), *given, return_indices=True)
        assert out.shape == x.shape and indices.shape == (*x.shape[:-1], 2, SMALL.topk)
        out.sum().backward()
        assert x.grad.shape == x.shape
        assert not any(p.grad.any() for p in layer.parameters() if p.grad is not None)


def test_rows_behind_sequences_without_tokens(backend):
    """They have the first position, also where max_seqlen = 0 gives none."""
    layer = layer_of(cfg=SMALL, head_dim=head_dims(16, 16)[0])
    x, offsets = torch.randn(20, 32), torch.tensor([0, 0, 0], dtype=torch.int32)
    assert not layer(x, offsets, max_seqlen=0).any()
    q, k, gates = (torch.randn(20, heads, n) for heads, n in ((4, 64), (2, 64), (4, 3)))
    none = nsa.rotary_tables(torch.arange(0), 64)
    for offsets_k in (None, offsets):
        packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets_k}
        with pytest.raises(ValueError, match=r"^rope: 0 positions: must be at least 1, "):  # on a GPU, too
            nsa.native_sparse_attention(q, k, k, gates, cfg=SMALL, rope=none, **packed)


@pytest.mark.bits
def test_the_future_changes_nothing(backend):
    layer = layer_of(cfg=SMALL)
    x = torch.randn(1, 60, 32)
    other = x.clone()
    other[:, 37:] = 100 * torch.randn(1, 23, 32)
    assert torch.equal(layer(x)[:, :37], layer(other)[:, :37])


@pytest.mark.bits
def test_noise_only_in_training(backend):
    layer = layer_of(cfg=SMALL, noise=3.0)
    x = torch.randn(1, 200, 32)
    indices = {seed: layer(x, seed=seed, return_indices=True)[1] for seed in (0, 1)}
    assert not torch.equal(indices[0], indices[1])
    assert torch.equal(indices[1], layer(x, seed=1, return_indices=True)[1])
    with pytest.raises(ValueError, match=r"^seed: None: must be given in training with noise"):
        layer(x)
    layer.eval()(x)
    quiet = layer(x, seed=1, return_indices=True)[1]
    layer.train().noise = 0.0
    assert torch.equal(quiet, layer(x, seed=7, return_indices=True)[1])


def test_every_parameter_learns(backend):
    layer = layer_of(cfg=SMALL)
    layer(torch.randn(1, 60, 32)).square().sum().backward()
    still = {"gate.0.weight", "gate.0.bias"}  # behind a weight that starts at zero
    for name, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all() and (parameter.grad.any() or name in still), name


def test_bfloat16_and_autocast(device):
    x = torch.randn(1, 60, 32)
    layer = layer_of(cfg=SMALL)
    exact = layer(x)
    with torch.autocast(device, torch.bfloat16):
        assert (layer(x).float() - exact).abs().max() < 0.05 * exact.abs().max()
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_kv_heads": 4}, "num_kv_heads = 4: must divide num_heads = 6"),
        ({"head_dim": 15}, "head_dim = 15: must be even"),
        ({"head_dim": 0}, "head_dim = 0: must be >= 1"),
        ({"phi": "max"}, "kind = 'max': must be mean, linear or mlp"),
        ({"phi_hidden": -1}, "phi_hidden = -1: must be >= 1, or 0 for 2 x head dim"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        layer_of(**options)


def test_arguments_that_do_not_go_together():
    layer = layer_of(cfg=SMALL)
    with pytest.raises(ValueError, match="cu_seqlens: must not be given with a cache"):
        layer(torch.randn(4, 32), torch.tensor([0, 4], dtype=torch.int32), cache=layer.make_cache(1, 8))
    with pytest.raises(ValueError, match="num_new: must be given with a cache only"):
        layer(torch.randn(1, 4, 32), num_new=torch.tensor([2], dtype=torch.int32))
    with pytest.raises(ValueError, match="max_seqlen = 4: must be given with cu_seqlens only"):
        layer(torch.randn(1, 4, 32), max_seqlen=4)
    other = layer_of(cfg=dataclasses.replace(SMALL, window_size=SMALL.window_size + 1))
    with pytest.raises(ValueError, match=r"^cache: of NSAConfig\(.*\): must be of the layer's NSAConfig\("):
        layer(torch.randn(1, 4, 32), cache=other.make_cache(1, 8))


def test_a_rotation_that_is_changed_changes_steps():
    torch.manual_seed(5)
    layer, x = layer_of(cfg=SMALL), torch.randn(1, 40, 32)
    with torch.no_grad():
        for rope_theta in (1e4, 50.0):
            layer.rope_theta = rope_theta
            cache = layer.make_cache(1, 40)
            torch.testing.assert_close(layer(x, cache=cache), layer(x), rtol=1e-4, atol=1e-4)


OPTIONS = {
    "biases": {"qkv_bias": True, "out_bias": True},
    "norms": {"qk_norm": True, "norm_eps": 1e-5},
    "shared, normed": {"qk_norm": True, "share_kv": True},
    "tables": {"rope": nsa.rotary_tables(torch.arange(80), 16, 50.0)},
    "a function": {"rope": lambda positions: nsa.rotary_tables(positions, 16, 50.0)},
    "partial": {"rope": lambda positions: nsa.rotary_tables(positions, 8, 50.0), "phi_per_kv_head": True},
    "partial, linear": {"rope": nsa.rotary_tables(torch.arange(80), 4, 50.0), "phi": "linear"},
    "mean": {"phi": "mean", "rope": nsa.rotary_tables(torch.arange(80), 4, 50.0)},
    "hidden": {"phi_hidden": 40},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(device, name):
    """Against the layer in plain torch: outputs and gradients, packed and with a cache."""
    if on_gpu() and "rope" in OPTIONS[name]:
        pytest.skip("a GPU's head dims have other tables")
    torch.manual_seed(3)
    layer = layer_of(cfg=SMALL, **OPTIONS[name])
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1 if on_gpu() else 0.3)  # heads are four times as wide there
    plain = nsa.reference.NativeSparseAttention(32, 6, 2, layer.head_dim, cfg=SMALL, **OPTIONS[name])
    plain.load_state_dict(layer.state_dict())
    x, lengths = torch.randn(1, 70, 32), torch.tensor([0, 40, 70], dtype=torch.int32)
    for arguments in ((x,), (x[0], lengths)):
        out, indices = layer(*arguments, return_indices=True)
        expected = plain(*arguments, indices=indices)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        d_out = torch.randn_like(out)
        names, parameters = zip(*layer.named_parameters(), strict=True)
        found = torch.autograd.grad(out, parameters, d_out)
        wanted = torch.autograd.grad(expected, list(plain.parameters()), d_out)
        for n, a, b in zip(names, found, wanted, strict=True):
            assert (a - b).abs().max() <= 1e-4 * max(1.0, b.abs().max()), n
    cache = layer.make_cache(1, 80)
    cache.reserve(70)
    with torch.no_grad():
        steps = torch.cat([layer(part, cache=cache) for part in x.split([33, 1, 16, 20], 1)], 1)
        torch.testing.assert_close(steps, layer(x), rtol=1e-4, atol=1e-4)


def test_tables_that_end_early():
    layer = layer_of(cfg=SMALL, rope=nsa.rotary_tables(torch.arange(30), 16))
    with pytest.raises(ValueError, match="rope: 30 positions: must be at least 31, the length of the keys"):
        layer(torch.randn(1, 31, 32))
    with pytest.raises(ValueError, match="rope: 30 positions"):
        layer(torch.randn(40, 32), torch.tensor([0, 31, 40], dtype=torch.int32))
    layer(torch.randn(60, 32), torch.tensor([0, 30, 60], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"rope: 30 positions: must be .* that cu_seqlens gives, at most max_seqlen"):
        layer_of(cfg=SMALL)(torch.randn(71, 32), torch.tensor([0, 31, 71], dtype=torch.int32), max_seqlen=30)
    with pytest.raises(
        ValueError, match="rope: 30 positions: must be at least 32, the cache's max_length rounded up to pages"
    ):
        layer(torch.randn(1, 1, 32), cache=layer.make_cache(1, 31))


@pytest.mark.parametrize("name", ["biases", "norms", "hidden", "partial"])
def test_from_the_meta_device(name):
    options = OPTIONS[name] | {"gate_bias": (-6.0, 4.0, -4.0), "seed": 5}
    torch.manual_seed(11)
    direct = layer_of(cfg=SMALL, **options)
    with torch.device("meta"):
        later = layer_of(cfg=SMALL, **options)
    assert all(p.is_meta for p in later.parameters())
    later.to_empty(device="cpu")
    for parameter in later.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    torch.manual_seed(11)
    later.reset_parameters()
    for (n, a), b in zip(direct.named_parameters(), later.parameters(), strict=True):
        assert torch.equal(a, b), n
    assert torch.equal(direct.gate[2].bias, torch.tensor([-6.0, 4.0, -4.0]).repeat(6))


def test_hooks_see_phi():
    layer, seen = layer_of(cfg=SMALL), []
    for phi in (layer.phi_k, layer.phi_v):
        phi.register_forward_hook(lambda module, arguments, out: seen.append((arguments, out.kind)))
    layer(torch.randn(1, 20, 32))
    assert seen == [((torch.float32,), "mlp")] * 2


def test_plain_torch_is_twice_differentiable():
    cfg = nsa.NSAConfig(4, 2, 16, 2, 0, 1, 5)
    q, k, v = (torch.randn(1, 9, h, 3, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1))
    gates = torch.rand(1, 9, 2, 3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradgradcheck(
        lambda *x: nsa.reference.native_sparse_attention(*x, cfg=cfg), (q, k, v, gates), fast_mode=True
    )


def test_parameter_groups():
    model = torch.nn.ModuleDict({"a": layer_of(cfg=SMALL, phi_hidden=200), "b": torch.nn.Linear(32, 32)})
    model["c"] = model["a"]  # used twice
    model["b"].bias.requires_grad_(False)
    groups = nsa.parameter_groups(model, 0.1, 0.01)
    of = {id(p): (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert len(of) == sum(len(g["params"]) for g in groups) == len(list(model.parameters())) - 1
    phi = model["a"].phi_k  # 8 * 16 = 128 inputs, then 200
    assert of[id(phi.w1)] == of[id(phi.pe)] == of[id(phi.b1)] == (0.1, 0.0)
    assert of[id(phi.w2)] == of[id(phi.b2)] == (0.1 * 128 / 200, 0.0)
    assert of[id(model["a"].q_proj.weight)] == of[id(model["b"].weight)] == (0.1, 0.01)
    assert of[id(model["a"].gate[0].bias)] == (0.1, 0.0)
    wide = nsa.parameter_groups(nsa.CompressionFunction("linear", 32, 64), 1.0)
    assert [(g["lr"], len(g["params"])) for g in wide] == [(128 / 2048, 3)]
    assert nsa.parameter_groups(layer_of(cfg=SMALL, phi="mean"), 1.0)[0]["lr"] == 1.0
    torch.optim.AdamW(groups).step()


def test_parameter_groups_of_changed_weights():
    layer = layer_of(cfg=nsa.NSAConfig(topk=4))
    prune.l1_unstructured(layer.phi_k, "w1", amount=0.5)
    parametrize.register_parametrization(layer.phi_v, "w2", torch.nn.Identity())
    groups = nsa.parameter_groups(layer, 0.1, 0.01)
    of = {id(p): (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert of[id(layer.phi_k.w1_orig)] == of[id(layer.phi_v.w1)] == (0.1 * 128 / (32 * 16), 0.0)
    assert of[id(layer.phi_v.parametrizations.w2.original)] == (0.1, 0.0)
    for parameter in layer.parameters():  # as ZeRO and FSDP with use_orig_params leave them between steps
        parameter.data = parameter.data.new_empty(0)
    groups = nsa.parameter_groups(layer, 0.1, 0.01)
    assert {id(p): (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]} == of
    flat = nsa.CompressionFunction("linear", 8, 16)
    flat.register_parameter("_flat_param", torch.nn.Parameter(torch.zeros(9)))
    with pytest.raises(ValueError, match=r"^model: parameters flattened by FSDP: must have use_orig_params=True$"):
        nsa.parameter_groups(torch.nn.ModuleList([layer, flat]), 0.1)
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]).step()  # no optimizer fails on another's model


def test_an_optimizer_that_trains_phi_too_fast_warns_once():
    def step(groups, kind=torch.optim.AdamW, **options):
        optimizer = kind(groups, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                optimizer.step()
        return [str(one.message) for one in caught if "phi" in str(one.message)]

    layer = copy.deepcopy(layer_of(cfg=nsa.NSAConfig(topk=4)))  # a copy is known, too
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    (message,) = step(layer.parameters(), lr=0.1, weight_decay=0.0)
    assert message.startswith("phi has lr = 0.1 and weight_decay = 0 in the optimizer: must be at most 0.025 and 0.")
    (message,) = step([{**group, "weight_decay": 0.1} for group in nsa.parameter_groups(layer, 0.1)])
    assert "weight_decay = 0.1" in message
    assert not step(nsa.parameter_groups(layer, 0.1, 0.1))
    assert not step(layer.parameters(), torch.optim.SGD, lr=0.1)
    others = [p for n, p in layer.named_parameters() if not n.startswith("phi_")]
    assert not step(others, lr=0.1)
    layer.phi_k.requires_grad_(False)
    layer.phi_v.requires_grad_(False)
    assert not step(layer.parameters(), lr=0.1)


class Packed(torch.nn.Module):
    """A projection whose weights are packed four bits each, as of bitsandbytes: uint8 (N, 1)."""

    def __init__(self, linear):
        super().__init__()
        self.scale = linear.weight.detach().abs().max() / 7
        codes = (linear.weight.detach() / self.scale).round().to(torch.int8) + 8
        low, high = codes.to(torch.uint8).view(-1, 2).unbind(1)
        self.weight = torch.nn.Parameter((low | high << 4)[:, None], requires_grad=False)
        self.shape, self.bias = linear.weight.shape, linear.bias

    def forward(self, x):
        codes = torch.cat((self.weight & 15, self.weight >> 4), 1).view(self.shape)
        return torch.nn.functional.linear(x, ((codes.float() - 8) * self.scale).to(x.dtype), self.bias)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
@pytest.mark.parametrize("kind", ["int8", "packed"])
@pytest.mark.parametrize("share_kv", [False, True])
def test_quantized_projections(kind, share_kv):
    layer = layer_of(cfg=SMALL, share_kv=share_kv, phi="mean")  # all that is not a Linear may have no parameters
    if kind == "int8":
        layer = torch.ao.quantization.quantize_dynamic(layer, {torch.nn.Linear}, torch.qint8)
    else:
        for parent in [m for m in layer.modules() if not isinstance(m, torch.nn.Linear)]:
            for name, child in list(parent.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(parent, name, Packed(child))
    x = torch.randn(2, 60, 32)
    with torch.no_grad():
        expected = layer(x)
        cache = layer.make_cache(2, 60)
        assert cache.k_slc.dtype == torch.float32
        given = torch.cat([layer(part, cache=cache) for part in x.split((40, 12, 8), 1)], 1)
        wrong = 0.05 * expected.abs().max() if kind == "int8" else 1e-5  # the range of int8 is that of a call
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=float(wrong))
        with pytest.raises(ValueError, match=r"^x: dtype int64: must be floating-point$"):
            layer(x.long())
        with pytest.raises(ValueError, match=r"^x: \(2, 60, 31\): expected the shape \(B, S, hidden_size = 32\)$"):
            layer(x[..., :31])
    if kind != "int8":
        assert layer.bfloat16().make_cache(1, 8).k_slc.dtype == torch.bfloat16
