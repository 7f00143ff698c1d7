#!/usr/bin/env python3
"""Times public implementations of Native Sparse Attention and this one: one GPU, one problem, one run.

    python bench/peers/peers.py --xunhaolai FOLDER --flash-nsa FOLDER --json bench/results/peers.json

The folders hold github.com/XunhaoLai/native-sparse-attention-triton and
github.com/mdy666/Scalable-Flash-Native-Sparse-Attention; those that are missing or do not load are
skipped. They need the packages triton and einops.

B = 1, bfloat16, default hyperparameters, compression by the mean; H = 64, Hkv = 4 and D = 128 unless said otherwise.
Within a stage calls of the implementations alternate, L2 is flushed before every call, and times are medians. Selected
attention and end to end use given blocks, those of `nsa bench --selection` (model-like, random, clustered), while each
implementation's own selection still runs. The others have no sliding window, so torch's
FlashAttention-2 computes it. Dense attention is that of torch by cuDNN and by FlashAttention-2, which gets its values
padded where they are narrower than the keys, and of these where a package is installed:

- FlashAttention-3: flash_attn_3, xformers 0.0.34 (`pip install --no-deps`, with libcudart.so.12 on the library path),
  or one without a backward, fa3-fwd or tokenspeed-fa3
- FlashAttention-4: sgl-fa4 or flash-attn-4

They are refused where they differ from torch in float32.

`nsa bench --peers` takes the JSON into its table.
"""

import argparse
import importlib
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch.nn.attention import SDPBackend

from dense import Dense, Flash3, Flash4, padded

sys.path.insert(0, str(Path(__file__).parents[1]))
from options import integer, integers

KERNEL, STRIDE, BLOCK, TOPN, INIT, LOCAL, WINDOW = 32, 16, 64, 16, 1, 2, 512
PATTERNS = ("model-like", "random", "clustered")
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "build-gpu" / "bin" / "nsa"


class Problem(NamedTuple):
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def scale(self):
        return self.key_dim**-0.5


def given_blocks(program, pattern, length, kv_heads, heads=64):
    """The blocks that `nsa bench --selection PATTERN` attends to, int32 (length, kv_heads, TOPN): ascending, then -1;
    and the share of a query's blocks that the previous query has too, None without a choice."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "blocks.safetensors"
        options = ["--lengths", length, "--heads", heads, "--kv-heads", kv_heads, "--selection", pattern]
        command = [program, "bench", "--device", "cpu", *map(str, options), "--write-blocks", path]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with safe_open(path, "pt") as file:
            overlap = json.loads(file.metadata()["layers.0.neighbour_overlap"])
            return file.get_tensor("layers.0"), overlap


# ------------------------------------------------------------------------------------------ the sliding window of peers


def window_forward(q, k, v, cu_seqlens, scale):
    """o, lse and the random state, with values and o as wide as the keys."""
    length = q.shape[0]
    arguments = (cu_seqlens, cu_seqlens, length, length, 0.0, True, False)
    window = {"window_size_left": WINDOW - 1, "window_size_right": 0}
    v = padded(v, q.shape[-1])
    return torch.ops.aten._flash_attention_forward(q, k, v, *arguments, scale=scale, **window)[:4]


def window_backward(d_o, q, k, v, o, lse, state, unused, cu_seqlens, scale):
    length, width = q.shape[0], v.shape[-1]
    arguments = (o, lse, cu_seqlens, cu_seqlens, length, length, 0.0, True, state, unused)
    window = {"window_size_left": WINDOW - 1, "window_size_right": 0}
    d_o, v = (padded(t, q.shape[-1]) for t in (d_o.contiguous(), v))
    d_q, d_k, d_v = torch.ops.aten._flash_attention_backward(d_o, q, k, v, *arguments, scale=scale, **window)
    return d_q, d_k, d_v[..., :width]


class Window(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, scale):
        o, lse, state, unused = window_forward(q, k, v, cu_seqlens, scale)
        ctx.save_for_backward(q, k, v, o, lse, state, unused, cu_seqlens)
        ctx.scale = scale
        return o[..., : v.shape[-1]]

    @staticmethod
    def backward(ctx, d_o):
        return *window_backward(d_o, *ctx.saved_tensors, ctx.scale), None, None


# ---------------------------------------------------------------------------------------------------- implementations
# Tensors are (length, heads, dim); each class has the same methods.


class Implementation:
    """An implementation of NSA, stage by stage."""

    def stages(self, inputs, branches, chosen):
        """(stage, call, inputs of its gradient)."""
        q, k, v, logits = inputs
        k_c, v_c = (t.detach().requires_grad_() for t in self.compress(k, v))
        own = {pattern: self.native(blocks) for pattern, blocks in chosen.items()}
        yield "compress k and v", lambda: self.compress(k, v), (k, v)
        yield "compressed attention, selection", lambda: self.attend_and_select(q, k_c, v_c), (q, k_c, v_c)
        for pattern, blocks in own.items():
            yield f"selected attention, {pattern}", lambda b=blocks: self.selected(q, k, v, b), (q, k, v)
        yield "sliding window", lambda: self.window(q, k, v), (q, k, v)
        yield "combine", lambda: self.combine(*branches, logits), (*branches, logits)
        for pattern, blocks in own.items():
            yield f"end to end, {pattern}", lambda b=blocks: self.end_to_end(*inputs, b), inputs


class Ours(Implementation):
    name = "nsa"

    def __init__(self, _folder, _problem):
        import nsa
        from nsa._registration import call

        self.call = call
        self.nsa, self.cfg, self.mean = nsa, nsa.NSAConfig(), nsa.CompressionWeights("mean")

    def begin(self, length):
        pass

    def native(self, chosen):
        return chosen[None].contiguous()

    def compress(self, k, v):
        return tuple(self.nsa.compress(t[None], self.mean, self.cfg)[0] for t in (k, v))

    def attend_and_select(self, q, k_c, v_c):
        o, lse = self.nsa.compressed_attention(q[None], k_c[None], v_c[None], self.cfg)
        self.nsa.select_blocks(q[None], k_c[None], lse, self.cfg)
        return o

    def selected(self, q, k, v, blocks):
        return self.nsa.selected_attention(q[None], k[None], v[None], blocks, BLOCK)[0]

    def window(self, q, k, v):
        return self.nsa.sliding_window_attention(q[None], k[None], v[None], WINDOW)[0]

    def combine(self, cmp, slc, swa, logits):
        return self.nsa.combine(cmp[None], slc[None], swa[None], logits.sigmoid()[None])

    def end_to_end(self, q, k, v, logits, blocks):
        q, k, v, gates = (t[None] for t in (q, k, v, logits.sigmoid()))
        # The operator: nsa.native_sparse_attention itself takes no blocks. What its backward needs is kept.
        options = (self.cfg.as_list(), None, None, None, 0.0, 0, None, None, 0, 0, blocks, True, True, True)
        mean = self.mean.as_arguments()
        operator = torch.ops.nsa.native_sparse_attention
        return self.call(operator, q, k, v, k, v, k, v, gates, *mean, *mean, *options)[0].squeeze(0)


class Peer(Implementation):
    def __init__(self, folder, problem):
        self.problem = problem
        self.load(folder)

    def begin(self, length):
        self.length, self.compressed = length, (length - KERNEL) // STRIDE + 1
        self.cu_seqlens = torch.tensor([0, length], dtype=torch.int32, device="cuda")
        self.cu_compressed = torch.tensor([0, self.compressed], dtype=torch.int32, device="cuda")

    def native(self, chosen):
        return chosen.transpose(0, 1).contiguous()

    def window(self, q, k, v):
        return Window.apply(q, k, v, self.cu_seqlens, self.problem.scale)

    def combine(self, cmp, slc, swa, logits):
        g = logits.sigmoid()
        return g[..., 0:1] * cmp + g[..., 1:2] * slc + g[..., 2:3] * swa

    def end_to_end(self, q, k, v, logits, blocks):
        cmp = self.attend_and_select(q, *self.compress(k, v))
        return self.combine(cmp, self.selected(q, k, v, blocks), self.window(q, k, v), logits)


class XunhaoLai(Peer):
    name = "xunhaolai"

    def load(self, folder):
        if self.problem.key_dim != self.problem.value_dim:
            raise ValueError("it takes keys and values of one head dim")
        sys.path.insert(0, str(folder))
        self.ops = importlib.import_module("native_sparse_attention.ops")

    def compress(self, k, v):
        return tuple(self.ops.avgpool_compress(t, None, self.cu_seqlens, KERNEL, STRIDE)[0] for t in (k, v))

    def attend_and_select(self, q, k_c, v_c):
        lengths = (self.cu_seqlens, self.cu_compressed, self.length, self.compressed)
        return self.ops.compressed_attention(
            q, k_c, v_c, KERNEL, STRIDE, BLOCK, TOPN, *lengths, self.problem.scale, INIT, LOCAL
        )[0]  # fmt: skip

    def selected(self, q, k, v, blocks):
        return self.ops.topk_sparse_attention(q, k, v, blocks, BLOCK, self.cu_seqlens, self.problem.scale)


class FlashNsa(Peer):
    """End to end is its fused layer with given blocks. With values narrower than keys the layer needs FlashAttention-3;
    then end to end is the stages in sequence."""

    name = "flash_nsa"

    def load(self, folder):
        if not importlib.util.find_spec("pkg_resources"):  # newer setuptools have none; one function of it is used
            version = importlib.import_module("packaging.version").parse
            sys.modules["pkg_resources"] = types.SimpleNamespace(parse_version=version)
        for name in ("flash_nsa", "flash_nsa.modules"):  # without their __init__, which wants flash-attn
            path = folder.joinpath(*name.split("."))
            if not path.is_dir():
                raise ImportError(f"no folder {path}")
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [str(path)]

        def load(name):
            return importlib.import_module(f"flash_nsa.{name}")

        self.helper, self.layer = load("utils").NSAHelper, load("modules.megatron_level_nsa")
        self.pool, self.attend = load("ops.compress_kv").mean_pooling, load("ops.compress_attn").compress_attn
        self.topn, self.attend_selected = load("ops.topk").slc_topk_indices, load("ops.select_attn").select_attn
        self.gate = load("ops.combine").fused_sigmoid_combine
        self.helper.set_hyperparameters(KERNEL, STRIDE, BLOCK, WINDOW, TOPN, INIT, LOCAL)
        self.layer.slc_topk_indices = self.select_and_take_given
        self.layer.swa_fwd, self.layer.swa_bwd = self.layer_window, self.layer_window_backward

    def begin(self, length):
        super().begin(length)
        self.helper.init_cu_seqlens(self.cu_seqlens)

    def native(self, chosen):
        return super().native(chosen.masked_fill(chosen < 0, -(-self.length // BLOCK)))  # its padding

    def compress(self, k, v):
        return self.pool(k), self.pool(v)

    def attend_and_select(self, q, k_c, v_c):
        o, lse = self.attend(q, k_c, v_c, self.problem.scale)
        options = {"maybe_efficient_version": True, "scale_slc_p": True}
        self.topn(q.detach(), k_c.detach(), lse.detach(), self.problem.scale, **options)
        return o

    def selected(self, q, k, v, blocks):
        return self.attend_selected(q, k, v, blocks, self.problem.scale)

    def combine(self, cmp, slc, swa, logits):
        return self.gate(cmp, slc, swa, logits)

    def end_to_end(self, q, k, v, logits, blocks):
        if self.problem.key_dim != self.problem.value_dim:
            return super().end_to_end(q, k, v, logits, blocks)
        self.given = blocks
        return self.layer.NSAFunction.apply(q, k, v, logits, None, None, self.problem.scale)

    def select_and_take_given(self, *arguments, **options):
        return self.given, self.topn(*arguments, **options)[1]

    def layer_window(self, q, k, v, **_):
        o, lse, *self.state = window_forward(q, k, v, self.cu_seqlens, self.problem.scale)
        return o, lse

    def layer_window_backward(self, q, k, v, o, lse, d_o, **_):
        return window_backward(d_o, q, k, v, o, lse, *self.state, self.cu_seqlens, self.problem.scale)


def refuse_wrong(dense, problem, length=896):
    """Raises ValueError where an implementation of causal attention, or its gradients, differ from torch in float32."""
    heads, kv_heads, key_dim, value_dim = problem
    inputs = leaf(length, heads, key_dim), leaf(length, kv_heads, key_dim), leaf(length, kv_heads, value_dim)
    exact = [t.detach().float().requires_grad_() for t in inputs]
    outs = {"o": (dense.attend(*inputs), Dense("exact", SDPBackend.MATH, length).attend(*exact))}
    o, expected = outs["o"]
    if o.requires_grad:
        d_o = torch.randn_like(o)
        gradients = torch.autograd.grad(o, inputs, d_o), torch.autograd.grad(expected, exact, d_o.float())
        outs |= zip(("dq", "dk", "dv"), zip(*gradients, strict=True), strict=True)
    for name, (ours, theirs) in outs.items():
        difference = relative_difference((ours,), (theirs,))
        if not difference < 1e-2:
            raise ValueError(f"{name} differs from torch's in float32 by {difference:.1e}; allowed are 1e-2")


# ------------------------------------------------------------------------------------------------------------- timing


def medians(calls, repeats, budget=5.0):
    """Milliseconds of each call, which take turns; no further round after `budget` seconds. A call that fails the first
    time is reported and left out."""
    flush, times = torch.empty(2**28, dtype=torch.uint8, device="cuda"), {}
    for name, call in calls.items():
        try:
            call()  # compiles and tunes
            times[name] = []
        except Exception as error:
            print(f"  {name} failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    start = time.monotonic()
    for i in range(repeats + 1):
        if i > 1 and time.monotonic() - start > budget:
            break
        for name in times:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.fill_(i)
            begin.record()
            calls[name]()
            end.record()
            torch.cuda.synchronize()
            if i > 0:
                times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(found) for name, found in times.items()}


def leaf(*shape, deviation=1.0):
    return (torch.randn(*shape, device="cuda") * deviation).to(torch.bfloat16).requires_grad_()


def measure_stage(calls, by, repeats):
    """Forward and backward of one stage: {implementation: {"forward": ms, "backward": ms, "difference": to ours}}, the
    last None where we are not among them."""
    forward = medians(calls, repeats)
    outs = {name: calls[name]() for name in forward}
    outs = {name: out if isinstance(out, tuple) else (out,) for name, out in outs.items()}
    torch.manual_seed(1)
    like = [torch.randn_like(o.flatten()) for o in next(iter(outs.values()), ())]
    gradients = {name: [g.view_as(o) for g, o in zip(like, out, strict=True)] for name, out in outs.items()}

    def backward(name):
        return lambda: torch.autograd.grad(outs[name], by[name], gradients[name], retain_graph=True)

    backwards = medians({name: backward(name) for name in outs}, repeats)
    found = {}
    for name, ms in forward.items():
        difference = relative_difference(outs[name], outs["nsa"]) if "nsa" in outs else None
        found[name] = {"forward": ms, "backward": backwards.get(name), "difference": difference}
    return found


def relative_difference(out, reference):
    pairs = [(a.flatten().float(), b.flatten().float()) for a, b in zip(out, reference, strict=True)]
    different = sum((a - b).square().sum().item() for a, b in pairs)
    return math.sqrt(different / sum(b.square().sum().item() for _, b in pairs))


def measure_length(implementations, problem, program, length, repeats, only):
    torch.manual_seed(0)
    heads, kv_heads, key_dim, value_dim = problem
    inputs = (leaf(length, heads, key_dim), leaf(length, kv_heads, key_dim), leaf(length, kv_heads, value_dim),
              leaf(length, heads, 3))  # fmt: skip
    branches = [leaf(length, heads, value_dim) for _ in range(3)]
    given = {pattern: given_blocks(program, pattern, length, kv_heads, heads) for pattern in PATTERNS}
    chosen = {pattern: blocks.cuda() for pattern, (blocks, _) in given.items()}
    overlaps = {pattern: overlap for pattern, (_, overlap) in given.items()}
    print(f"\n{length} tokens; neighbour overlap " + ", ".join(f"{o} ({p})" for p, o in overlaps.items()))
    calls, by = {}, {}
    for implementation in implementations:
        implementation.begin(length)
        for stage, call, differentiated in implementation.stages(inputs, branches, chosen):
            if only not in stage:
                continue
            calls.setdefault(stage, {})[implementation.name] = call
            by.setdefault(stage, {})[implementation.name] = differentiated
    print(f"  {'forward / backward, ms':34}" + "".join(f"{i.name:>20}" for i in implementations))
    stages = {}
    for stage in calls:
        stages[stage] = found = measure_stage(calls[stage], by[stage], repeats)

        def cell(name, stage=stage, found=found):
            if name not in calls[stage]:
                return ""
            if name not in found:
                return "failed"
            result = found[name]
            back = f"{result['backward']:.2f}" if result["backward"] else "failed"
            return f"{result['forward']:.2f} / {back}"

        print(f"  {stage:34}" + "".join(f"{cell(i.name):>20}" for i in implementations), flush=True)
        torch.cuda.empty_cache()
    measured = [(r["difference"], name, stage) for stage, found in stages.items() for name, r in found.items()]
    worst = max((one for one in measured if one[0] is not None), default=None)
    if worst:
        print(f"  largest difference from ours, relative: {worst[0]:.1e} ({worst[1]}, {worst[2]})")
    return {"neighbour_overlap": overlaps, "stages": stages}


def commit_of(folder):
    if (folder / ".git").exists():
        return subprocess.run(
            ["git", "-C", folder, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip()
    return (folder / "COMMIT").read_text().strip() if (folder / "COMMIT").exists() else None


def load(kinds, problem):
    """Loads those of [(class, folder)] that are available."""
    loaded = []
    for kind, folder in kinds:
        try:
            if folder is None or not folder.is_dir():
                raise ImportError("no folder was given" if folder is None else f"there is no folder {folder}")
            loaded.append(kind(folder, problem))
        except Exception as error:
            print(f"skipped {kind.name}: {error}")
    return loaded


def dims_of(text):
    key_dim, value_dim = integers(text)
    return key_dim, value_dim


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--xunhaolai", type=Path, metavar="FOLDER")
    parser.add_argument("--flash-nsa", type=Path, metavar="FOLDER")
    parser.add_argument("--program", type=Path, default=PROGRAM, help="the program nsa, which chooses the blocks")
    parser.add_argument("--lengths", type=partial(integers, least=KERNEL), default="8192,32768,65536")
    parser.add_argument("--heads", type=integer, default=64)
    parser.add_argument("--kv-heads", type=integer, default=4)
    parser.add_argument(
        "--head-dims", type=dims_of, default="128,128", metavar="DK,DV", help="head dimensions of keys and values"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="run only stages whose name contains this text")
    parser.add_argument(
        "--longest-dense", type=integer, default=131072, help="maximum length of dense attention, tokens"
    )
    parser.add_argument("--repeats", type=integer, default=7)
    parser.add_argument("--json", type=Path, help="file for the results, rewritten after every length")
    options = parser.parse_args()
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")
    if not options.program.is_file():
        parser.error(f"--program: there is no file {options.program}")
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing to time")
    problem = Problem(options.heads, options.kv_heads, *options.head_dims)
    folders = {XunhaoLai: options.xunhaolai, FlashNsa: options.flash_nsa}
    torchs = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}
    implementations = [Ours(ROOT, problem), *load(folders.items(), problem)]
    implementations += [Dense(name, backend, options.longest_dense) for name, backend in torchs.items()]
    for kind in (Flash3, Flash4):
        try:
            dense = kind(options.longest_dense)
            refuse_wrong(dense, problem)
            implementations.append(dense)
        except Exception as error:
            print(f"skipped {kind.name}: {error}")
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu, driver = subprocess.check_output(query, text=True).splitlines()[0].split(", ")
    shape = "H={} Hkv={} Dk={} Dv={}".format(*problem)
    about = {
        "gpu": gpu,
        "driver": driver,
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__,
        "commits": {
            "nsa": os.environ.get("COMMIT") or commit_of(ROOT),
            **{kind.name: commit_of(f) for kind, f in folders.items() if f},
        },
        "problem": f"B=1 {shape} bfloat16, mean, defaults",
        "settings": {
            **{"num_heads": problem.heads, "num_kv_heads": problem.kv_heads, "dtype": "bfloat16"},
            **{"head_dim": problem.key_dim, "v_head_dim": problem.value_dim},
        },
        "unit": "ms",
    }
    print(f"{gpu}, driver {driver}, torch {torch.__version__}: {about['problem']}")
    lengths = {}
    for length in options.lengths:
        lengths[length] = measure_length(
            implementations, problem, options.program, length, options.repeats, options.only
        )
        if options.json:
            found = {**about, "lengths": dict(sorted(lengths.items()))}
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
