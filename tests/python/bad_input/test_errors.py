"""Arguments that are refused: ValueError naming the argument, what came and what is allowed."""

import dataclasses

import pytest
import torch

import nsa
from devices import head_dims, here, on_gpu
from nsa._registration import call
from problem import SMALL

B, S, H, HKV = 2, 50, 4, 2
MEAN = nsa.CompressionWeights("mean")


def good():
    """A valid call of nsa_attention by the names of its arguments."""
    n, (dk, dv) = SMALL.num_compressed(S), head_dims(16, 24)
    return {
        "q": torch.randn(B, S, H, dk),
        "k_c": torch.randn(B, n, HKV, dk),
        "v_c": torch.randn(B, n, HKV, dv),
        "k": torch.randn(B, S, HKV, dk),
        "v": torch.randn(B, S, HKV, dv),
        "k_swa": torch.randn(B, S, HKV, dk),
        "v_swa": torch.randn(B, S, HKV, dv),
        "gates": torch.rand(B, S, H, 3),
        "cfg": SMALL,
    }


CHANGES = {
    "another dtype": lambda t: t.bfloat16(),
    "an unknown dtype": lambda t: t.to(torch.int64),
    "a dimension less": lambda t: t[0],
    "a dimension more": lambda t: t[None],
    "a batch less": lambda t: t[:1],
    "a token less": lambda t: t[:, :-1],
    "a channel less": lambda t: t[..., :-1],
    "no contiguous channel": lambda t: t.transpose(1, 3).contiguous().transpose(1, 3),
}


# The first tensor to use a size sets it; the next one that differs is named.
NAMED = {("k", "a token less"): "v", ("v", "a channel less"): "v_swa"}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", [n for n in good() if n not in ("q", "cfg")])
def test_nsa_attention(backend, name, change):
    arguments = good()
    arguments[name] = CHANGES[change](arguments[name])
    with pytest.raises(ValueError, match=f"^(nsa_attention: )?{NAMED.get((name, change), name)}: "):
        nsa.nsa_attention(**arguments)


def good_layer():
    """A valid call of native_sparse_attention."""
    arguments = good()
    arguments |= {"k_slc": torch.randn_like(arguments["k"]), "v_slc": torch.randn_like(arguments["v"])}
    del arguments["k_c"], arguments["v_c"]
    half = arguments["q"].shape[-1] // 2
    return {**arguments, "weights_k": MEAN, "weights_v": MEAN, "rope": (torch.ones(S, half), torch.zeros(S, half))}


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["k", "v", "k_swa", "gates"])
def test_native_sparse_attention(backend, name, change, rope):
    arguments = good_layer()
    arguments[name] = CHANGES[change](arguments[name])
    if not rope:
        del arguments["rope"]
    if rope and (name, change) == ("k_swa", "no contiguous channel"):
        nsa.native_sparse_attention(**arguments)  # its rotated copy is contiguous
        return
    with pytest.raises(ValueError, match=f"^(native_sparse_attention: )?{name}: "):
        nsa.native_sparse_attention(**arguments)


def test_a_tensor_for_several_branches_has_the_name_it_was_given(backend):
    arguments = good_layer()
    for name in ("k_slc", "k_swa", "v_slc", "v_swa"):
        del arguments[name]
    for name in ("k", "v"):
        for change in CHANGES:
            if (name, change) == ("v", "a channel less"):
                continue  # a head dim like any other
            wrong = arguments | {name: CHANGES[change](arguments[name]), "rope": None}
            with pytest.raises(ValueError, match=r"^(native_sparse_attention: )?[kv]: "):
                nsa.native_sparse_attention(**wrong)
    blocks = torch.zeros(B, S, HKV, SMALL.topk + 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"indices: int32 .*expected the shape") as error:
        nsa.native_sparse_attention(**arguments, indices=blocks)
    assert "block_indices" not in str(error.value)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weights_k": nsa.CompressionWeights("linear")}, "weights_k.w1: not given"),
        ({"weights_v": nsa.CompressionWeights("max")}, "weights.kind = 'max'"),
        ({"rope": lambda half: (torch.ones(S, half + 1),) * 2}, "rope_cos: .*expected the shape"),
        ({"rope": (torch.ones(S, 1),)}, "rope: 1 tensors: must be cosines and sines"),
        (
            {"rope": lambda half: (torch.ones(40, half), torch.ones(40, half))},
            "rope: 40 positions: must be at least 50",
        ),
        ({"rope": lambda half: (torch.ones(S, half).double(), torch.ones(S, half))}, "rope_cos: .*expected float32"),
        ({"cfg": SMALL, "noise": -1.0}, "noise = -1"),
    ],
)
def test_settings_of_the_layer(backend, change, message):
    arguments = good_layer()
    for name, value in change.items():
        value = value(arguments["q"].shape[-1] // 2) if callable(value) else value
        arguments[name] = tuple(t if t is None else here(t) for t in value) if name == "rope" else value
    with pytest.raises(ValueError, match=message):
        nsa.native_sparse_attention(**arguments)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"softmax_scale": float("nan")}, "softmax_scale = nan"),
        ({"noise": -1.0}, "noise = -1"),
        ({"seed": -1}, "seed = -1: must be in 0"),
        ({"seed": 2**64}, "seed = .*: must be in 0"),
        ({"max_seqlen_q": -1}, "max_seqlen_q = -1"),
        ({"cu_seqlens_q": torch.tensor([0, S], dtype=torch.int32)}, "q: .*expected"),
    ],
)
def test_settings(backend, change, message):
    with pytest.raises(ValueError, match=message):
        nsa.nsa_attention(**good(), **change)


@pytest.mark.parametrize(
    "cu_seqlens, message",
    [
        (torch.tensor([0, 20, 50]), r"^cu_seqlens: int64 \(3,\): expected int32"),
        (torch.tensor([1, 20, 50], dtype=torch.int32), "cu_seqlens"),
        (torch.tensor([0, 30, 20], dtype=torch.int32), "cu_seqlens"),
        (torch.tensor([0, 20, 51], dtype=torch.int32), "cu_seqlens"),
        (torch.tensor([[0, 20]], dtype=torch.int32), "cu_seqlens"),
    ],
)
def test_cu_seqlens(backend, monkeypatch, cu_seqlens, message):
    if on_gpu():
        monkeypatch.setenv("NSA_VALIDATE", "1")  # read what lies on the device
    with pytest.raises(ValueError, match=message):
        nsa.compress(torch.randn(50, 2, 16), MEAN, SMALL, here(cu_seqlens))


def test_more_queries_than_keys(backend):
    with pytest.raises(ValueError, match="Sq"):
        nsa.sliding_window_attention(torch.randn(1, 9, 2, 8), torch.randn(1, 8, 2, 8), torch.randn(1, 8, 2, 8), 4)


@pytest.mark.parametrize(
    "weights, message",
    [
        (nsa.CompressionWeights("max"), "weights.kind = 'max': must be mean, linear or mlp"),
        (nsa.CompressionWeights("mean", pe=torch.zeros(1, 8, 16)), "pe"),
        (nsa.CompressionWeights("linear"), "w1"),
        (nsa.CompressionWeights("linear", w1=torch.zeros(1, 128, 15)), "w1"),
        (nsa.CompressionWeights("linear", w1=torch.zeros(3, 128, 16)), "w1"),
        (nsa.CompressionWeights("linear", w1=torch.zeros(1, 128, 16).bfloat16()), "w1"),
        (nsa.CompressionWeights("mlp", w1=torch.zeros(1, 128, 5), b1=torch.zeros(1, 5)), "w2"),
        (nsa.CompressionWeights("mlp", w1=torch.zeros(1, 128, 5), w2=torch.zeros(1, 6, 16)), "w2"),
    ],
)
def test_weights(backend, weights, message):
    with pytest.raises(ValueError, match=message):
        nsa.compress(torch.randn(1, 50, 2, 16), weights.to(torch.get_default_device()), SMALL)


def test_seqlen_k(backend):
    q, k_c = torch.randn(1, 5, 2, 16), torch.randn(1, 4, 1, 16)
    with pytest.raises(ValueError, match="seqlen_k"):
        nsa.compressed_attention(q, k_c, k_c, SMALL, seqlen_k=19)


@pytest.mark.parametrize("block_size", [0, -16, 24])
def test_block_size(backend, block_size):
    x = torch.randn(1, 5, 1, 16)
    with pytest.raises(ValueError, match=f"block_size = {block_size}: must be a positive multiple of 16"):
        nsa.selected_attention(x, x, x, torch.zeros(1, 5, 1, 2, dtype=torch.int32), block_size)


def test_window_size(backend):
    x = torch.randn(1, 5, 1, 16)
    with pytest.raises(ValueError, match="window_size = 0"):
        nsa.sliding_window_attention(x, x, x, 0)


def test_unknown_backend(monkeypatch):
    monkeypatch.setenv("NSA_BACKEND", "gpu")
    x = torch.randn(1, 5, 1, 16)
    with pytest.raises(ValueError, match="NSA_BACKEND = 'gpu': must be auto, cpu, cuda or reference"):
        nsa.sliding_window_attention(x, x, x, 4)


def test_what_a_backend_cannot_do_is_not_implemented(monkeypatch):
    monkeypatch.setenv("NSA_BACKEND", "cpu")
    x = torch.randn(1, 5, 1, 16, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"^sliding_window_attention: backend cpu: .*float64"):
        nsa.sliding_window_attention(x, x, x, 4)


# -------------------------------------------------------------------------------------------- what test_fuzz.py found


X, TABLE = torch.ones(1, 20, 2, 16), torch.ones(20, 8)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": X.int()}, r"x: dtype int32: must be float32, bfloat16, float16 or float64"),
        ({"cos": TABLE.to(torch.float8_e5m2)}, r"cos: dtype float8_e5m2: must be float32"),
        ({"sin": TABLE.to("meta")}, r"sin: on meta: expected cpu as x"),
        ({"x": X[0, 0]}, r"x: 2 dimensions: must be \(\.\.\., S, heads, D\)"),
        ({"sin": TABLE[:, :4]}, r"sin: \(20, 4\): must be \(20, 8\) as cos"),
        ({"cos": TABLE[:19], "sin": TABLE[:19]}, r"cos: \(19, 8\): .*broadcast to \(1, 20\)"),
        ({"x": X[..., :8]}, r"cos: \(20, 8\): .*R <= 8"),
        ({"cos": TABLE[None, None], "sin": TABLE[None, None]}, r"cos: \(1, 1, 20, 8\): must be"),
    ],
)
def test_rotate(change, message):
    assert nsa.rotate(X, TABLE, TABLE).shape == X.shape
    with pytest.raises(ValueError, match=f"^{message}"):
        nsa.rotate(**({"x": X, "cos": TABLE, "sin": TABLE} | change))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"positions": torch.ones(3, dtype=torch.bool)}, "positions: dtype bool: must be"),
        ({"head_dim": 2**31}, "head_dim = 2147483648: must be even and 2"),
        ({"theta": 10**400}, "theta = 1.*: must be positive and finite"),
    ],
)
def test_rotary_tables(change, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        nsa.rotary_tables(**({"positions": torch.arange(3), "head_dim": 8} | change))


def test_a_storage_that_is_too_small_for_torch():
    x = X.clone()
    x.untyped_storage().resize_(64)
    with pytest.raises(ValueError, match=r"^x: float32 \(1, 20, 2, 16\): needs 2560 bytes of its storage's 64$"):
        nsa.rotate(x, TABLE, TABLE)


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_memory_between_two_elements(shift):
    x, memory = torch.randn(1, 5, 1, 16), torch.zeros(400, dtype=torch.uint8)
    v = torch.frombuffer(memory.numpy(), dtype=torch.float32, count=80, offset=shift).view(x.shape)
    with pytest.raises(ValueError, match=r"v: float32 \(1, 5, 1, 16\): begins at an address that is no multiple of 4$"):
        nsa.sliding_window_attention(x, x, v, 4)


@pytest.mark.bits
def test_integers_above_64_bits():
    x = torch.randn(1, 5, 1, 16)
    with pytest.raises(ValueError, match=r"^max_seqlen_k = 1.*: must be 0 \.\.\. 2\^63 - 1"):
        nsa.sliding_window_attention(x, x, x, 4, max_seqlen_k=10**30, cu_seqlens_q=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match=r"^window_size = 1.*: must fit into 64 bits"):
        nsa.sliding_window_attention(x, x, x, 10**30)
    gates = torch.rand(1, 5, 1, 3)
    first = nsa.native_sparse_attention(x, x, x, gates, seed=torch.tensor(3), noise=0.5)
    assert torch.equal(first, nsa.native_sparse_attention(x, x, x, gates, seed=3, noise=0.5))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_of_rotated_queries(rank):
    q, x, rope = torch.ones((3,) * rank), torch.randn(1, 5, 1, 16), (torch.ones(64, 8), torch.ones(64, 8))
    cache = nsa.KVCache(1, 1, 16, cfg=SMALL, max_length=64)
    with pytest.raises(ValueError, match=r"^(native_sparse_attention: )?q: "):
        nsa.native_sparse_attention(q, x, x, torch.rand(1, 5, 1, 3), cfg=SMALL, rope=rope)
    with pytest.raises(ValueError, match=r"^(decode: )?q: "):
        nsa.decode(q, x, x, torch.rand(1, 5, 1, 3), cache, rope=rope)


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.uint4, torch.complex64, torch.bool])
def test_dtypes_that_only_torch_knows(dtype):
    x = torch.randn(1, 5, 1, 16)
    wrong = torch.empty(1, 5, 1, 16, dtype=torch.uint8).view(dtype) if dtype.itemsize == 1 else x.to(dtype)
    with pytest.raises(ValueError, match=r"^v: dtype .*: must be float32, bfloat16, float16 or float64"):
        nsa.sliding_window_attention(x, x, wrong, 4)


def test_dtype_of_a_layers_input():
    layer = nsa.NativeSparseAttention(32, 2, 1, 16, cfg=SMALL)
    with pytest.raises(ValueError, match=r"^x: dtype bfloat16: must be float32 as q_proj.weight"):
        layer(torch.randn(1, 5, 32).bfloat16())
    with torch.autocast("cpu"):
        assert layer(torch.randn(1, 5, 32).bfloat16()).shape == (1, 5, 32)
        with pytest.raises(ValueError, match=r"^x: dtype int64: must be"):
            layer(torch.ones(1, 5, 32, dtype=torch.int64))


def step(cache):
    x = torch.randn(1, 2, 1, 16)
    return nsa.decode(x, x, x, torch.rand(1, 2, 1, 3), cache)


@pytest.mark.parametrize("name", ["k_slc", "v_swa_ring"])
def test_a_cache_of_negative_views(name):
    cache = nsa.KVCache(1, 1, 16, cfg=SMALL, max_length=64)
    setattr(cache, name, torch._neg_view(getattr(cache, name)))
    with pytest.raises(ValueError, match=rf"^(cache_)?{name}: a negative or conjugate view: must not be one$"):
        step(cache)
    assert not cache.cache_seqlens.any()


@pytest.mark.bits
def test_queries_that_are_negative_views():
    x, gates = torch.randn(1, 2, 1, 16), torch.rand(1, 2, 1, 3)
    results = []
    for q in (-x, torch._neg_view(x)):
        results.append(nsa.decode(q, x, x, gates, nsa.KVCache(1, 1, 16, cfg=SMALL, max_length=64)))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "name, value, error, message",
    [
        ("k_c", None, TypeError, r"cache\.k_c: NoneType: must be a dense tensor"),
        ("cache_seqlens", 3, TypeError, r"cache\.cache_seqlens: int: must be a dense tensor"),
        ("cache_seqlens", torch.zeros(1), ValueError, r"(decode: )?(cache\.)?cache_seqlens: .*int32"),
    ],
)
def test_a_cache_whose_members_were_replaced(name, value, error, message):
    cache = nsa.KVCache(1, 1, 16, cfg=SMALL, max_length=64)
    setattr(cache, name, value)
    with pytest.raises(error, match=f"^{message}"):
        step(cache)


HYPERPARAMETERS = [
    ({"kernel_size": 0}, "kernel_size = 0: must be >= 1"),
    ({"kernel_stride": 0}, "kernel_stride = 0: must be >= 1"),
    ({"block_size": 0}, "block_size = 0: must be a positive multiple of 16"),
    ({"block_size": 40}, "block_size = 40: must be a positive multiple of 16"),
    ({"kernel_size": 24}, "kernel_stride = 16: must be a divisor of kernel_size = 24"),
    ({"kernel_size": 96, "kernel_stride": 48}, "kernel_stride = 48: must be a divisor of block_size = 64"),
    ({"init_blocks": -1}, "init_blocks = -1: must be >= 0"),
    ({"local_blocks": 0}, "local_blocks = 0: must be >= 1"),
    ({"window_size": 0}, "window_size = 0: must be >= 1"),
    ({"topk": 0}, "topk = 0: must be >= 1"),
    ({"topk": 2}, "topk = 2: must be >= init_blocks + local_blocks = 1 + 2"),
]


@pytest.mark.parametrize("change, message", HYPERPARAMETERS)
def test_hyperparameters(change, message):
    with pytest.raises(ValueError) as error:
        nsa.NSAConfig(**change)
    assert str(error.value) == message


@pytest.mark.parametrize("change, message", HYPERPARAMETERS)
def test_messages_of_hyperparameters_are_the_librarys(change, message):
    """The operators validate too, so that a list of numbers from elsewhere is no way around the rules."""
    values = dataclasses.asdict(nsa.NSAConfig()) | change
    weights = nsa.CompressionWeights("mean").as_arguments()
    with pytest.raises(ValueError) as error:
        call(torch.ops.nsa.compress, torch.zeros(1, 8, 1, 8), *weights, list(values.values()), None)
    assert str(error.value) == message


@pytest.mark.parametrize("value", [1.5, "32", None, True, 2**31])
def test_hyperparameters_are_integers(value):
    with pytest.raises(ValueError, match=r"window_size = .*: must be an integer"):
        nsa.NSAConfig(window_size=value)


def test_a_configuration_is_frozen_and_equal():
    assert nsa.NSAConfig() == nsa.NSAConfig(32, 16, 64, 16, 1, 2, 512)
    with pytest.raises(dataclasses.FrozenInstanceError):
        nsa.NSAConfig().topk = 3


def test_num_compressed():
    cfg = nsa.NSAConfig()
    assert [cfg.num_compressed(n) for n in (0, 31, 32, 47, 48, 64)] == [0, 0, 1, 1, 2, 3]
