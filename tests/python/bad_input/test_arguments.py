"""Arguments of a wrong kind: what is no tensor, tensors of several devices, numbers that are none, in any mixture."""

import inspect
import math
import re

import numpy as np
import pytest
import torch

import nsa
from problem import SMALL
from valid_calls import ADVERSARIAL, HKV, WEIGHTS, D, H, S, calls, make_cache, tensors_of, with_another

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

NAMES = list(calls())
OPTIONAL = ("cu_seqlens", "num_new", "rope", "indices", "k_slc", "v_slc", "k_swa", "v_swa", "slot_mapping", "overflow")
OPTIONAL += ("block_table_swa", "block_table_cmp")
# What the window and compression can do without, if all of it is missing.
MISSING = {("serving.decode_paged", f"layer.{ring}") for ring in ("k_swa_ring", "v_swa_ring", "v_cmp_ring")}
NO_TENSORS = {"list": [1.0], "array": np.zeros(3), "str": "x", "None": None, "number": 1.5, "module": torch.nn.ReLU()}


@pytest.mark.parametrize("name", NAMES)
def test_good_calls(name):
    function, arguments = calls()[name]
    function(**arguments)


@pytest.mark.parametrize("kind", NO_TENSORS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_tensor(name, kind):
    function, arguments = calls()[name]
    for argument, _ in tensors_of(arguments):
        optional = kind == "None" and (argument.startswith(OPTIONAL) or "Weights" in name)
        optional |= kind == "None" and (name, argument) in MISSING
        required = {("compressed_cu_seqlens", "cu_seqlens"), ("selected_attention", "indices")}
        if optional and (name, argument) not in required:
            continue
        what = type(NO_TENSORS[kind]).__name__
        with pytest.raises(TypeError) as error:
            function(**with_another(arguments, argument, NO_TENSORS[kind]))
        names = argument, argument.partition(".")[2]  # KVCache.from_tensors names the member alone
        assert str(error.value).startswith(tuple(f"{n}: {what}: must be a dense tensor" for n in names)), error.value


@pytest.mark.parametrize("wrong", [None, [1], "x", 3, torch.zeros(3), torch.nn.Linear(1, 1)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_configuration_no_weights_no_cache(name, wrong):
    function, arguments = calls()[name]
    signature = inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
    for argument, kind in (("cfg", "NSAConfig"), ("weights", "CompressionWeights"), ("cache", "KVCache")):
        for taken in (a for a in arguments if a.startswith(argument)):
            if wrong is None and signature.parameters[taken].default is None:
                continue
            with pytest.raises(TypeError, match=rf"^{taken}: {type(wrong).__name__}: must be nsa\.{kind}"):
                function(**(arguments | {taken: wrong}))


LAYOUTS = {
    "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor([t[0]]),
    "jagged": lambda t: torch.nested.nested_tensor([t[0]], layout=torch.jagged),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["compress", "sliding_window_attention", "nsa_attention", "combine", "decode"])
def test_tensors_without_strides(name, layout):
    function, arguments = calls()[name]
    for argument, given in tensors_of(arguments):
        if layout == "nested" and given.dim() < 2:
            continue
        with pytest.raises(TypeError, match=r"must be a dense tensor") as error:
            wrong = LAYOUTS[layout](given if given.dim() > 1 else given[None])
            function(**with_another(arguments, argument, wrong))
        assert str(error.value).startswith(f"{argument}: ")


OPERATIONS = [name for name in NAMES if name in vars(nsa) or "layer" in name]


@pytest.mark.parametrize("name", OPERATIONS)
def test_one_on_meta(name):
    """Torch would take the fake kernel, whose result is uninitialized memory."""
    function, arguments = calls()[name]
    for argument, tensor in tensors_of(arguments):
        if name in ("compressed_cu_seqlens", "rotary_tables", "CompressionWeights"):
            continue  # it is the only one
        with pytest.raises((ValueError, RuntimeError), match=r"meta"):
            function(**with_another(arguments, argument, tensor.to("meta")))
    for weights in (a for a in arguments if a.startswith("weights")):
        for member in ("pe", "w1", "b1", "w2", "b2"):
            forgotten = nsa.CompressionWeights(**(vars(WEIGHTS) | {member: getattr(WEIGHTS, member).to("meta")}))
            with pytest.raises(ValueError, match=rf"{member}(_k|_v)?: on meta: expected cpu as "):
                function(**(arguments | {weights: forgotten}))


def test_one_on_meta_in_a_backward():
    q = torch.randn(1, S, H, D, requires_grad=True)
    o, _ = nsa.sliding_window_attention(q, q[:, :, :1], q[:, :, :1], 5)
    saved = torch.ops.nsa.sliding_window_attention_backward
    x, lse = q.detach(), torch.zeros(1, H, S)
    with pytest.raises(ValueError, match=r"^lse: on meta: expected cpu as d_o$"):
        saved(o.detach(), x, x[:, :, :1], x[:, :, :1], x, lse.to("meta"), 5, None, None, None, 0, 0, [True] * 3)


def test_all_on_meta():
    q, k = torch.empty(1, S, H, D, device="meta"), torch.empty(1, S, HKV, D, device="meta")
    gates = torch.empty(1, S, H, 3, device="meta")
    weights = WEIGHTS.to("meta")
    o = nsa.native_sparse_attention(q, k, k, gates, weights_k=weights, weights_v=weights, cfg=SMALL)
    assert o.device.type == "meta" and o.shape == q.shape
    layer = nsa.NativeSparseAttention(32, H, HKV, D, cfg=SMALL).to("meta")
    assert layer(torch.empty(1, S, 32, device="meta")).shape == (1, S, 32)
    with pytest.raises(ValueError, match=r"q_proj.weight: on meta: expected cpu as x"):
        layer(torch.empty(1, S, 32))


def test_a_storage_that_is_too_small():
    x = torch.randn(1, S, 1, D)
    small = x.clone()
    for size in (64, 0):
        small.untyped_storage().resize_(size)
        with pytest.raises(ValueError, match=rf"^v: float32 \(1, 20, 1, 16\): needs 1280 bytes .* {size}$"):
            nsa.sliding_window_attention(x, x, small, 4)


@pytest.mark.parametrize("rank", range(7))
def test_ranks(rank):
    x = torch.randn(1, S, 1, D)
    wrong = torch.zeros((2,) * rank)
    for name in ("q", "k", "v"):
        named = "[qkv]" if rank == 4 else "[qk]" if name == "q" else name
        with pytest.raises(ValueError, match=rf"^(sliding_window_attention: )?{named}: "):
            nsa.sliding_window_attention(**({"q": x, "k": x, "v": x} | {name: wrong}), window_size=4)


def test_sizes_of_32_bits():
    x = torch.zeros(1, 1, 1, D)
    wide = x.expand(1, 2**31, 1, D)
    with pytest.raises(ValueError, match=r"^q: \(1, 2147483648, 1, 16\): sizes must be below 2\^31"):
        nsa.sliding_window_attention(wide, x, x, 4)
    huge = x.expand(1, 2**31 - 1, 1, D).expand(2**20, 2**31 - 1, 1, D)
    with pytest.raises(RuntimeError, match=r"out of memory"):
        nsa.sliding_window_attention(huge, huge, huge, 4)


def test_offsets_of_another_dtype_are_named():
    with pytest.raises(ValueError, match=r"^cu_seqlens: int64 \(2,\): expected int32 \(B \+ 1\)$"):
        nsa.compressed_cu_seqlens(torch.tensor([0, 9]), SMALL)
    with pytest.raises(ValueError, match=r"^cu_seqlens: int32 \(\): expected int32 \(B \+ 1\)$"):
        nsa.compressed_cu_seqlens(torch.tensor(9, dtype=torch.int32), SMALL)


@pytest.mark.parametrize(
    "bounds, named",
    [([10, 10.5], r"upper_bound\[1\]: float"), (10.5, "upper_bound: float"), (None, "upper_bound: NoneType")],
)
def test_reserve_refuses_before_it_takes(bounds, named):
    cache = make_cache(2, page_size=16)
    with pytest.raises(TypeError, match=named):
        cache.reserve(bounds)
    assert cache.free_pages == 8 and (cache.block_table == -1).all()
    cache.reserve(torch.tensor([3, 17]))
    cache.reserve(np.int64(20))
    assert cache.free_pages == 4


def test_sizes_of_a_cache():
    for name in ("batch_size", "num_kv_heads", "head_dim", "max_length", "num_pages", "page_size"):
        sizes = {"batch_size": 1, "num_kv_heads": 1, "head_dim": 8, "max_length": 64, "page_size": 16} | {name: 2**31}
        with pytest.raises(ValueError, match=rf"^{name} = 2147483648: must be "):
            nsa.KVCache(**sizes, cfg=SMALL)


@pytest.mark.parametrize("theta", [0, -1.0, math.nan, math.inf])
def test_base_of_the_rotation(theta):
    with pytest.raises(ValueError, match=r"^rope_theta = .*: must be positive and finite"):
        nsa.NativeSparseAttention(32, 2, 1, 8, rope_theta=theta)
    with pytest.raises(ValueError, match=r"^theta = .*: must be positive and finite"):
        nsa.rotary_tables(torch.arange(3), 8, theta)


@pytest.mark.parametrize("share", [-0.1, 1.5, math.nan])
def test_share_of_the_rotation(share):
    for call in (
        lambda: nsa.NativeSparseAttention(32, 2, 1, 8, partial_rotary_factor=share),
        lambda: nsa.rotary_tables(torch.arange(3), 8, partial_rotary_factor=share),
    ):
        with pytest.raises(ValueError, match=r"^partial_rotary_factor = .*: must be 0 \.\.\. 1"):
            call()


def test_tables_that_are_no_matrices():
    x, gates = torch.randn(S, 1, D), torch.rand(S, 1, 3)
    offsets = torch.tensor([0, 8, S], dtype=torch.int32)
    for rope in (torch.tensor([True, False]), (torch.zeros(3),) * 2):
        with pytest.raises(ValueError, match=r"^rope\[0\]: [01] dimensions: must be \(positions, channels / 2\)"):
            nsa.native_sparse_attention(x, x, x, gates, cfg=SMALL, rope=rope, cu_seqlens_q=offsets)


@pytest.mark.bits
def test_numbers_are_not_cut():
    x = torch.randn(1, S, 1, D)
    for wrong in (4.5, torch.tensor(4.5), np.float32(4), "4", None, 4j):
        with pytest.raises(TypeError, match=r"^window_size: .*: must be an integer"):
            nsa.sliding_window_attention(x, x, x, wrong)
    expected, _ = nsa.sliding_window_attention(x, x, x, 4)
    for whole in (np.int64(4), torch.tensor(4)):
        assert torch.equal(nsa.sliding_window_attention(x, x, x, whole)[0], expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_numbers_may_be_tensors_of_any_integer_type(dtype):
    """As trainers have the longest sequence of a pack."""
    x, gates = torch.randn(S, 1, D), torch.rand(S, 1, 3)
    packed = {"cfg": SMALL, "cu_seqlens_q": torch.tensor([0, 8, S], dtype=torch.int32)}
    longest = torch.tensor(S - 8, dtype=dtype)
    for bound in ({"max_seqlen_q": longest}, {"max_seqlen_q": longest, "max_seqlen_k": longest}):
        nsa.native_sparse_attention(x, x, x, gates, **packed, **bound)
    layer = nsa.NativeSparseAttention(8, 1, 1, D, cfg=SMALL)
    layer(torch.randn(S, 8), packed["cu_seqlens_q"], longest)
    nsa.sliding_window_attention(x[None], x[None], x[None], torch.tensor(4, dtype=dtype))
    with pytest.raises(TypeError, match=r"^max_seqlen: Tensor: must be an integer or None"):
        layer(torch.randn(S, 8), packed["cu_seqlens_q"], torch.tensor(True))
    with pytest.raises(ValueError, match=r"^max_seqlen_q = -1: must be 0 \.\.\. 2\^63 - 1, or None for the total"):
        nsa.native_sparse_attention(x, x, x, gates, **packed, max_seqlen_q=torch.tensor(-1, dtype=torch.int32))
    assert nsa.NSAConfig(window_size=torch.tensor(4, dtype=dtype)).window_size == 4


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize("wrong", [torch.tensor([0, S]), torch.tensor([0.0, S])])
def test_offsets_of_another_dtype(name, wrong):
    x, gates = torch.randn(S, 1, D), torch.rand(S, 1, 3)
    given = {name: torch.tensor([0, S], dtype=torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")} | {name: wrong}
    message = rf"^{name}: {str(wrong.dtype)[6:]} \(2,\): expected int32 \(B \+ 1\)$"
    for call in (
        lambda: nsa.native_sparse_attention(x, x, x, gates, cfg=SMALL, **given),
        lambda: nsa.sliding_window_attention(x, x, x, 4, **given),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# ------------------------------------------------------------------------------------------------------ random mixtures


def bytes_of(cache):
    pages = cache._pages.tokens
    return [t.clone() for t in cache.tensors()], list(pages.free), [list(h) for h in pages.held]


@hypothesis.settings(
    max_examples=600, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
)
@hypothesis.given(name=st.sampled_from([name for name, (_, arguments) in calls().items() if arguments]), data=st.data())
def test_any_mixture(name, data):
    """A refusal names an argument; it leaves a cache as it was. What is taken gives a result."""
    function, arguments = calls()[name]
    wrong = data.draw(st.lists(st.sampled_from(list(arguments)), min_size=1, max_size=3, unique=True))
    changed = arguments | {argument: data.draw(st.sampled_from(ADVERSARIAL)) for argument in wrong}
    cache = getattr(function, "__self__", arguments.get("cache"))
    before = bytes_of(cache) if isinstance(cache, nsa.KVCache) else None
    try:
        function(**changed)
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
            assert re.search("allocate memory|out of memory|more pages of", str(error)), error
        first = str(error).splitlines()[0]
        names = {*arguments, *vars(SMALL), "indices", "weights", "pe", "w1", "b1", "w2", "b2"}
        names |= {"sequence", "kind", "hidden", "rope_cos", "rope_sin", "Sq", "parent", "KVCache", "allocate memory"}
        assert any(name in first for name in names), first
        if before is not None:
            after = bytes_of(cache)
            assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True)) and before[1:] == after[1:]
