"""Operations and the cache on problems that hypothesis makes up."""

import pytest
import torch

import nsa
from devices import BACKENDS, head_dims, running
from problem import OPERATIONS, SMALL, Problem, assert_same, feed
from test_reference import check

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st


@st.composite
def problems(draw):
    stride = draw(st.sampled_from([1, 2, 4, 8, 16]))
    block = 16 * draw(st.integers(1, 3))
    init, local = draw(st.integers(0, 2)), draw(st.integers(1, 3))
    cfg = nsa.NSAConfig(
        kernel_size=stride * draw(st.integers(1, 4)),
        kernel_stride=stride,
        block_size=block,
        topk=init + local + draw(st.integers(0, 3)),
        init_blocks=init,
        local_blocks=local,
        window_size=draw(st.integers(1, 100)),
    )
    length = st.integers(0, 130).flatmap(lambda k: st.tuples(st.integers(0, k), st.just(k)))
    packed = draw(st.booleans())
    lengths = draw(st.lists(length, min_size=1, max_size=4)) if packed else [draw(length)] * draw(st.integers(1, 2))
    kv_heads, dims = draw(st.integers(1, 2)), st.sampled_from([8, 16, 24])
    heads = (kv_heads * draw(st.sampled_from([1, 2, 3, 5])), kv_heads)
    return Problem(lengths, cfg, heads, (draw(dims), draw(dims)), packed, seed=draw(st.integers(0, 99)))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(problem=problems(), operation=st.sampled_from(OPERATIONS))
@pytest.mark.parametrize("name", BACKENDS)
def test_anything_valid(name, operation, problem):
    with running(name):
        check(name, operation, problem, luck=4.0)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.data())
@pytest.mark.parametrize("name", BACKENDS)
def test_any_split(name, data):
    with running(name):
        torch.manual_seed(data.draw(st.integers(0, 99)))
        dims = head_dims(8, 8)
        layer = nsa.NativeSparseAttention(16, 2, 1, *dims, SMALL, share_kv=True).eval().requires_grad_(False)
        steps = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
        x = torch.randn(1, sum(steps), 16)
        cache = layer.make_cache(1, x.shape[1], page_size=data.draw(st.sampled_from([None, 16, 32])))
        cache.reserve(x.shape[1])
        assert_same(feed(layer, cache, x, steps), layer(x))
