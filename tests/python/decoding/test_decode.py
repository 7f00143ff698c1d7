"""Decoding and prefill with a cache against one forward pass; rollback, forks, idle rows, capacity."""

import random
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import nsa
from devices import head_dims, running
from problem import SMALL, assert_same, feed

KINDS = {"contiguous": {}, "paged": {"page_size": 16}, "large pages": {"page_size": 48}}
LENGTH = 110


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [[1] * LENGTH, [16] * 6 + [14], [LENGTH], [7, 1, 60, 16, 2, 20, 1, 1, 2], [37, 73]])
def test_equals_forward(backend, layer, kind, steps):
    x = torch.randn(2, LENGTH, 32)
    cache = layer.make_cache(2, LENGTH, **KINDS[kind])
    cache.reserve(LENGTH)
    assert_same(feed(layer, cache, x, steps), layer(x))
    assert cache.cache_seqlens.tolist() == [LENGTH] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_steps_and_idle_rows(backend, layer, kind):
    x = torch.randn(3, LENGTH, 32)
    expected, cache = layer(x), layer.make_cache(3, LENGTH, **KINDS[kind])
    cache.reserve(LENGTH)
    at, generator = [0, 0, 0], random.Random(3)
    while min(at) < LENGTH:
        m = generator.randrange(1, 25)
        counts = [min(generator.randrange(m + 1), LENGTH - a) for a in at]
        step = torch.full((3, m, 32), torch.nan)  # what lies behind num_new must not matter
        for b, count in enumerate(counts):
            step[b, :count] = x[b, at[b] : at[b] + count]
        out = layer(step, cache=cache, num_new=torch.tensor(counts, dtype=torch.int32))
        for b, count in enumerate(counts):
            assert_same(out[b, :count], expected[b, at[b] : at[b] + count])
            at[b] += count
    assert cache.cache_seqlens.tolist() == at
    idle = layer(x[:, :1], cache=cache, num_new=torch.zeros(3, dtype=torch.int32))
    assert not idle.any()


@pytest.mark.bits
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("new", (1, 16, 37, 110))
def test_steps_have_the_bits_of_the_training_forward(new, dtype):
    """The operators on the CPU: what `nsa.replay` leaves between rollout and training comes from other layers."""
    q, k, v = (torch.randn(3, LENGTH, heads, 16, dtype=dtype) for heads in (4, 2, 2))
    layer = nsa.NativeSparseAttention(32, 4, 2, 16, cfg=SMALL).to(dtype)
    gates, rope = torch.rand(3, LENGTH, 4, 3, dtype=dtype), nsa.rotary_tables(torch.arange(2 * LENGTH), 16)
    with torch.no_grad():
        inputs = {"weights_k": layer.phi_k(dtype), "weights_v": layer.phi_v(dtype), "rope": rope}
        expected = nsa.native_sparse_attention(q, k, v, gates, cfg=SMALL, return_indices=True, **inputs)
        cache, found = layer.make_cache(3, LENGTH), []
        for given in zip(*(t.split(new, 1) for t in (q, k, v, gates)), strict=True):
            step = nsa.decode if new <= 16 else nsa.prefill
            found.append(step(*(t.contiguous() for t in given), cache, return_indices=True, **inputs))
    for parts, whole in zip(zip(*found, strict=True), expected, strict=True):
        assert torch.equal(torch.cat(parts, 1), whole)


@pytest.mark.bits
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", [None, (60, 23, 0), (0, 0, 60), (0, 0, 0), (7, 8, 60)])
def test_a_first_chunk_is_a_chunk(backend, layer, kind, counts):
    """Equal bits on the CPU, the cache included; steps continue from it."""
    x, caches = torch.randn(3, 80, 32), [layer.make_cache(3, 80, **KINDS[kind]) for _ in range(2)]
    num_new, chunk = None, x[:, :60].clone()
    if counts is not None:
        num_new = torch.tensor(counts, dtype=torch.int32)
        for b, count in enumerate(counts):
            chunk[b, count:] = torch.nan  # must not matter
    found = []
    for cache, first in zip(caches, (False, True), strict=True):
        for tensor in cache.tensors()[:8]:
            tensor.normal_(generator=torch.Generator(tensor.device).manual_seed(1))  # what is not written stays
        cache.reserve(80)
        found.append(layer(chunk, cache=cache, num_new=num_new, first_chunk=first, return_indices=True))
        cache.check()
    same = assert_same if backend == "cuda" else lambda *both: torch.testing.assert_close(*both, rtol=0, atol=0)
    for chunked, whole in zip((*found[0], *caches[0].tensors()), (*found[1], *caches[1].tensors()), strict=True):
        same(whole, chunked)
    step = (x[:, 60:63], x[:, 63:80])
    for after in step:
        same(*(layer(after, cache=cache) for cache in caches))


def test_a_cache_of_inference_mode_is_used_outside(backend, layer):
    """One made there, and one whose tensors were."""
    x, expected = torch.randn(2, 60, 32), None
    for made, within in ((True, True), (True, False), (False, False)):
        with torch.inference_mode(made):
            cache = layer.make_cache(2, 80)
        if not made:
            with torch.inference_mode():
                tensors = [tensor.clone() for tensor in cache.tensors()]
            cache = nsa.KVCache.from_tensors(tensors, layer.cfg, 80)
        with torch.inference_mode(within), torch.no_grad():
            found = [layer(x[:, :40], cache=cache, first_chunk=True), layer(x[:, 40:], cache=cache)]
            if made:
                cache.rollback(0, 50)
                cache.rollback(1, 50)
                assert_same(layer(x[:, 50:], cache=cache), found[1][:, 10:])
        found = [tensor.clone() for tensor in found]
        expected = expected or found
        for here, there in zip(found, expected, strict=True):
            assert_same(here, there)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ["grow", "select"])
def test_a_cache_that_inference_mode_changed_is_used_outside(layer, kind, change):
    """What replaces its tensors is no tensor of that mode."""
    x, found = torch.randn(2, 60, 32), []
    options = KINDS[kind] | ({"num_pages": 40} if KINDS[kind] else {})
    for mode in (True, False):
        cache = layer.make_cache(2, 64, **options)
        cache.reserve(40)
        with torch.no_grad():
            layer(x[:, :40], cache=cache, first_chunk=True)
        with torch.inference_mode(mode):
            cache.grow(256) if change == "grow" else cache.select([1, 0, 1])
        cache.rollback(0, 39)
        cache.select([1, 0])
        cache.reserve(60)
        with torch.no_grad():
            found.append(layer(x[:, 40:], cache=cache))
        cache.check()
        cache.release(0)
        assert not any(tensor.is_inference() for tensor in cache.tensors())
    assert_same(*found)


@pytest.mark.parametrize("kind", KINDS)
def test_up_to_the_end_of_a_page(backend, layer, kind):
    """A sequence has capacity to the end of its last page, also beyond max_length, and is rotated there as everywhere.
    (Large pages hold more tokens than max_length.)"""
    x, cache = torch.randn(1, 96, 32), layer.make_cache(1, 49, **KINDS[kind])
    cache.reserve(49)
    assert cache.max_positions == (96 if kind == "large pages" else 64)
    with torch.no_grad():
        steps = [layer(x[:, t : t + 1], cache=cache) for t in range(64)]
        assert_same(torch.cat(steps, 1), layer(x[:, :64]))
    cache.check()


@pytest.mark.parametrize("learnt", ["q", "v", "k_swa", "gates", "weights_k"])
@pytest.mark.parametrize("way", [nsa.decode, nsa.prefill, partial(nsa.prefill, first_chunk=True)])
def test_a_gradient_of_a_step_is_refused(layer, way, learnt):
    inputs = {"q": torch.randn(1, 3, 4, 16), "gates": torch.rand(1, 3, 4, 3)}
    inputs |= {"k": torch.randn(1, 3, 2, 16), "v": torch.randn(1, 3, 2, 24), "k_swa": torch.randn(1, 3, 2, 16)}
    weights = layer.phi_k(torch.float32)
    inputs["weights_k"] = nsa.CompressionWeights(weights.kind, *(w.detach() for w in weights.as_arguments()[1:]))

    def step():
        return way(**inputs, cache=layer.make_cache(1, 40))

    assert not step().requires_grad
    (inputs["weights_k"].w2 if learnt == "weights_k" else inputs[learnt]).requires_grad_()
    with torch.no_grad():
        assert not step().requires_grad
    with pytest.raises(RuntimeError, match=r"^cache: a step with a cache has no gradient"):
        step().sum().backward()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_backward_through_a_layer_with_a_cache_is_refused(layer, compiled):
    """Raises: a gradient could only come from behind the step."""
    torch._dynamo.reset()
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    x, cache = torch.randn(1, 20, 32, requires_grad=True), layer.make_cache(1, 40)
    out = run(x, cache=cache, first_chunk=True)
    with pytest.raises(RuntimeError, match=r"^cache: a step with a cache has no gradient"):
        out.sum().backward()
    layer.requires_grad_(False)
    layer.o_proj.requires_grad_(True)
    run(x.detach(), cache=cache).sum().backward()
    assert layer.o_proj.weight.grad is not None


def test_a_first_chunk_takes_empty_rows_with_room_alone(backend, layer):
    x, cache = torch.randn(3, 40, 32), layer.make_cache(3, 80, page_size=16)
    cache.reserve([80, 32, 48])
    layer(x[:, :3], cache=cache, num_new=torch.tensor([3, 0, 0], dtype=torch.int32))
    before = [tensor.clone() for tensor in cache.tensors()]
    out, indices = layer(x, cache=cache, first_chunk=True, return_indices=True)
    assert cache.cache_seqlens.tolist() == [3, 0, 40]
    assert not out[:2].any() and bool((indices[:2] == -1).all())
    assert_same(out[2:], layer(x[2:]))
    for name, old in zip(("k_swa_ring", "v_swa_ring", "k_cmp_ring", "v_cmp_ring"), before[4:8], strict=True):
        assert torch.equal(getattr(cache, name)[:2], old[:2])
    pages = cache.block_table[:2][cache.block_table[:2] >= 0].long()
    assert torch.equal(cache.k_slc[pages], before[0][pages])
    with pytest.raises(
        RuntimeError, match="exceeded the capacity of a sequence, or gave a first chunk to one with tokens"
    ):
        cache.check()
    layer(x[:, :20], cache=cache, first_chunk=True, num_new=torch.tensor([0, 20, 0], dtype=torch.int32))
    cache.check()
    assert cache.cache_seqlens.tolist() == [3, 20, 40]


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("m", [5, 17, 60])
def test_tokens_beyond_the_longest_sequence_are_dropped(backend, layer, page_size, first, m):
    """Also by a layer whose rotation has no positions for them."""
    x, taken, cache = torch.randn(2, 72, 32), 0 if first else 12, layer.make_cache(2, 16, page_size=page_size)
    cache.reserve(16)
    layer(x[:, :taken], cache=cache) if taken else None
    num_new = torch.tensor([4, m], dtype=torch.int32)
    out = layer(x[:, taken:][:, :m], cache=cache, num_new=num_new, first_chunk=first)
    dropped = taken + m > 16
    assert cache.cache_seqlens.tolist() == [taken + 4, taken if dropped else m]
    assert_same(out[:1, :4], layer(x[:1, : taken + 4])[:, taken:])
    with pytest.raises(RuntimeError, match="exceeded the capacity") if dropped else nullcontext():
        cache.check()


def test_a_first_chunk_with_given_blocks(device, layer):
    x, caches = torch.randn(1, 100, 32), [layer.make_cache(1, 100) for _ in range(2)]
    given = torch.tensor([0, 1, 2, -1], dtype=torch.int32).expand(1, 100, 2, 4)
    chunked, whole = (layer(x, cache=c, indices=given, first_chunk=c is caches[1]) for c in caches)
    assert_same(whole, chunked)
    assert not torch.equal(whole, layer(x))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"k": (1, 9, 2, 16)}, r"k: \(1, 9, 2, 16\): expected the shape \(1, 20, ...\), as many tokens as q"),
        ({"k": (1, 20, 4, 16)}, "prefill: v: .*expected the shape"),
        ({"gates": (1, 19, 4, 3)}, r"gates: \(1, 19, 4, 3\): expected the shape \(1, 20, ...\)"),
        ({"v": (20, 2, 24)}, "v: .*expected the shape"),
        ({"num_new": torch.tensor([21], dtype=torch.int32)}, r"num_new = \[21\]: must be 0 ... m = 20"),
        ({"num_new": torch.tensor([-1], dtype=torch.int32)}, r"num_new = \[-1\]: must be 0 ... m = 20"),
        ({"num_new": torch.tensor([3])}, r"num_new: int64 \(1,\) on cpu: expected int32 \(1,\) on cpu"),
        ({"num_new": torch.zeros(2, dtype=torch.int32)}, r"num_new: int32 \(2,\) on cpu: expected int32 \(1,\) on cpu"),
        ({"indices": torch.zeros(1, 3, 2, 4, dtype=torch.int32)}, "indices: .*expected the shape"),
        ({"rope": (torch.ones(20, 8), torch.ones(20, 8))}, "rope: 20 positions: must be at least 64"),
    ],
)
def test_first_chunks_refused(layer, changes, message):
    arguments = {"q": (1, 20, 4, 16), "k": (1, 20, 2, 16), "v": (1, 20, 2, 24), "gates": (1, 20, 4, 3)} | changes
    arguments = {name: torch.randn(given) if name in "qkvgates" else given for name, given in arguments.items()}
    cache = layer.make_cache(1, 64)
    before = [tensor.clone() for tensor in cache.tensors()]
    with pytest.raises(ValueError, match=message):
        nsa.prefill(**arguments, cache=cache, first_chunk=True)
    assert all(torch.equal(a, b) for a, b in zip(before, cache.tensors(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("first_chunk", [False, True])
@pytest.mark.parametrize("table", ["block_table", "block_table_c"])
def test_written_pages_that_rows_share_are_refused(layer, table, first_chunk, dtype):
    """Tables that the caller wrote. A row without new tokens may name the pages of another."""
    x, options = torch.randn(2, 40, 32), {"dtype": dtype, "raw_dtype": torch.float32}
    cache = layer.make_cache(2, 80, page_size=16, **options)
    cache.reserve(48)
    good, given = getattr(cache, table).clone(), getattr(cache, table)
    places = {(1, 0): (0, 0), (0, 2): (0, 0)} if table == "block_table" else {(1, 0): (0, 0)}
    for place, other in places.items():
        given.copy_(good)
        given[place] = given[other]
        before = [tensor.clone() for tensor in cache.tensors()]
        with pytest.raises(ValueError, match=rf"{table}\[\d, \d\] = {int(given[other])}: .*is this page too"):
            layer(x, cache=cache, first_chunk=first_chunk)
        assert all(torch.equal(a, b) for a, b in zip(before, cache.tensors(), strict=True))
    given.copy_(good[[0, 0]])
    layer(x, cache=cache, first_chunk=first_chunk, num_new=torch.tensor([40, 0], dtype=torch.int32))
    given.copy_(good)
    layer(x, cache=cache, first_chunk=first_chunk, num_new=torch.tensor([0, 40], dtype=torch.int32))
    cache.check()
    assert cache.cache_seqlens.tolist() == [40, 40]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_made_on_another_device(kind):
    """Steps on a GPU, simulated without one: an operation on tensors of two devices would fail."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            layer = nsa.NativeSparseAttention(32, 4, 2, 64, cfg=SMALL, phi="mean").requires_grad_(False)
            cache, x = layer.make_cache(2, 96, **KINDS[kind]), torch.randn(2, 40, 32)
            counts = torch.full((2,), 30, dtype=torch.int32)
        for options in ({"first_chunk": True}, {"first_chunk": True, "num_new": counts}, {}, {"num_new": counts}):
            assert layer(x, cache=cache, **options).device.type == "cuda"
        assert layer(x[:, :3], cache=cache).device.type == "cuda"


@pytest.mark.bits
@pytest.mark.parametrize("kind", KINDS)
def test_rollback_is_as_if_never_appended(backend, layer, kind):
    x = torch.randn(1, 90, 32)
    caches = [layer.make_cache(1, 140, **KINDS[kind]) for _ in range(2)]
    for cache in caches:
        cache.reserve(140)
        feed(layer, cache, x[:, :70], [50, 16, 4])
    for _ in range(2):  # reject 32 speculative tokens, twice
        feed(layer, caches[0], torch.randn(1, 32, 32), [16, 16])
        caches[0].rollback(0, 70)
    steps = [3, 1, 16]
    assert torch.equal(feed(layer, caches[0], x[:, 70:], steps), feed(layer, caches[1], x[:, 70:], steps))


@pytest.mark.parametrize("length", [64, 70, 83, 95, 96])
@pytest.mark.parametrize("kind", KINDS)
def test_forks_go_their_own_ways(backend, layer, kind, length):
    x, other = torch.randn(1, 130, 32), torch.randn(1, 130, 32)
    cache = layer.make_cache(2, 130, **KINDS[kind])
    cache.reserve([130, 0])
    pad = torch.zeros(1, 1, 32)
    only = [torch.tensor(n, dtype=torch.int32) for n in ([1, 0], [0, 1])]
    layer(torch.cat((x[:, :96], torch.zeros(1, 96, 32))), cache=cache, num_new=torch.tensor([96, 0], dtype=torch.int32))
    free = cache.free_pages
    cache.fork(0, 1, length)
    if kind == "paged":
        assert free - cache.free_pages == (length % 16 > 0)  # full pages are shared
    cache.reserve(130)
    other[:, :length] = x[:, :length]
    expected = [layer(x)[0], layer(other)[0]]
    for i in range(length, 130):  # in turns, so that each would spoil what the other shares
        if i >= 96:
            assert_same(layer(torch.cat((x[:, i : i + 1], pad)), cache=cache, num_new=only[0])[0, 0], expected[0][i])
        out = layer(torch.cat((pad, other[:, i : i + 1])), cache=cache, num_new=only[1])
        assert_same(out[1, 0], expected[1][i])
    cache.check()


def test_rollback_into_a_shared_page(backend, layer):
    x, other = torch.randn(1, 80, 32), torch.randn(1, 80, 32)
    cache = layer.make_cache(2, 96, page_size=16)
    cache.reserve([80, 0])
    layer(torch.cat((x[:, :64], x[:, :64])), cache=cache, num_new=torch.tensor([64, 0], dtype=torch.int32))
    cache.fork(0, 1)
    cache.rollback(1, 40)  # into pages that both hold
    cache.reserve(80)
    other[:, :40] = x[:, :40]
    layer(torch.cat((x[:, :40], other[:, 40:])), cache=cache, num_new=torch.tensor([0, 40], dtype=torch.int32))
    out = layer(torch.cat((x[:, 64:], other[:, :16])), cache=cache, num_new=torch.tensor([16, 0], dtype=torch.int32))
    assert_same(out[:1], layer(x)[:, 64:])
    cache.release(0)
    cache.release(1)
    assert cache.free_pages == 12


def test_pages_come_back(device):
    cache = nsa.KVCache(3, 1, 8, cfg=SMALL, max_length=64, page_size=16, num_pages=6)
    cache.reserve([64, 32, 0])
    with pytest.raises(RuntimeError, match="needs 1 more pages of tokens, 0 are free"):
        cache.reserve([64, 32, 1])
    assert cache.block_table.tolist()[2] == [-1] * 4
    cache.release(0)
    cache.reserve([0, 32, 64])
    held = [page for row in cache.block_table.tolist() for page in row if page >= 0]
    assert sorted(held) == list(range(6))


def test_a_step_without_room_writes_nothing(backend, layer):
    cache = layer.make_cache(2, 64, page_size=16)
    cache.reserve([64, 16])
    before = [t.clone() for t in cache.tensors()]
    out = layer(torch.randn(2, 17, 32), cache=cache)
    assert out[0].any() and not out[1].any()
    assert cache.cache_seqlens.tolist() == [17, 0]
    page = int(cache.block_table[1, 0])
    assert torch.equal(cache.k_slc[page], before[0][page]) and torch.equal(cache.k_swa_ring[1], before[4][1])
    with pytest.raises(RuntimeError, match="exceeded the capacity"):
        cache.check()
    cache.check()


@pytest.mark.bits
def test_unwritten_memory_may_hold_nan(backend, layer):
    x = torch.randn(2, 60, 32)
    caches = [layer.make_cache(2, 96, page_size=16) for _ in range(2)]
    for t in caches[1].tensors():
        if t.is_floating_point():
            t.fill_(torch.nan)
    outs = []
    for cache in caches:
        cache.reserve(96)
        outs.append(feed(layer, cache, x, [30, 16, 1, 13]))
    assert torch.equal(*outs)


@pytest.mark.bits
def test_folded_tokens_are_compressed_tokens(backend, layer):
    """k~ folded in decoding is bitwise compress's."""
    weights = layer.phi_k(torch.float32)
    dk, dv = layer.head_dim, layer.v_head_dim
    k, v = torch.randn(1, 50, 2, dk), torch.randn(1, 50, 2, dv)
    cache = layer.make_cache(1, 64)
    for i in range(50):
        one, value = k[:, i : i + 1], v[:, i : i + 1]
        q = torch.randn(1, 1, 4, dk)
        weights_v = layer.phi_v(torch.float32)
        nsa.decode(q, one, value, torch.rand(1, 1, 4, 3), cache, weights_k=weights, weights_v=weights_v)
    assert torch.equal(cache.k_c[:, : SMALL.num_compressed(50)], nsa.compress(k, weights, SMALL))


@pytest.mark.slow
@pytest.mark.bits
def test_compiled_steps(backend, layer):
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 60, 32)
    outs = []
    for module in (layer, compiled):
        cache = layer.make_cache(2, 64, page_size=16)
        cache.reserve(64)
        outs.append(feed(module, cache, x, [40, 1, 1, 1, 1, 16]))
        assert cache.cache_seqlens.tolist() == [60, 60]
    assert torch.equal(*outs)


def test_bfloat16(device, layer):
    layer = layer.bfloat16()
    x = torch.randn(2, 60, 32).bfloat16()
    cache = layer.make_cache(2, 64)
    out = feed(layer, cache, x, [40, 1, 16, 3])
    assert out.dtype == torch.bfloat16 and (out - layer(x)).abs().max() < 0.1


def test_refused(layer):
    def step(m=1, cache=None, **changes):
        arguments = {"q": torch.randn(1, m, 4, 16), "gates": torch.rand(1, m, 4, 3)}
        arguments |= {"k": torch.randn(1, m, 2, 16), "v": torch.randn(1, m, 2, 24)}
        arguments |= {"weights_k": layer.phi_k(torch.float32), "weights_v": layer.phi_v(torch.float32)}
        cache = layer.make_cache(1, 64) if cache is None else cache
        return nsa.decode(**(arguments | changes), cache=cache)

    step(16)
    with pytest.raises(ValueError, match="16"):
        step(17)
    with pytest.raises(ValueError, match="num_new"):
        step(2, num_new=torch.tensor([3], dtype=torch.int32))
    with pytest.raises(ValueError, match="rope_cos"):
        step(rope=(torch.ones(64, 9), torch.ones(64, 9)))
    with pytest.raises(ValueError, match="rope: 9 positions: must be at least 64, the cache's max_length"):
        step(rope=(torch.ones(9, 8), torch.ones(9, 8)))
    with pytest.raises(ValueError, match=r"^(decode: )?indices: .*expected the shape"):
        step(indices=torch.zeros(1, 1, 2, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="k_slc"):
        step(cache=nsa.KVCache(1, 2, 16, 24, SMALL, max_length=64, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda c: c.reserve(97), "upper_bound = 97: must be 0 ... max_length = 96"),
        (lambda c: c.reserve([1]), "upper_bound: 1 numbers: must be one, or 2"),
        (lambda c: c.rollback(0, 41), "length = 41: must be 0 ... the row's length, 40"),
        (lambda c: c.rollback(0, 7), "length = 7: must be at most 32 below the longest it has been, 40"),
        (lambda c: c.rollback(2, 0), "sequence = 2: must be 0 ... B - 1 = 1"),
        (lambda c: c.fork(0, 0), "child = 0: must be an empty row and not the parent"),
        (lambda c: c.fork(1, 0), "child = 0: must be an empty row and not the parent"),
        (lambda c: c.fork(0, 5), "child = 5: must be 0 ... B - 1 = 1"),
        (lambda c: c.release(-1), "sequence = -1: must be 0"),
        (lambda c: (c.rollback(0, 20), c.rollback(0, 6)), "length = 6: must be at most 32 below the longest"),
    ],
)
def test_cache_refuses(call, message):
    cache = nsa.KVCache(2, 1, 8, cfg=SMALL, max_length=96)
    cache.cache_seqlens[0] = 40
    with pytest.raises(ValueError, match=message):
        call(cache)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"batch_size": 0}, "batch_size = 0: must be >= 1"),
        ({"max_length": 0}, "max_length = 0: must be >= 1"),
        ({"page_size": 24}, "page_size = 24: must be a positive multiple of 16"),
        ({"num_pages": 4}, "num_pages = 4: must be >= 1, and goes with page_size"),
    ],
)
def test_cache_options_refused(options, message):
    with pytest.raises(ValueError, match=message):
        nsa.KVCache(**{"batch_size": 1, "num_kv_heads": 1, "head_dim": 8, "max_length": 32} | options)


FP8 = torch.float8_e4m3fn


@pytest.fixture(params=["reference", "cpu"])
def host(request):
    with running(request.param):
        yield request.param


def fp8_cache(batch, dtype=torch.float32, **options):
    """Of two KV heads. The last scale is so small that a part of normal values saturates."""
    scales = {"k_scale": torch.tensor([0.01, 0.7]), "v_scale": torch.tensor([0.3, 0.004])}
    dims = head_dims(16, 8)
    return nsa.KVCache(batch, 2, *dims, SMALL, max_length=LENGTH, dtype=FP8, raw_dtype=dtype, **scales, **options)


def codes(x, scale):
    """By torch what a cache stores of x (..., Hkv, D)."""
    return (x.float() / scale[:, None]).clamp(-448, 448).to(FP8)


def new_tokens(batch, dtype=torch.float32):
    """q, k, v, gates and the options that have a tensor for each branch."""
    dk, dv = head_dims(16, 8)
    q, gates = torch.randn(batch, LENGTH, 6, dk), torch.rand(batch, LENGTH, 6, 3)
    k, v = torch.randn(3, batch, LENGTH, 2, dk), torch.randn(3, batch, LENGTH, 2, dv)
    q, k, v, gates = (t.to(dtype) for t in (q, k, v, gates))
    return (q, k[0], v[0], gates), {"k_slc": k[1], "v_slc": v[1], "k_swa": k[2], "v_swa": v[2]}


def run_steps(cache, new, branches, steps, **options):
    cache.reserve(LENGTH)
    outs, begin = [], 0
    for m in steps:
        part = [t[:, begin : begin + m] for t in new], {n: t[:, begin : begin + m] for n, t in branches.items()}
        outs.append((nsa.decode if m <= 16 else nsa.prefill)(*part[0], cache, **part[1], **options))
        begin += m
    cache.check()
    return torch.cat(outs, 1)


@pytest.mark.bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_stores_what_torch_rounds_to(backend, dtype):
    dim = head_dims(16, 16)[0]
    x = torch.randn(1, LENGTH, 2, dim) * torch.randn(LENGTH, 2, dim).mul(4).exp2()
    x[0, :9, :, 0] = torch.tensor([0.0, -0.0, 448, 464, -1e9, torch.inf, -torch.inf, torch.nan, 2**-10])[:, None]
    x[0, :64, :, 8:12] = (
        torch.arange(256, dtype=torch.uint8).view(FP8).float().reshape(64, 1, 4)
    )  # every number of e4m3
    x = x.to(dtype)
    for scale in (1.0, torch.tensor([0.3, 7.0])):
        cache = nsa.KVCache(
            1, 2, dim, cfg=SMALL, max_length=LENGTH, dtype=FP8, raw_dtype=dtype, k_scale=scale, v_scale=scale
        )
        nsa.prefill(torch.zeros(1, LENGTH, 2, dim, dtype=dtype), x, x, torch.ones(1, LENGTH, 2, 3, dtype=dtype), cache)
        expected = codes(x[0], cache.k_scale)
        for stored in (cache.k_slc, cache.v_slc):
            assert_same_codes(stored[0, :LENGTH], expected)
        window = torch.arange(LENGTH - 20, LENGTH)
        assert_same_codes(cache.v_swa_ring[0, window % 52], expected[window])


def assert_same_codes(a, b):
    torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(a.float().signbit(), b.float().signbit())


def test_fp8_reads_every_code(backend):
    """With the window's gate alone the first token's output is its value."""
    dim = head_dims(8, 8)[0]
    rows = 128 // dim
    every = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    every[every.isnan()] = 1
    scale = torch.tensor([0.3, 7.0])
    cache = nsa.KVCache(8 * rows, 2, dim, dim, SMALL, max_length=16, dtype=FP8, raw_dtype=torch.float32, v_scale=scale)
    v = (every.reshape(rows, 1, 1, 2, dim) * scale[:, None]).expand(rows, 8, 1, 2, dim).reshape(8 * rows, 1, 2, dim)
    q, gates = torch.zeros(8 * rows, 1, 2, dim), torch.tensor([0.0, 0.0, 1.0]).expand(8 * rows, 1, 2, 3)
    torch.testing.assert_close(nsa.decode(q, torch.zeros_like(v), v, gates, cache), v, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [[1] * LENGTH, [LENGTH], [37, 16, 1, 1, 55], [7, 1, 60, 16, 2, 20, 4]])
def test_fp8_equals_forward_on_what_is_stored(backend, kind, steps):
    new, branches = new_tokens(2)
    q, k, v, gates = new
    phi = [nsa.initial_compression_weights("mlp", 8, d, num_sets=2) for d in head_dims(16, 8)]
    cache = fp8_cache(2, **KINDS[kind])
    o = run_steps(cache, new, branches, steps, weights_k=phi[0], weights_v=phi[1])

    def read(x, scale):
        return codes(x, scale).float() * scale[:, None]

    compressed = nsa.compress(k, phi[0], SMALL), nsa.compress(v, phi[1], SMALL)
    every = (*compressed, *branches.values())
    scales = (cache.k_scale, cache.v_scale) * 3
    k_c, v_c, k_slc, v_slc, k_swa, v_swa = (read(x, scale) for x, scale in zip(every, scales, strict=True))
    expected = nsa.nsa_attention(q, k_slc, v_slc, gates, k_c=k_c, v_c=v_c, k_swa=k_swa, v_swa=v_swa, cfg=SMALL)
    assert_same(o, expected)


@pytest.mark.bits
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_has_the_bits_that_a_sequence_has_alone(device, kind, dtype):
    """With others in the batch, any paging, as first chunk or chunk; unused pages hold NaN."""
    new, branches = new_tokens(2, dtype)
    alone = fp8_cache(1, dtype)
    expected = run_steps(alone, [t[1:] for t in new], {n: t[1:] for n, t in branches.items()}, [60, 16, 34])
    cache = fp8_cache(2, dtype, **KINDS[kind])
    for tensor in cache.tensors()[:8]:
        tensor.fill_(torch.nan)
    cache.reserve(LENGTH)
    part = [t[:, :60] for t in new], {n: t[:, :60] for n, t in branches.items()}
    outs = [nsa.prefill(*part[0], cache, **part[1], first_chunk=True)]
    rest = [t[:, 60:] for t in new], {n: t[:, 60:] for n, t in branches.items()}
    outs.append(run_steps(cache, *rest, [1, 15, 34]))
    assert torch.equal(torch.cat(outs, 1)[1:], expected)
    nsa.prefill(*(t[:, :17] for t in new), cache, first_chunk=True)
    with pytest.raises(RuntimeError, match="a first chunk to one with tokens"):
        cache.check()
    assert cache.cache_seqlens.tolist() == [LENGTH] * 2


@pytest.mark.bits
@pytest.mark.parametrize("kind", KINDS)
def test_fp8_fork_rollback_and_select(device, kind):
    new, branches = new_tokens(1)
    cache = fp8_cache(2, **KINDS[kind])
    rows = [t.expand(2, *t.shape[1:]) for t in new], {n: t.expand(2, *t.shape[1:]) for n, t in branches.items()}
    expected = run_steps(fp8_cache(2, **KINDS[kind]), *rows, [40, 12, 16, 16])

    def go_on(begin, end, counts):
        part = [t[:, begin:end] for t in rows[0]], {n: t[:, begin:end] for n, t in rows[1].items()}
        count = torch.tensor(counts, dtype=torch.int32)
        return (nsa.prefill if end - begin > 16 else nsa.decode)(*part[0], cache, **part[1], num_new=count)

    cache.reserve(LENGTH)
    go_on(0, 52, [52, 0])
    cache.release(1)
    cache.fork(0, 1, 45)
    cache.rollback(0, 45)
    cache.reserve(68)
    assert torch.equal(go_on(45, 52, [7, 7]), expected[:, 45:52])
    cache.select([1, 0])
    cache.grow(200)
    cache.reserve(84)
    assert torch.equal(go_on(52, 68, [16, 16]), expected[:, 52:68])
    cache = nsa.KVCache.from_tensors(cache.tensors(), SMALL, 84, k_scale=cache.k_scale, v_scale=cache.v_scale)
    assert torch.equal(go_on(68, 84, [16, 16]), expected[:, 68:84])


def test_fp8_of_a_layer(backend, layer):
    cache = layer.make_cache(1, LENGTH, dtype=FP8, k_scale=0.02, v_scale=0.02)
    assert cache.k_cmp_ring.dtype == torch.float32 and cache.k_slc.dtype == FP8
    x = torch.randn(1, LENGTH, 32)
    error = feed(layer, cache, x, [60, 16, 16, 16, 2]) - layer(x)
    assert 0 < error.norm() < 0.1 * layer(x).norm()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k_scale": 2.0}, "k_scale: goes with dtype = torch.float8_e4m3fn"),
        ({"raw_dtype": torch.float16}, "raw_dtype = torch.float16: another than dtype goes with"),
        ({"dtype": FP8, "k_scale": 0}, r"k_scale: \[0.0, 0.0\]: must be positive and finite"),
        ({"dtype": FP8, "v_scale": [1.0]}, "v_scale: list: must be a number or a dense tensor"),
        ({"dtype": FP8, "v_scale": torch.tensor([1, torch.nan])}, r"v_scale: \[1.0, nan\]: must be positive"),
        ({"dtype": FP8, "k_scale": True}, "k_scale: bool: must be a number or a dense tensor"),
        ({"dtype": FP8, "k_scale": torch.tensor(True)}, "k_scale: dtype bool: must be floating-point or integer"),
        ({"dtype": FP8, "v_scale": torch.tensor(1j)}, "v_scale: dtype complex64: must be floating-point or integer"),
        ({"dtype": FP8, "k_scale": 1e-45}, r"k_scale: \[1.4\d*e-45, 1.4\d*e-45\]: must be at least 2\^-126"),
        ({"dtype": FP8, "k_scale": 1e39}, r"k_scale: \[inf, inf\]: must be positive and finite"),
        ({"dtype": FP8, "v_scale": torch.ones(3)}, r"v_scale: \(3,\): must be one number, or 2, one for each KV head"),
        ({"dtype": FP8, "v_scale": torch.ones(1, 2)}, r"v_scale: \(1, 2\): must be one number, or 2"),
    ],
)
def test_fp8_refused_options(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        nsa.KVCache(1, 2, 16, cfg=SMALL, max_length=40, **options)


def test_fp8_of_scales_whose_product_is_no_float32(host):
    q, k, v, gates = new_tokens(1)[0]
    cache = nsa.KVCache(1, k.shape[2], k.shape[3], v.shape[3], SMALL, max_length=40, dtype=FP8, k_scale=2.0**-126)
    step = [t[:, :12].bfloat16() for t in (q, k, v, gates)]
    assert nsa.decode(*step, cache, softmax_scale=1e-37).isfinite().all()


def test_fp8_refused_steps(host):
    (q, k, v, gates), _ = new_tokens(1)
    step = [t[:, :2] for t in (q, k, v, gates)]
    cache = fp8_cache(1)
    cache.k_scale = torch.tensor([1.0, -1.0])
    with pytest.raises(ValueError, match=r"cache.k_scale\[1\] = -1: must be positive and finite"):
        nsa.decode(*step, cache)
    cache.k_scale = None
    with pytest.raises(ValueError, match=r"cache.k_scale: not given: expected float32 \(Hkv = 2\)"):
        nsa.decode(*step, cache)
    with pytest.raises(ValueError, match=r"cache.k_cmp_ring: float32 .*: expected bfloat16 as q"):
        nsa.decode(*(t.bfloat16() for t in step), fp8_cache(1))
    with pytest.raises(ValueError, match=r"q: float8_e4m3fn .*: expected float32, bfloat16, float16 or float64"):
        nsa.decode(step[0].to(FP8), *step[1:], fp8_cache(1))
    with pytest.raises(ValueError, match=r"k: float8_e4m3fn .*: expected float32"):
        nsa.compress(k.to(FP8).expand(1, LENGTH, 2, 16), nsa.CompressionWeights("mean"), SMALL)


@pytest.mark.slow
@pytest.mark.bits
def test_fp8_compiles(device):
    """opcheck itself cannot compare tensors in fp8."""
    new, branches = new_tokens(2)
    caches = [fp8_cache(2) for _ in range(2)]
    compiled = torch.compile(lambda *x, **named: nsa.decode(*x, **named), fullgraph=True, backend="aot_eager")
    part = [t[:, :9] for t in new], {n: t[:, :9] for n, t in branches.items()}
    outs = [step(*part[0], cache, **part[1]) for step, cache in zip((nsa.decode, compiled), caches, strict=True)]
    assert torch.equal(*outs)
    for name in ("k_slc", "v_c", "v_swa_ring"):
        assert_same_codes(*(getattr(cache, name) for cache in caches))
