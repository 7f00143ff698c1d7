"""What holds on a GPU only: streams, graphs, memory, layouts, and equality with the CPU."""

import gc
import os
import time

import pytest
import torch

import nsa
from devices import NO_CUDA, head_dims, running
from problem import OPERATIONS, SMALL, Problem, cast, gradients

NAMES = ("q", "k", "v", "gates", "k_c", "v_c", "k_swa", "v_swa")
REPEATS = int(os.environ.get("NSA_REPEATS", "20"))
pytestmark = pytest.mark.skipif(not nsa.device_count(), reason=NO_CUDA)


@pytest.fixture(autouse=True)
def cuda():
    with running("cuda"):
        yield


def branches(length=200, dtype=torch.float32):
    """Inputs of nsa_attention, (1, length, ...), that require a gradient."""
    problem = Problem([(length, length)])
    inputs = problem.inputs("nsa_attention", dtype)
    assert tuple(inputs) == NAMES
    return [problem.shaped(t.detach()).requires_grad_() for t in inputs.values()]


def attend(inputs):
    return nsa.nsa_attention(**dict(zip(NAMES, inputs, strict=True)), cfg=SMALL, return_indices=True)


def everything(inputs):
    """nsa_attention, its blocks and all gradients."""
    o, indices = attend(inputs)
    return [o.detach(), indices, *torch.autograd.grad(o.square().sum(), inputs)]


def eval_layer(dtype=torch.float32):
    layer = nsa.NativeSparseAttention(32, 4, 2, *head_dims(16, 24), SMALL).eval().requires_grad_(False).to(dtype)
    torch.nn.init.normal_(layer.gate[2].weight)
    return layer


# ------------------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_equals_the_cpu(operation, packed):
    """Outputs and gradients in float32; with equal inputs almost surely equal blocks."""
    lengths = [(90, 90), (33, 40), (7, 7)] if packed else [(90, 90)] * 2
    problem = Problem(lengths, packed=packed)
    inputs, indices = problem.inputs(operation, torch.float32), problem.random_indices()
    d_out = None

    def run(inputs, indices):
        nonlocal d_out
        result = problem.by_library(operation, inputs, indices)
        if d_out is None:
            d_out = torch.randn_like(result.out)
        return result, gradients(result.out, inputs, d_out.to(result.out.device))

    on_gpu, found = run(inputs, indices)
    with running("cpu"):
        host = {n: t.detach().cpu().requires_grad_() for n, t in inputs.items()}
        on_cpu, wanted = run(host, indices.cpu())
    if operation == "nsa_attention":
        assert torch.equal(on_gpu.indices.cpu(), on_cpu.indices)
    pairs = {"out": (on_gpu.out, on_cpu.out), **{n: (found[n], wanted[n]) for n in wanted}}
    for name, (a, b) in pairs.items():
        torch.testing.assert_close(a.cpu(), b, rtol=0, atol=5e-5 * max(1.0, b.abs().max().item()), msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bitwise_repeatable(dtype):
    inputs = branches(700, dtype)
    first = everything(inputs)
    for _ in range(REPEATS - 1):
        assert all(torch.equal(a, b) for a, b in zip(everything(inputs), first, strict=True))


def test_decode_is_bitwise_repeatable():
    layer, x, outs = eval_layer(), torch.randn(2, 130, 32), []
    for _ in range(REPEATS):
        cache = layer.make_cache(2, 130, page_size=16)
        cache.reserve(130)
        outs.append(torch.cat([layer(part, cache=cache) for part in x.split([100, 1, 1, 16, 12], 1)], 1))
        assert torch.equal(outs[-1], outs[0])


# ------------------------------------------------------------------------------------------------- streams and memory


def test_current_stream():
    """Inputs that are late on the current stream are waited for, results are early enough for it: nothing runs on
    another stream."""
    inputs = branches()
    expected = everything(inputs)
    late = [torch.full_like(t, torch.nan) for t in inputs]
    producer, side = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        everything(inputs)  # torch's allocator has memory for this stream from now on
    torch.cuda.synchronize()
    with torch.cuda.stream(producer):
        torch.cuda._sleep(200_000_000)  # clock cycles: about a tenth of a second
        for to, value in zip(late, inputs, strict=True):
            to.copy_(value.detach())
        ready = producer.record_event()
    with torch.cuda.stream(side):
        side.wait_event(ready)
        found = everything([t.requires_grad_() for t in late])
    assert not ready.query(), "the host has waited for the device"
    side.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_workspace_is_torchs():
    """What a call works in comes from torch's allocator, and goes back."""

    def requested(when):
        return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]

    def settled():
        """Autograd's thread lets go of its last node a moment after a backward; garbage goes when found."""
        gc.collect()
        deadline, last = time.monotonic() + 10, None
        while (now := requested("current")) != last and time.monotonic() < deadline:
            last = now
            time.sleep(0.2)
        return now

    inputs = branches(2000)
    everything(inputs)
    before = settled()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        results = attend(inputs)
    after = requested("current")
    assert after - before == sum(t.untyped_storage().nbytes() for t in results)
    assert requested("peak") > after
    del results
    everything(inputs)
    assert settled() == before


def test_nothing_waits_for_the_device():
    """Forward, packed forward, backward and steps of a cache do nothing that torch knows to wait."""
    layer = eval_layer().requires_grad_(True)
    x, cu_seqlens = torch.randn(1, 100, 32), torch.tensor([0, 60, 100], dtype=torch.int32)
    cache, num_new = layer.make_cache(1, 128, page_size=16), torch.ones(1, dtype=torch.int32)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).square().sum().backward()
        layer(x[0], cu_seqlens, 60).square().sum().backward()
        with torch.no_grad():
            cache.reserve(128)
            layer(x, cache=cache)
            layer(x[:, :16], cache=cache)
            layer(x[:, :1], cache=cache, num_new=num_new)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    cache.check()
    assert cache.cache_seqlens.tolist() == [117]


def poison_free_memory():
    """What torch's allocator hands out from now on held NaN: its small and its large blocks, and the gaps between."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    gaps = [2**24] * 16 + [2**22] * 32 + [2**20] * 64 + [2**15] * 128 + [2**12] * 512 + [2**9] * 4096
    sizes = [2**26] * 8 + [2**19] * 128 + gaps
    parts = [torch.full((size,), 0xFF, dtype=torch.uint8) for size in sizes]
    del parts
    assert all(torch.empty(count).isnan().all() for count in (1000, 2**22))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_memory_that_held_nan(operation, packed):
    """Outputs and workspaces owe nothing to what was in their memory before."""
    lengths = [(1300, 1300), (0, 5), (40, 60)] if packed else [(1300, 1300)]
    problem = Problem(lengths, packed=packed, tail=9 * packed)
    inputs, indices = problem.inputs(operation, torch.bfloat16), problem.random_indices()

    def run():
        result = problem.by_library(operation, inputs, indices)
        lse = [] if result.lse is None else [result.lse.exp()]  # 0 where a row sees nothing
        return [result.out, *lse, *gradients(result.out, inputs, result.out.detach()).values()]

    expected = run()
    poison_free_memory()
    found = run()
    assert all(t.isfinite().all() for t in found)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_decode_in_memory_that_held_nan():
    layer, x = eval_layer(), torch.randn(2, 130, 32)

    def run():
        cache = layer.make_cache(2, 130, page_size=16)
        cache.reserve([130, 0])
        outs = [layer(x[:, :100], cache=cache, num_new=torch.tensor([100, 0], dtype=torch.int32))]
        cache.fork(0, 1)
        cache.reserve(130)
        outs += [layer(part, cache=cache) for part in x[:, 100:].split([1, 16, 13], 1)]
        return torch.cat(outs, 1)

    expected = run()
    poison_free_memory()
    found = run()
    assert found.isfinite().all() and torch.equal(found, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_tensors_of_another_device():
    inputs = branches()
    expected = everything(inputs)
    with torch.cuda.device(0):
        found = everything([t.detach().to("cuda:1").requires_grad_() for t in inputs])
    assert all(torch.equal(a.to("cuda:0"), b) for a, b in zip(found, expected, strict=True))


# -------------------------------------------------------------------------------------------------------------- graphs


def captured(function):
    """`function` in a CUDA graph; returns the graph and what the function returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()  # first calls may set things up
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


def test_graph_of_forward_and_backward():
    inputs = branches()
    graph, found = captured(lambda: everything(inputs))
    for _ in range(3):
        with torch.no_grad():
            for t in inputs:
                t.copy_(torch.randn_like(t))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, everything(inputs), strict=True))


@pytest.mark.parametrize("page_size", [None, 16])
def test_graph_of_a_decode_step(page_size):
    """One captured step, replayed as the lengths grow over blocks, pages and the window."""
    layer, x = eval_layer(), torch.randn(2, 150, 32)
    layer.record_selections = True
    caches = [layer.make_cache(2, 151, page_size=page_size) for _ in range(2)]
    for cache in caches:
        cache.reserve(151)
        layer(x[:, :60], cache=cache)
    static = torch.zeros(2, 1, 32)
    graph, found = captured(lambda: layer(static, cache=caches[0]))
    for b in range(2):
        caches[0].rollback(b, 60)  # what the capture's first call appended
    for t in range(60, 150):
        static.copy_(x[:, t : t + 1])
        graph.replay()
        torch.testing.assert_close(found, layer(x[:, t : t + 1], cache=caches[1]), rtol=1e-4, atol=1e-5)
    for cache in caches:
        cache.check()
        assert cache.cache_seqlens.tolist() == [150] * 2
    for b in range(2):
        assert torch.equal(caches[0].selected(b), caches[1].selected(b))


# -------------------------------------------------------------------------------------------------------------- errors


def test_rows_must_be_aligned():
    q = torch.randn(1, 20, 2, 65)[..., :64]
    k = torch.randn(1, 20, 1, 64)
    with pytest.raises(NotImplementedError, match=r"q: .*every row must begin at a multiple of 16 bytes"):
        nsa.sliding_window_attention(q, k, k, 4)


def test_head_dims_and_types():
    x = torch.randn(1, 5, 1, 80)
    with pytest.raises(NotImplementedError, match="takes 64/64, 128/128 and 192/128"):
        nsa.sliding_window_attention(x, x, x, 4)
    x = torch.randn(1, 5, 1, 64, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="float64"):
        nsa.sliding_window_attention(x, x, x, 4)


def test_a_row_of_selected_blocks_fits_into_shared_memory():
    q, k, v = (torch.randn(1, 2, 1, dim, dtype=torch.bfloat16, requires_grad=True) for dim in (192, 192, 128))
    indices = torch.zeros(1, 2, 1, 40000, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"topk = 40000: must be at most \d+ on this device for bfloat16"):
        nsa.selected_attention(q, k, v, indices)
    o, _ = nsa.selected_attention(q, k, v, indices[..., :1024].contiguous())  # fits on every GPU
    o.sum().backward()


def test_one_device():
    x = torch.randn(1, 5, 1, 64)
    with pytest.raises(ValueError, match="k: on cpu: expected cuda:0 as q"):
        nsa.sliding_window_attention(x, x.cpu(), x, 4)
    with pytest.raises(ValueError, match="k: on cuda:0: expected cpu as q"):
        nsa.sliding_window_attention(x.cpu(), x, x, 4)


def test_offsets_are_read_only_on_request(monkeypatch):
    weights, k = nsa.CompressionWeights("mean"), torch.randn(50, 2, 64)
    wrong = torch.tensor([0, 30, 51], dtype=torch.int32)
    assert nsa.compress(k, weights, SMALL, wrong).shape == (12, 2, 64)  # the kernels clamp
    monkeypatch.setenv("NSA_VALIDATE", "1")
    with pytest.raises(ValueError, match="cu_seqlens"):
        nsa.compress(k, weights, SMALL, wrong)


# ------------------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains(dtype):
    """Weights in float32, attention in the autocast type."""
    torch._dynamo.reset()
    layer = nsa.NativeSparseAttention(32, 4, 2, *head_dims(16, 16), SMALL)
    x = torch.randn(2, 60, 32)  # all blocks fit into the selection: rounding does not choose others
    exact = layer(x).detach()
    for module in (layer, torch.compile(layer, fullgraph=True)):
        layer.zero_grad()
        with torch.autocast("cuda", dtype):
            out = module(x)
        assert out.dtype == dtype and (out.float() - exact).abs().max() < 0.05 * exact.abs().max()
        out.float().square().sum().backward()
        assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters())


def test_inputs_are_not_changed():
    inputs = branches()
    copies = cast(dict(enumerate(inputs)), torch.float32)
    everything(inputs)
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies.values(), strict=True))
