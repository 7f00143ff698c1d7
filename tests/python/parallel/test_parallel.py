"""Context parallelism: N chunks give the same bits on 1, 2 and 4 processes, and what one call gives.

On CPUs over gloo; with NSA_PARALLEL_DEVICE=cuda on GPUs over NCCL, as many as there are.
"""

import copy
import os
import re
import sys
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import nsa
import wrong_calls
from nsa.parallel import ContextParallel
from nsa.parallel.attention import heads_at_once
from nsa.parallel.layout import chunk_owners, divide
from torchrun import BACKENDS, DEVICE, RANKS, torchrun

CFG = nsa.NSAConfig(kernel_size=8, kernel_stride=4, block_size=16, topk=4, window_size=20)
# A window of more tokens than a chunk.
WIDE = nsa.NSAConfig(kernel_size=8, kernel_stride=2, block_size=32, topk=3, window_size=70)
S, CHUNKS = 256, 8
DK, DV = (16, 8) if DEVICE == "cpu" else (64, 64)
CLOSE = 1e-5 if DEVICE == "cpu" else 5e-5  # of float32 sums in another order, as in test_cuda.py
# Documents of one token, empty, over several chunks, with ends on and near those of chunks, blocks across chunks.
CUTS = [0, 1, 8, 30, 32, 32, 63, 66, 128, 129, 137, 240, 251, 256]
ODD = [0, 100, 257, 280]  # chunks of 35 tokens, no multiple of kernel_stride

CASES = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},  # which only GPUs have kernels for: on a CPU by the oracle
    "contiguous": {"layout": "contiguous"},
    "packed": {"cuts": CUTS},
    "packed, bfloat16": {"cuts": CUTS, "dtype": torch.bfloat16, "phi": "mlp"},
    "packed, odd chunks": {"cuts": ODD, "phi": "linear", "sets": 3},
    "packed, contiguous, not rotated": {"cuts": CUTS, "layout": "contiguous", "rotated": 0},
    "three sets": {"sets": 3, "phi": "mlp", "per_head": True},
    "three sets, KV heads one by one": {"sets": 3, "phi": "linear", "at_once": 1, "cuts": CUTS},
    "window's own, part rotated": {"sets": 2, "rotated": 8, "at_once": 1},
    "wide window, not rotated": {"cfg": WIDE, "rotated": 0, "phi": "mlp"},
    "given blocks": {"given": True},
    "noise": {"noise": 0.5},
}

REDUCED = (
    "float32",
    "bfloat16",
    "float16",
    "packed",
    "packed, contiguous, not rotated",
    "three sets, KV heads one by one",
)


def problem(dtype=torch.float32, cuts=None, phi="mean", per_head=False, sets=1, rotated=16, cfg=CFG, given=False, **_):
    """Inputs, weights and settings of the global sequence."""
    generator = torch.Generator().manual_seed(3)
    rows = (2, S) if cuts is None else (cuts[-1],)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    inputs = {"q": random(*rows, 4, DK), "gates": random(*rows, 4, 3).sigmoid()}
    for suffix in ("", "_swa", "_slc")[:sets]:
        inputs |= {f"k{suffix}": random(*rows, 2, DK), f"v{suffix}": random(*rows, 2, DV)}
    phis = [
        nsa.initial_compression_weights(phi, cfg.kernel_size, dim, 2 if per_head else 1, generator=generator)
        .to(DEVICE)
        .to(dtype)
        for dim in (DK, DV)
    ]
    rope = nsa.rotary_tables(torch.arange(rows[-1], device=DEVICE), rotated) if rotated else None
    settings = {"cfg": cfg, "weights_k": phis[0], "weights_v": phis[1], "rope": rope}
    indices = torch.randint(0, 16, (*rows, 2, 4), generator=generator).int().to(DEVICE) if given else None
    offsets = None if cuts is None else torch.tensor(cuts, dtype=torch.int32, device=DEVICE)
    return inputs, settings, indices, offsets, random(*rows, 4, DV)


def backend_of(case):
    by_oracle = DEVICE == "cpu" and CASES[case].get("dtype") == torch.float16
    return nsa.use_backend("reference" if by_oracle else "auto")


def run(cp, case, options=None):
    """o, indices and gradients of the global sequence, and of phi's weights this rank's share."""
    options = CASES[case] if options is None else options
    inputs, settings, indices, offsets, d_o = problem(**options)
    dim = 1 if offsets is None else 0
    here = {name: cp.shard(t, dim).requires_grad_() for name, t in inputs.items()}
    with backend_of(case):
        o, chosen = nsa.parallel.native_sparse_attention(
            **here,
            **settings,
            cp=cp,
            indices=None if indices is None else cp.shard(indices, dim),
            cu_seqlens=offsets,
            kv_heads_at_once=options.get("at_once"),
            noise=options.get("noise", 0.0),
            seed=7,
            return_indices=True,
        )
        gradients = torch.autograd.grad(o, list(here.values()), cp.shard(d_o, dim))
    found = {"o": o, "indices": chosen} | {f"d_{name}": g for name, g in zip(here, gradients, strict=True)}
    return {name: cp.unshard(t, dim) for name, t in found.items()}


def plain(case, dtype=None):
    options = CASES[case]
    inputs, settings, indices, offsets, d_o = problem(**options)
    for name in ("weights_k", "weights_v"):
        settings[name] = settings[name].to(dtype or d_o.dtype)
    inputs = {name: t.to(dtype or t.dtype).requires_grad_() for name, t in inputs.items()}
    with backend_of(case):
        o, chosen = nsa.native_sparse_attention(
            **inputs, **settings, indices=indices, cu_seqlens_q=offsets, return_indices=True
        )
        gradients = torch.autograd.grad(o, list(inputs.values()), d_o.to(o.dtype))
    return {"o": o, "indices": chosen} | {f"d_{name}": g for name, g in zip(inputs, gradients, strict=True)}


def reduced(mesh):
    """The same with reduce-scatter."""
    return {
        case: run(ContextParallel(mesh, CASES[case].get("layout", "head_tail"), CHUNKS, "reduce_scatter"), case)
        for case in REDUCED
    }


def other_blocks(cfg):
    """A record of each of two sequences: the first blocks instead of the most important ones."""
    own = torch.arange(S)[:, None] // cfg.block_size
    blocks = torch.arange(cfg.topk).expand(S, -1)
    blocks = torch.where(own < cfg.topk, blocks, torch.cat((blocks[:, :-1], own), 1)).masked_fill(blocks > own, -1)
    record = nsa.replay.SelectionRecord(blocks[None, :, None].repeat(1, 1, 2, 1).short(), cfg)
    return [record, record]


def layer_step(cp):
    """A layer's output, also with recorded blocks, and the gradients of its parameters, summed over the ranks."""
    torch.manual_seed(5)
    layer = nsa.NativeSparseAttention(32, 4, 2, DK, cfg=CFG, qk_norm=True).to(DEVICE)
    for name, parameter in layer.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(2, S, 32, generator=torch.Generator().manual_seed(6)).to(DEVICE)
    layer.context_parallel = cp
    o = layer(x if cp is None else cp.shard(x))
    o.square().sum().backward()
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    if cp is not None:
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=cp.group)
    with torch.no_grad(), nsa.replay.replay(layer, other_blocks(CFG)):
        replayed = layer(x if cp is None else cp.shard(x))
    outputs = {"o": o.detach(), "replayed": replayed}
    return {name: t if cp is None else cp.unshard(t) for name, t in outputs.items()} | gradients


class Dropped(torch.autograd.Function):
    """The tensor itself; its gradient is dropped where `dropped` is true."""

    @staticmethod
    def forward(ctx, t, dropped):
        ctx.dropped = dropped
        return t.view_as(t)

    @staticmethod
    def backward(ctx, gradient):
        return None if ctx.dropped else gradient, None


def without_gradient_on_one_rank(cp):
    """The gradient of k where the last rank's o is given none, and where it is given zeros."""
    inputs, settings, _, _, d_o = problem(phi="mlp")
    found = []
    for dropped in (True, False):
        here = {name: cp.shard(t).requires_grad_() for name, t in inputs.items()}
        o = nsa.parallel.native_sparse_attention(**here, **settings, cp=cp)
        last = cp.rank == cp.size - 1
        incoming = torch.zeros_like(o) if last else cp.shard(d_o)
        found.append(torch.autograd.grad(Dropped.apply(o, dropped and last), here["k"], incoming)[0])
    return [cp.unshard(t) for t in found]


def work(folder):
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(BACKENDS, timeout=timedelta(seconds=30))
    mesh = dist.device_mesh.init_device_mesh(DEVICE, (dist.get_world_size(),))
    results, repeated = {}, {}
    for case, options in CASES.items():
        cp = ContextParallel(mesh, options.get("layout", "head_tail"), CHUNKS)
        results[case] = run(cp, case)
        repeated[case] = run(cp, case) if case == "packed" else {}
    cp = ContextParallel(mesh, chunks=CHUNKS)
    inputs, settings, *_ = problem(phi="mlp")
    told = wrong_calls.told(wrong_calls.attention_calls(cp, inputs, settings, WIDE) | wrong_calls.other_calls(cp, mesh))
    told["dropped gradient"] = without_gradient_on_one_rank(cp)
    layer = layer_step(ContextParallel(dist.group.WORLD))
    torch.save((results, repeated, told, layer, reduced(mesh)), f"{folder}/{dist.get_rank()}.pt")
    dist.barrier()
    # What ends a process group joins gloo's threads, which may wait for the interpreter's lock or outlive its end.
    os._exit(0)


@pytest.fixture(scope="module", params=(2, 4))
def ranks(request, tmp_path_factory):
    """What each of several ranks found."""
    if request.param > RANKS:
        pytest.skip(f"{RANKS} GPUs")
    folder = tmp_path_factory.mktemp("ranks")
    torchrun(request.param, __file__, folder)
    return [torch.load(folder / f"{rank}.pt", map_location=DEVICE) for rank in range(request.param)]


@pytest.mark.bits
@pytest.mark.parametrize("case", REDUCED)
def test_reduce_scatter(ranks, case):
    """o, dq and the gates' gradients in the same bits, those of keys and values closely."""
    exact = plain(case, torch.float32)
    for results, *_, found in ranks:
        assert found[case].keys() == results[case].keys()
        for name, t in results[case].items():
            if name[:3] not in ("d_k", "d_v"):
                assert torch.equal(found[case][name], t), name
            elif t.dtype == torch.float32:
                assert (found[case][name] - t).abs().max() <= CLOSE * t.abs().max(), name
            else:
                error, allowed = ((u[name].float() - exact[name]).norm() for u in (found[case], plain(case)))
                assert error <= 2 * allowed, name


@pytest.mark.bits
def test_reduce_scatter_on_one_process():
    """Nothing is sent, and the order is that of the chunks."""
    found = reduced(None)
    for case in REDUCED:
        same_bits(found[case], run(ContextParallel(None, CASES[case].get("layout", "head_tail"), CHUNKS), case))


def test_a_backend_without_reduce_scatter(monkeypatch):
    def refuse(*_, group):
        raise RuntimeError("Backend mpi does not support _reduce_scatter_base")

    cp = ContextParallel(reduction="reduce_scatter")
    cp.size = 2
    monkeypatch.setattr(dist, "reduce_scatter_tensor", refuse)
    with pytest.raises(NotImplementedError, match=r"reduction = 'reduce_scatter': Backend mpi .*; use 'all_to_all'"):
        cp.reduce_scatter(torch.zeros(2))


def same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, t in expected.items():
        assert found[name].dtype == t.dtype and torch.equal(found[name], t), name


@pytest.mark.bits
@pytest.mark.parametrize("case", CASES)
def test_bits_of_one_process(ranks, case):
    expected = run(ContextParallel(None, CASES[case].get("layout", "head_tail"), CHUNKS), case)
    for results, repeated, *_ in ranks:
        same_bits(results[case], expected)
        if repeated[case]:
            same_bits(repeated[case], expected)


@pytest.mark.parametrize("case", [case for case in CASES if case != "noise"])
@pytest.mark.parametrize("chunks", (2, 4, 8))
def test_as_one_call(case, chunks):
    """In float32 closely; in bfloat16 at most twice as far from float32 as one call."""
    cp = ContextParallel(None, CASES[case].get("layout", "head_tail"), chunks)
    found, expected = run(cp, case), plain(case)
    exact = plain(case, torch.float32)
    assert (found["indices"] != expected["indices"]).float().mean() <= (
        0 if found["o"].dtype == torch.float32 else 0.01
    )
    for name in found.keys() - {"indices"}:
        size = exact[name].abs().max()
        if found[name].dtype == torch.float32:
            assert (found[name] - expected[name]).abs().max() <= CLOSE * size, name
        else:
            error, allowed = ((t[name].float() - exact[name]).norm() for t in (found, expected))
            assert error <= 2 * allowed, name


@pytest.mark.bits
@pytest.mark.parametrize("case", [case for case in CASES if case != "noise"])
def test_kv_heads_gathered_one_by_one(case):
    """The bits of all heads at once."""
    options = CASES[case]
    cp = ContextParallel(None, options.get("layout", "head_tail"), CHUNKS)
    both = [run(cp, case, options | {"at_once": at_once}) for at_once in (1, 2)]
    same_bits(*both)


def test_how_many_heads_are_gathered():
    """On a GPU: the fewest whose calls have 4 million rows of queries; on a CPU all."""
    for rows, heads, at_once in (
        *((2**22, 4, 1), (2**22 - 1, 4, 2), (2**21, 4, 2), (2**20, 4, 4), (2**19, 4, 4), (0, 4, 4)),
        *((2**21, 6, 2), (2**20, 6, 6), (2**21, 3, 3), (2**22, 1, 1), (2**20, 1, 1)),
    ):
        assert heads_at_once(rows, heads) == at_once


def test_a_type_without_kernels():
    if DEVICE == "cuda":
        pytest.skip("GPUs have kernels for float16")
    q, gates, k = (torch.zeros(1, S, heads, width, dtype=torch.float16) for heads, width in ((4, 16), (4, 3), (2, 16)))
    with pytest.raises(NotImplementedError, match=r"backend cpu: float16: takes float32 and bfloat16"):
        nsa.parallel.native_sparse_attention(q, k, k, gates, ContextParallel(chunks=4), cfg=CFG)


def test_layer(ranks):
    expected = layer_step(None)
    assert (expected["replayed"] - expected["o"]).abs().max() > 1e-2
    for *_, found, _ in ranks:
        assert found.keys() == expected.keys()
        for name, t in expected.items():
            assert (found[name] - t).abs().max() <= 2 * CLOSE * t.abs().max(), name


def test_the_layer_of_the_reference_refuses():
    layer = nsa.reference.NativeSparseAttention(32, 4, 2, 16, cfg=CFG)
    layer.context_parallel = ContextParallel()
    with pytest.raises(ValueError, match=r"^context_parallel: must be None in the layer of nsa\.reference"):
        layer(torch.zeros(1, S, 32))


def test_copies_of_a_layer_have_its_ranks(monkeypatch):
    layer = nsa.NativeSparseAttention(32, 4, 2, 16, cfg=CFG)
    layer.context_parallel = ContextParallel(chunks=4)
    monkeypatch.setattr(layer.context_parallel, "group", sys)  # can be copied as little as a process group
    assert copy.deepcopy(layer).context_parallel is layer.context_parallel


def test_every_rank_refuses_what_one_rank_gives(ranks):
    for _, _, told, *_ in ranks:
        others = {name: found for name, found in told.items() if name != "dropped gradient"}
        assert {name: found for name, found in others.items() if found[1] not in found[0]} == {}


def test_a_rank_without_a_gradient_takes_part(ranks):
    """Its backward has the bits of a gradient of zeros."""
    for _, _, told, *_ in ranks:
        found, expected = told["dropped gradient"]
        assert torch.equal(found, expected) and expected.any()


@pytest.mark.parametrize("cuts", (None, [0, 21, 24, 32]))
def test_gradcheck(cuts, monkeypatch):
    monkeypatch.setenv("NSA_BACKEND", "reference")
    cfg = nsa.NSAConfig(kernel_size=4, kernel_stride=2, block_size=16, topk=2, init_blocks=0, window_size=6)
    generator = torch.Generator().manual_seed(4)
    rows = (1, 32) if cuts is None else (32,)

    def random(*shape):
        return torch.randn(*rows, *shape, generator=generator, dtype=torch.float64).requires_grad_()

    inputs = random(2, 4), random(1, 4), random(1, 2), random(2, 3)
    phi = nsa.initial_compression_weights("linear", 4, 4).to(torch.float64)
    w1 = phi.w1.requires_grad_()
    offsets = None if cuts is None else torch.tensor(cuts, dtype=torch.int32)
    indices = torch.tensor([0, 1], dtype=torch.int32).expand(*rows, 1, 2).contiguous()
    cp = ContextParallel(chunks=4)

    def function(q, k, v, gates, w1):
        weights = nsa.CompressionWeights("linear", phi.pe, w1, phi.b1)
        return nsa.parallel.native_sparse_attention(
            q, k, v, gates, cp, cfg=cfg, weights_k=weights, indices=indices, cu_seqlens=offsets
        )

    assert torch.autograd.gradcheck(function, (*inputs, w1), fast_mode=True)


def test_layouts():
    assert chunk_owners("head_tail", 2, None) == [0, 1, 1, 0]
    assert chunk_owners("head_tail", 2, 8) == [0, 1, 1, 0, 0, 1, 1, 0]
    assert chunk_owners("contiguous", 2, 4) == [0, 0, 1, 1]
    with pytest.raises(ValueError, match=r"chunks = 6: must be a multiple of 4"):
        chunk_owners("head_tail", 2, 6)
    with pytest.raises(ValueError, match="layout = 'ring': must be head_tail or contiguous"):
        ContextParallel(layout="ring")
    with pytest.raises(ValueError, match="reduction = 'ring': must be all_to_all or reduce_scatter"):
        ContextParallel(reduction="ring")
    with pytest.raises(TypeError, match=r"group: int: must be torch\.DeviceMesh or torch.ProcessGroup or None"):
        ContextParallel(3)


@pytest.mark.parametrize("ranks", (1, 2, 4))
def test_the_order_of_megatron(ranks):
    """Of 2P chunks a rank has numbers r and 2P - 1 - r."""
    x = torch.arange(2 * 24).view(2, 24)
    for rank in range(ranks):
        cp = ContextParallel()
        cp.owners = chunk_owners("head_tail", ranks, None)
        cp.own = cp.chunks_of(rank)
        theirs = x.unflatten(1, (2 * ranks, -1))[:, [rank, 2 * ranks - 1 - rank]].flatten(1)
        assert torch.equal(cp.shard(x), theirs)


def test_the_guides_module_for_megatron():
    guide = (Path(__file__).parents[3] / "docs/guide/scale.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(class Megatron.*?)```", guide, re.DOTALL)
    names = {"torch": torch, "nsa": nsa}
    exec(code, names)
    torch.manual_seed(0)
    layer = nsa.NativeSparseAttention(32, 4, 2, 16, cfg=CFG)
    x = torch.randn(S, 2, 32)
    expected = layer(x.transpose(0, 1)).transpose(0, 1)
    found, bias = names["MegatronSelfAttention"](layer, None)(x, attention_mask=None, rotary_pos_emb=None)
    assert bias is None and (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("offsets", (None, CUTS, [0, 256], [0, *range(5, 256, 7), 256]))
def test_every_block_is_made_once(offsets):
    """The chunks' own blocks are those of the global sequence, in order."""
    documents = [0, S] if offsets is None else offsets
    starts = []
    for begin, end in pairwise(documents):
        starts += [begin + i * CFG.kernel_stride for i in range(CFG.num_compressed(end - begin))]
    for chunks in (1, 2, 8, 16):
        found = []
        for chunk in divide(S, chunks, CFG, offsets):
            assert len(found) == chunk.own_blocks[0]
            within = [block for block in starts if chunk.rows[0] <= block < chunk.rows[1]]
            found += within
            assert len(found) == chunk.own_blocks[1]
        assert found == starts


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    work(sys.argv[1])
