"""torch's tools on a model of two layers: compilation, export, checkpointing, copies, transforms, counters."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import nsa
from problem import SMALL


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layers = nn.ModuleList(nsa.NativeSparseAttention(32, 4, 2, 16, 24, SMALL, **options) for _ in range(2))
        for layer in self.layers:
            nn.init.normal_(layer.gate[2].weight)

    def forward(self, x, cu_seqlens=None, caches=None):
        for i, layer in enumerate(self.layers):
            x = x + layer(x, cu_seqlens, cache=None if caches is None else caches[i])
        return x


@pytest.fixture
def model():
    torch.manual_seed(1)
    return Model()


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()


def gradients(model, out):
    model.zero_grad(set_to_none=True)
    out.square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_equal(a, b):
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_near(a, b, bound=1e-5):
    for name in a:
        assert (a[name] - b[name]).abs().max() <= bound * max(1.0, b[name].abs().max()), name


@pytest.mark.slow
def test_inductor(model, fresh_compiler):
    """Forward, backward, lengths, packings and decode steps; nothing is compiled again after the second shape."""
    compiled = torch.compile(model, fullgraph=True)
    shapes = [(2, 60), (3, 75), (4, 90), (2, 41)]
    for i, shape in enumerate(shapes):
        x = torch.randn(*shape, 32)
        with torch.compiler.set_stance("default" if i < 2 else "fail_on_recompile"):
            out = compiled(x)
            found = gradients(model, out)
        expected = model(x)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        assert_near(found, gradients(model, expected))
    for i, ends in enumerate(([30, 90], [20, 50, 70], [1, 40, 41, 100], [64])):
        x, offsets = torch.randn(ends[-1], 32), torch.tensor([0, *ends], dtype=torch.int32)
        with torch.compiler.set_stance("default" if i < 2 else "fail_on_recompile"):
            out = compiled(x, offsets)
        torch.testing.assert_close(out, model(x, offsets), rtol=1e-5, atol=1e-5)
    x = torch.randn(2, 90, 32)
    caches = [[layer.make_cache(2, 96, page_size=16) for layer in model.layers] for _ in range(2)]
    with torch.no_grad():
        for both in caches:
            for cache in both:
                cache.reserve(96)
            model(x[:, :40], caches=both)
        for i in range(40, 90):
            with torch.compiler.set_stance("default" if i < 42 else "fail_on_recompile"):
                out = compiled(x[:, i : i + 1], caches=caches[0])
            torch.testing.assert_close(out, model(x[:, i : i + 1], caches=caches[1]), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.bits
def test_a_compiled_first_chunk(model, fresh_compiler):
    """Of changing lengths and counts, in one graph: the bits of eager code, the cache included."""
    layer = model.layers[0].eval()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for i, m in enumerate((40, 70, 55)):
        x, num_new = torch.randn(2, m, 32), torch.tensor([m, m // 2], dtype=torch.int32)
        caches = [layer.make_cache(2, 96) for _ in range(2)]
        with torch.no_grad(), torch.compiler.set_stance("default" if i < 2 else "fail_on_recompile"):
            out = compiled(x, cache=caches[0], num_new=num_new, first_chunk=True)
            assert torch.equal(out, layer(x, cache=caches[1], num_new=num_new, first_chunk=True))
        assert all(torch.equal(a, b) for a, b in zip(*(cache.tensors() for cache in caches), strict=True))


@pytest.mark.slow
@pytest.mark.bits
@pytest.mark.parametrize("strict", [False, True])
def test_export(model, strict, tmp_path):
    """Saved, loaded and run at other sizes: the bits of eager code, and within 1e-5 by AOTInductor."""
    model.eval()
    dynamic = {"x": {0: torch.export.Dim("B", min=2, max=8), 1: torch.export.Dim("S", min=2, max=256)}}
    xs = [torch.randn(*shape, 32) for shape in ((2, 70), (3, 5), (5, 120))]
    with torch.no_grad():
        program = torch.export.export(model, (torch.randn(2, 60, 32),), dynamic_shapes=dynamic, strict=strict)
        torch.export.save(program, tmp_path / "model.pt2")
        loaded = torch.export.load(tmp_path / "model.pt2").module()
        for x in xs:
            assert torch.equal(loaded(x), model(x))
        if strict:
            return
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "aoti.pt2"))
        packaged = torch._inductor.aoti_load_package(path)
        for x in xs:
            torch.testing.assert_close(packaged(x), model(x), rtol=1e-5, atol=1e-5)


def test_export_with_gradients(model):
    """The exported program trains. Its shortest sequence has two compressed tokens, else torch names the bound."""

    def export(shortest):
        dynamic = {"x": {0: torch.export.Dim("B", min=2, max=8), 1: torch.export.Dim("S", min=shortest, max=256)}}
        return torch.export.export(model, (torch.randn(2, 60, 32),), dynamic_shapes=dynamic)

    program, x = export(SMALL.kernel_size + SMALL.kernel_stride).module(), torch.randn(3, 75, 32)
    found = gradients(program, program(x))
    assert_near(found, gradients(model, model(x)))
    with pytest.raises(torch._dynamo.exc.UserError, match=r"Suggested fixes:\n.*S = Dim\('S', min=8, max=256\)"):
        export(2)


def test_autocast(model):
    x = torch.randn(2, 60, 32)
    exact = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
        found = gradients(model, out)
    assert (out - exact).abs().max() < 0.05 * exact.abs().max()
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in found.values())
    wanted = gradients(model, exact)
    for name, g in wanted.items():
        assert torch.cosine_similarity(found[name].flatten(), g.flatten(), 0) > 0.95, name


@pytest.mark.bits
def test_checkpointing(model):
    """Without re-entry, and with a policy that keeps what our operators computed: they run once more, or not at all."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    x, calls = torch.randn(2, 60, 32), []
    expected = gradients(model, model(x))

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            if "nsa::native_sparse_attention" in str(function.name()) and "backward" not in function.name():
                calls.append(function)
            return function(*arguments, **(named or {}))

    def policy(context, function, *arguments, **named):
        return CheckpointPolicy.MUST_SAVE if function.namespace == "nsa" else CheckpointPolicy.PREFER_RECOMPUTE

    def run(**options):
        y = x
        for layer in model.layers:
            y = y + checkpoint(layer, y, use_reentrant=False, **options)
        return y

    for options, count in (({}, 4), ({"context_fn": lambda: create_selective_checkpoint_contexts(policy)}, 2)):
        calls.clear()
        with Count():
            found = gradients(model, run(**options))
        assert_equal(found, expected)
        assert len(calls) == count


@pytest.mark.bits
def test_copies(model, tmp_path):
    import torch.distributed.checkpoint as dcp

    x = torch.randn(2, 60, 32)
    expected = model(x)
    gradients(model, expected)
    other = Model()
    other.load_state_dict(model.state_dict())
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    third = Model()
    third.load_state_dict(torch.load(saved, weights_only=True))
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    fourth = Model()
    state = {"model": fourth.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    fourth.load_state_dict(state["model"])
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), other, third, fourth):
        assert torch.equal(copied(x), expected)
        assert_equal(gradients(copied, copied(x)), gradients(model, model(x)))


def test_functional_transforms(model):
    x = torch.randn(2, 40, 32)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    found = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).square().mean())(parameters)
    assert_near(found, gradients(model, model(x)), 1e-6)
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(model)(x[:, None])


def test_the_profiler_names_the_operators(model):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.randn(1, 40, 32)).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"nsa::native_sparse_attention", "nsa::native_sparse_attention_backward"} <= names
