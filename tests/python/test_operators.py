"""The operators as torch sees them: schemas, fake kernels, autograd, compilation, second derivatives, threads."""

import threading

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import nsa
from devices import head_dims
from problem import OPERATIONS, SMALL, WEIGHTS, Problem

ops = torch.ops.nsa
CFG = SMALL.as_list()
NOT_PACKED = (None, None, 0, 0)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()


class Recorder(TorchDispatchMode):
    """Appends to a list what native_sparse_attention returns."""

    def __init__(self, results):
        super().__init__()
        self.results = results

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        result = operator(*arguments, **(options or {}))
        if operator is ops.native_sparse_attention.default:
            self.results.append(result)
        return result


def randn(*shape):
    return torch.randn(*shape, requires_grad=True)


def arguments():
    """One call of every operator; the backwards are reached through the forwards and called on their own too."""
    dk, dv = head_dims(16, 24)
    q, k, v = randn(2, 50, 4, dk), randn(2, 50, 2, dk), randn(2, 50, 2, dv)
    k_c, v_c, gates = randn(2, 11, 2, dk), randn(2, 11, 2, dv), randn(2, 50, 4, 3)
    phi = ("mlp", randn(2, 8, dk), randn(2, 8 * dk, 40), randn(2, 40), randn(2, 40, dk), randn(2, dk))
    branches = (q, k_c, v_c, k, v, k, v, gates)
    cu = torch.tensor([0, 30, 50], dtype=torch.int32)
    with torch.no_grad():
        o, lse = ops.compressed_attention(q, k_c, v_c, CFG, None, None, *NOT_PACKED)
        indices = ops.select_blocks(q, k_c, lse, CFG, None, None, 0.0, 0, *NOT_PACKED)
        whole = ops.nsa_attention(*branches, CFG, None, 0.0, 0, *NOT_PACKED, None, True, True)
    d_o = torch.randn_like(o)

    def plain(*tensors):
        return tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in tensors)

    yield "compress", (k, *phi, CFG, None)
    yield "compress", (k[0], *phi, CFG, cu)
    yield (
        "compress_backward",
        plain(torch.randn(2, 11, 2, dk), k, *phi, CFG, None, [True, True, False, True, False, True]),
    )
    yield "compressed_cu_seqlens", (cu, CFG)
    yield "compressed_attention", (q, k_c, v_c, CFG, None, 50, *NOT_PACKED)
    yield "compressed_attention_backward", plain(d_o, q, k_c, v_c, o, lse, CFG, 0.3, None, *NOT_PACKED, [True] * 3)
    yield "select_blocks", plain(q, k_c, lse, CFG, None, None, 0.5, 3, *NOT_PACKED)
    yield "selected_attention", (q, k, v, indices, 16, None, *NOT_PACKED)
    yield "selected_attention", (q[0], k[0], v[0], indices[0], 16, 0.2, cu, cu, 30, 30)
    lse = lse.nan_to_num(neginf=0)  # rows that see no block see keys in the other branches
    yield (
        "selected_attention_backward",
        plain(*(d_o, q, k, v, indices, o, lse, 16, None, *NOT_PACKED, [True, False, True])),
    )
    yield "sliding_window_attention", (q, k, v, 20, None, *NOT_PACKED)
    yield "sliding_window_attention_backward", plain(d_o, q, k, v, o, lse, 20, None, *NOT_PACKED, [False, True, True])
    yield "combine", (randn(2, 50, 4, dv), randn(2, 50, 4, dv), randn(2, 50, 4, dv), gates)
    yield "combine_backward", plain(d_o, d_o, d_o, d_o, gates, [True] * 4)
    yield "nsa_attention", (*branches, CFG, None, 0.0, 0, *NOT_PACKED, None, True, True)
    yield "nsa_attention", plain(*branches, CFG, None, 0.5, 9, *NOT_PACKED, None, False, True)
    given = whole[1]
    yield "nsa_attention", (*branches, CFG, None, 0.0, 0, *NOT_PACKED, given, True, True)
    yield "nsa_attention", (*branches, CFG, None, 0.0, 0, *NOT_PACKED, given, True, False)
    yield "nsa_attention_backward", plain(d_o, *branches, *whole[1:], CFG, None, *NOT_PACKED, None, [True] * 8)
    phi_mean, rope = ("mean", *[None] * 5), (torch.ones(50, dk // 2), torch.zeros(50, dk // 2))
    layer = (q, k, v, k, v, k, v, gates, *phi, *phi_mean)
    yield "native_sparse_attention", (*layer, CFG, None, *rope, 0.0, 0, *NOT_PACKED, None, True, True, True)
    yield "native_sparse_attention", (*layer, CFG, None, *rope, 0.0, 0, *NOT_PACKED, None, True, False, True)
    yield "native_sparse_attention", (*layer, CFG, None, *rope, 0.0, 0, *NOT_PACKED, given, True, True, False)
    yield "native_sparse_attention", plain(*layer, CFG, 0.3, None, None, 0.5, 9, *NOT_PACKED, None, False, False, True)
    packed = (*(t[0] for t in layer[:8]), *phi, *phi_mean)
    yield "native_sparse_attention", plain(*packed, CFG, None, *rope, 0.0, 0, cu, None, 30, 30, None, True, True, True)
    kept = ops.native_sparse_attention(*plain(*layer), CFG, None, *rope, 0.0, 0, *NOT_PACKED, None, True, True, True)[
        1:
    ]
    needs = [True] * 8 + [True, True, False, True, False] + [False] * 5
    for compressed in (kept[1:3], (torch.empty(0), torch.empty(0))):
        yield (
            "native_sparse_attention_backward",
            (
                *plain(d_o, *layer, kept[0], *compressed, *kept[3:], CFG, None, *rope),
                *(*NOT_PACKED, None, needs),
            ),
        )
    cache = nsa.KVCache(2, 2, dk, dv, SMALL, max_length=64)
    new = plain(q, k, v, k, v, k, v, gates)
    phi_v = ("mean", None, None, None, None, None)
    rest = (*plain(*phi), *phi_v, CFG, None, torch.ones(64, dk // 2), torch.zeros(64, dk // 2), True, None, None)
    scales = (None, None)
    yield "decode", (*(t[:, :5] for t in new), *cache.tensors(), *rest, *scales)
    yield "prefill", (*new, *cache.tensors(), *rest, *scales)
    pages = [torch.zeros(12, rows, 2, d) for rows in (16, 4, 16, 32) for d in (dk, dv)]
    table, flag = torch.arange(8, dtype=torch.int32).reshape(2, 4), torch.zeros(1, dtype=torch.int32)
    tables, starts = (table, None, table + 2, table // 2), torch.tensor([0, 20, 41], dtype=torch.int32)
    engine = (*pages, flag, torch.tensor([25, 21], dtype=torch.int32), *tables, starts, 30)
    yield "decode_paged", (*(t[0] for t in new), *engine, *rest[:-2], None, *scales, None)
    out = torch.zeros(q.shape[1], 4, dv)
    yield "decode_paged", (*(t[0] for t in new), *engine, *rest[:-2], None, *scales, out)
    yield "fork", (*cache.tensors(), CFG, 0, 1, 0)


def names():
    return [str(op).split("::")[1] for op in torch._C._dispatch_get_all_op_names() if op.startswith("nsa::")]


def test_every_operator_is_checked():
    without_tensors = {"describe_backends", "describe_devices", "describe_instruction_sets", "device_count", "version"}
    raises = {"gradient_of_step"}
    assert set(names()) == {name for name, _ in arguments()} | without_tensors | raises


@pytest.mark.parametrize("index", range(31))
def test_opcheck(backend, index):
    name, args = list(arguments())[index]
    torch.library.opcheck(getattr(ops, name).default, args)


def test_opcheck_runs_all():
    assert len(list(arguments())) == 31


@pytest.mark.slow
@pytest.mark.bits
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_compile(backend, fresh_compiler, operation, packed):
    problem = Problem([(40, 40), (9, 9)] if packed else [(40, 40)] * 2, packed=packed)
    inputs, indices = problem.inputs(operation, torch.float32), problem.random_indices()

    def run(inputs, indices):
        return problem.by_library(operation, inputs, indices).out

    expected = run(inputs, indices)
    actual = torch.compile(run, fullgraph=True, backend="aot_eager")(inputs, indices)
    assert torch.equal(actual, expected)
    d_out = torch.randn_like(expected)
    leaves = list(inputs.values())
    for a, b in zip(
        torch.autograd.grad(actual, leaves, d_out), torch.autograd.grad(expected, leaves, d_out), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.bits
def test_compile_for_any_length_and_seed(backend, fresh_compiler):
    """The layer compiles once for all lengths, seeds and packings of one shape."""
    layer = nsa.NativeSparseAttention(32, 4, 2, *head_dims(16, 16), SMALL, noise=0.5)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for length, seed in ((70, 1), (90, 2), (41, 2**62)):
        x = torch.randn(2, length, 32)
        assert torch.equal(compiled(x, seed=seed), layer(x, seed=seed))
    x, lengths = torch.randn(90, 32), torch.tensor([0, 40, 90], dtype=torch.int32)
    assert torch.equal(compiled(x, lengths, seed=3), layer(x, lengths, seed=3))


@pytest.mark.slow
@pytest.mark.bits
def test_compile_with_inductor(device, fresh_compiler):
    problem = Problem([(60, 60)])
    inputs = {name: problem.shaped(t) for name, t in problem.inputs("nsa_attention", torch.float32).items()}
    compiled = torch.compile(nsa.nsa_attention, fullgraph=True)
    assert torch.equal(compiled(**inputs, cfg=SMALL), nsa.nsa_attention(**inputs, cfg=SMALL))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_gradcheck(monkeypatch, operation):
    """Central differences in float64, on the reference backend."""
    monkeypatch.setenv("NSA_BACKEND", "reference")
    cfg = nsa.NSAConfig(
        kernel_size=4, kernel_stride=2, block_size=16, topk=2, init_blocks=0, local_blocks=1, window_size=5
    )
    problem = Problem([(7, 18), (5, 5)], cfg, heads=(2, 1), dims=(2, 4), packed=True)
    inputs, indices = problem.inputs(operation, torch.float64), problem.random_indices(2)

    def run(*tensors):
        return problem.by_library(operation, dict(zip(inputs, tensors, strict=True)), indices).out

    torch.autograd.gradcheck(run, tuple(inputs.values()), eps=1e-5, atol=1e-5, rtol=1e-4, fast_mode=True)


@pytest.mark.bits
def test_only_wanted_gradients(backend):
    problem = Problem([(40, 40)])
    inputs = problem.inputs("nsa_attention", torch.float32)
    everything = problem.by_library("nsa_attention", inputs).out.sum()
    expected = torch.autograd.grad(everything, list(inputs.values()))
    for name, gradient in zip(inputs, expected, strict=True):
        alone = {n: t.detach().requires_grad_(n == name) for n, t in inputs.items()}
        problem.by_library("nsa_attention", alone).out.sum().backward()
        assert torch.equal(alone[name].grad, gradient), name
        assert all(t.grad is None for n, t in alone.items() if n != name)


def test_no_gradient_through_lse_and_indices(backend):
    problem = Problem([(40, 40)])
    q, k_c, v_c = (problem.shaped(t) for t in problem.inputs("compressed_attention", torch.float32).values())
    o, lse = nsa.compressed_attention(q, k_c, v_c, SMALL)
    indices = nsa.select_blocks(q, k_c, lse, SMALL)
    assert o.requires_grad and not lse.requires_grad and not indices.requires_grad


def test_second_derivatives_are_refused(backend):
    problem = Problem([(20, 20)])
    inputs = problem.inputs("combine", torch.float32)
    (d_q,) = torch.autograd.grad(problem.by_library("combine", inputs).out.sum(), [inputs["gates"]], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
        d_q.sum().backward()


def test_forward_mode_derivatives_are_refused():
    q, k = torch.randn(1, 20, 2, 16), torch.randn(1, 20, 1, 16)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp"):
        nsa.sliding_window_attention(forward_ad.make_dual(q, q), k, k, 4)
    with forward_ad.dual_level():
        nsa.sliding_window_attention(q, k, k, 4)


def test_what_would_be_ignored_is_refused():
    q, k, gates = torch.randn(1, 20, 2, 16), torch.randn(1, 20, 1, 16), torch.rand(1, 20, 2, 3)
    with pytest.raises(ValueError, match="max_seqlen_q = 10: must be given with cu_seqlens_q only"):
        nsa.native_sparse_attention(q, k, k, gates, cfg=SMALL, max_seqlen_q=10)
    rope = tuple(table.requires_grad_() for table in nsa.rotary_tables(torch.arange(20), 16))
    with pytest.raises(ValueError, match=r"^rope: requires a gradient: must not"):
        nsa.native_sparse_attention(q, k, k, gates, cfg=SMALL, rope=rope)
    with torch.no_grad():
        nsa.native_sparse_attention(q, k, k, gates, cfg=SMALL, rope=rope)


@pytest.mark.bits
@pytest.mark.parametrize("operation", OPERATIONS)
def test_strides(backend, operation):
    """Padded, transposed and expanded inputs and gradients give the bits of contiguous ones."""
    problem = Problem([(33, 33)] * 3)
    inputs, indices = problem.inputs(operation, torch.float32), problem.random_indices()

    def padded(t):
        wide = torch.full((t.shape[0] + 1, t.shape[1], t.shape[2] + 8), torch.nan)
        return wide[1:, :, : t.shape[2]].copy_(t.detach()).requires_grad_()

    def head_major(t):
        return t.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()

    expected = problem.by_library(operation, inputs, indices).out
    for layout in (padded, head_major):
        changed = {n: t.detach().requires_grad_() if n in WEIGHTS else layout(t) for n, t in inputs.items()}
        out = problem.by_library(operation, changed, indices).out
        assert torch.equal(out, expected)
        for d_out in (torch.ones(()).expand(out.shape), torch.randn(out.shape[::-1]).permute(2, 1, 0)):
            wanted = torch.autograd.grad(expected, list(inputs.values()), d_out.contiguous(), retain_graph=True)
            found = torch.autograd.grad(out, list(changed.values()), d_out, retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.bits
def test_broadcast_inputs(backend):
    """One key for all heads and sequences by stride 0; the gradients add up through torch's expand."""
    d, _ = head_dims(16, 16)
    q = torch.randn(2, 40, 4, d)
    one = torch.randn(1, 40, 1, d, requires_grad=True)
    o, _ = nsa.sliding_window_attention(q, one.expand(2, 40, 2, d), one.expand(2, 40, 2, d), 20)
    copied = one.detach().expand(2, 40, 2, d).clone().requires_grad_()
    expected, _ = nsa.sliding_window_attention(q, copied, copied, 20)
    assert torch.equal(o, expected)
    (found,) = torch.autograd.grad(o.sum(), [one])
    (wanted,) = torch.autograd.grad(expected.sum(), [copied])
    torch.testing.assert_close(found, wanted.sum((0, 2), keepdim=True))


@pytest.mark.bits
def test_packed_tail_is_never_read(backend):
    """NaN behind the last sequence changes no bit and gets no gradient."""
    problem = Problem([(30, 30), (20, 20)], packed=True, tail=9)
    for operation in OPERATIONS:
        if operation == "combine":
            continue
        inputs, indices = problem.inputs(operation, torch.float32), problem.random_indices()
        poisoned = {n: t.detach().clone() for n, t in inputs.items()}
        for name, t in poisoned.items():
            if name not in WEIGHTS:
                t[sum(problem.c_lens) if name in ("k_c", "v_c") else 50 :] = torch.nan
            t.requires_grad_()
        expected = problem.by_library(operation, inputs, indices).out
        out = problem.by_library(operation, poisoned, indices).out
        assert torch.equal(out, expected)
        d_out = torch.randn_like(out)
        found = torch.autograd.grad(out, list(poisoned.values()), d_out)
        wanted = torch.autograd.grad(expected, list(inputs.values()), d_out)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), operation


@pytest.mark.bits
def test_repeatable_with_any_number_of_threads(backend):
    problem = Problem([(130, 130)] * 2)
    inputs = problem.inputs("nsa_attention", torch.float32)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            out = problem.by_library("nsa_attention", inputs).out
            results.append([out, *torch.autograd.grad(out.square().sum(), list(inputs.values()))])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.bits
def test_threads_at_once(backend):
    problem = Problem([(100, 100)])
    inputs = problem.inputs("nsa_attention", torch.float32)

    def run():
        mine = {n: t.detach().requires_grad_() for n, t in inputs.items()}
        out = problem.by_library("nsa_attention", mine).out
        return [out, *torch.autograd.grad(out.square().sum(), list(mine.values()))]

    expected, found = run(), {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: run()})) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for result in found.values():
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def test_inference_keeps_nothing():
    q, k_c = torch.randn(1, 20, 2, 16), torch.randn(1, 4, 1, 16)
    k, gates = torch.randn(1, 20, 1, 16), torch.rand(1, 20, 2, 3)
    _, _, *kept = ops.nsa_attention(q, k_c, k_c, k, k, k, k, gates, CFG, None, 0.0, 0, *NOT_PACKED, None, False, True)
    assert [t.numel() for t in kept] == [0] * 6


@pytest.mark.bits
def test_layer_has_the_bits_of_its_operations(device):
    """One call, with compressed tokens kept or computed again, and its operations one by one."""
    for problem in (Problem([(70, 70)] * 2), Problem([(70, 70), (0, 5), (9, 33)], packed=True, tail=7, phi="linear")):
        inputs = problem.inputs("native_sparse_attention", torch.float32)
        d_out, found = None, []
        for options in ({}, {"recompute_compressed": True}):
            o, indices = problem.layer(inputs, return_indices=True, **options)
            d_out = torch.randn_like(o) if d_out is None else d_out
            found.append([o, indices, *torch.autograd.grad(o, list(inputs.values()), d_out)])
        k_c, v_c = (problem.shaped(t.detach()) for t in problem.compressed(inputs))
        rotated = {name: problem.shaped(problem.rotated(name, inputs)) for name in ("q", "k_slc", "k_swa")}
        v, v_swa, gates = (problem.shaped(inputs[name]) for name in ("v_slc", "v_swa", "gates"))
        options = {"k_c": k_c, "v_c": v_c, "k_swa": rotated["k_swa"], "v_swa": v_swa, "cfg": SMALL}
        options |= problem.packing(k_c)
        o, indices = nsa.nsa_attention(rotated["q"], rotated["k_slc"], v, gates, return_indices=True, **options)
        assert torch.equal(o, found[0][0]) and torch.equal(indices, found[0][1])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.bits
@pytest.mark.parametrize("packed", (False, True))
def test_given_blocks_need_no_selection(device, packed):
    """Unless the caller wants the selected ones, too; the results are the same."""
    problem = Problem([(70, 70), (9, 33)] if packed else [(70, 70)] * 2, packed=packed)
    inputs = problem.inputs("native_sparse_attention", torch.float32)
    given = problem.shaped(problem.random_indices(SMALL.topk))
    made, found = [], []
    for wanted in (False, True):
        with Recorder(made):
            result = problem.layer(inputs, indices=given, return_indices=wanted)
        o = result[0] if wanted else result
        found.append([o, *torch.autograd.grad(o.square().sum(), list(inputs.values()))])
    assert [outputs[1].numel() for outputs in made] == [0, given.numel()]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_layer_keeps_only_what_it_says(device):
    problem = Problem([(70, 70)])
    inputs = problem.inputs("native_sparse_attention", torch.float32)
    inside = {t.untyped_storage().data_ptr() for t in inputs.values()}

    def kept(**options):
        tensors = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: tensors.append(t) or t, lambda t: t):
            problem.layer(inputs, **options)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(size for at, size in storages.items() if at not in inside) // 4

    rows, (h, hkv), angles = 70, problem.heads, sum(t.numel() for t in problem.rope(inputs["q"]))
    branches = 3 * rows * h * (inputs["v"].shape[-1] + 1)
    rotated = sum(inputs[name].numel() for name in ("q", "k_slc", "k_swa"))
    assert kept(recompute_compressed=True) == branches + rows * hkv * SMALL.topk + angles + rotated
    assert kept() - kept(recompute_compressed=True) == sum(t.numel() for t in problem.compressed(inputs))


@pytest.mark.slow
@pytest.mark.bits
def test_eager_and_compiled_code_take_different_ways_to_equal_gradients(device, fresh_compiler):
    """Past the registered formula, and through it."""
    problem = Problem([(40, 40)])
    inputs = problem.inputs("native_sparse_attention", torch.float32)
    eager = problem.layer(inputs)
    assert "nsa_native_sparse_attention" in type(eager.grad_fn).__name__
    registered = torch.compile(lambda: problem.layer(inputs), fullgraph=True, backend="aot_eager")()
    d_o = torch.randn_like(eager)
    pairs = (torch.autograd.grad(o, list(inputs.values()), d_o) for o in (eager, registered))
    assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))
