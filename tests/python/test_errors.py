"""Arguments that are refused: ValueError naming the argument, what came and what is allowed."""

import pytest
import torch

import nsa
from devices import head_dims, here, on_gpu
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
    assert "imposed" not in str(error.value)


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
        (torch.tensor([0, 20, 50]), "cu_seqlens: dtype Long"),
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
