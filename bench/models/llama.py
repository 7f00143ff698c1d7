#!/usr/bin/env python3
"""A Llama of 1.2 billion parameters through transformers: dense by sdpa, and converted to Native Sparse Attention.

    python bench/models/llama.py --json bench/results/llama.json

Three models of the same random weights in bfloat16, in the shape of Llama 3.2 1B: `dense`, LlamaForCausalLM with
attn_implementation="sdpa"; `nsa`, what nsa.hf.convert makes of it; `layers`, the same sparse layers without
transformers, with the same bits. Medians for each length:

    prefill   a prompt into a new cache, logits of its last token, as `generate` begins
    train     forward, backward and a step of fused AdamW; checkpoints of every layer, loss in chunks of 8192 tokens
    decode    a step of greedy generation with the cache that grows, after such a prefill; also 8 sequences at once
    graph     the same for one sequence with a cache of fixed size, its kernels replayed as one CUDA graph

`equal` holds a small model on the device, and on the CPU, against the same in float64 and plain torch, as
docs/operations.md bounds it; blocks are those that the device selected.

The JSON is written after every figure. Exit code 1: results are not within the bound, or a part failed.
"""

import argparse
import functools
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager
from datetime import date
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import nsa
import nsa.hf
import nsa.hf.models

sys.path.insert(0, str(Path(__file__).parents[1]))
from options import integer, integers

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {
    "1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
}
PARTS = ("prefill", "equal", "train", "decode", "graph")
DTYPES = ("bfloat16", "float32")  # of `equal`
LOSS_CHUNK = 8192
STEPS = 12  # of decoding, after three that are not timed


def configuration(shape, length):
    """A Llama's, with positions for `length` tokens and some more."""
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    positions = length + 256
    return LlamaConfig(
        **SHAPES[shape], max_position_embeddings=positions, rope_parameters=rope, tie_word_embeddings=True
    )


# ------------------------------------------------------------------------------------- the layers without transformers


class Norm(nn.Module):
    """As LlamaRMSNorm computes it."""

    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config, rope):
        super().__init__()
        heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        options = {name: config.nsa[name] for name in ("share_kv", "phi", "phi_hidden", "phi_per_kv_head")}
        self.self_attn = nsa.NativeSparseAttention(
            config.hidden_size, *heads, cfg=config.nsa_config(), rope=rope, **options
        )
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, **cached):
        x = x + self.self_attn(self.input_layernorm(x), **cached)
        return x + self.mlp(self.post_attention_layernorm(x))


class Layers(nn.Module):
    """The sparse model's layers, sharing its parameters."""

    def __init__(self, sparse):
        super().__init__()
        config, device = sparse.config, sparse.device
        positions = torch.arange(config.max_position_embeddings, device=device)[None]
        tables = sparse.model.rotary_emb(torch.empty(0, device=device), position_ids=positions)
        rope = tuple(table[0, :, : config.head_dim // 2].contiguous() for table in tables)
        with torch.device("meta"):
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(Layer(config, rope) for _ in range(config.num_hidden_layers))
            self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.load_state_dict(sparse.model.state_dict(keep_vars=True), assign=True)

    def forward(self, ids, caches=None, first_chunk=False):
        """Hidden states; `caches`: one for each layer, which take the tokens."""
        x = self.embed_tokens(ids)
        for i, layer in enumerate(self.layers):
            if caches is not None:
                x = layer(x, cache=caches[i], first_chunk=first_chunk)
            else:
                x = checkpoint(layer, x, use_reentrant=False) if self.training else layer(x)
        return self.norm(x)

    def make_caches(self, batch, length):
        """Room for `length` tokens, on the device."""
        return [layer.self_attn.make_cache(batch, length) for layer in self.layers]

    def head(self, hidden):
        return F.linear(hidden, self.embed_tokens.weight)


# ------------------------------------------------------------------------------------------ one interface for all three


class ThroughTransformers:
    def __init__(self, model):
        self.model, self.config = model, model.config

    def start(self, ids, room=0):
        """The prompt into a new cache, of fixed size if `room` is given; logits of its last token."""
        cache = StaticCache(config=self.config, max_cache_len=room) if room else DynamicCache(config=self.config)
        return self.step(ids, cache), cache

    def step(self, ids, cache):
        return self.model(ids, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]

    def repeated(self, cache, count):
        cache.batch_repeat_interleave(count)
        return cache

    def begin_training(self):
        self.model.train()
        self.model.activation_checkpointing_enable()
        return self.model

    def end_training(self):
        self.model.activation_checkpointing_disable()
        self.model.eval().zero_grad()

    def hidden(self, ids):
        return self.model.model(ids, use_cache=False).last_hidden_state

    def head(self, hidden):
        return self.model.lm_head(hidden)


class WithoutTransformers:
    ROOM = 64

    def __init__(self, model):
        self.model = model

    def start(self, ids, room=0):
        caches = self.model.make_caches(ids.shape[0], room or ids.shape[1] + self.ROOM)
        return self.model.head(self.model(ids, caches, first_chunk=True)[:, -1]), caches

    def step(self, ids, caches):
        return self.model.head(self.model(ids, caches)[:, -1])

    def repeated(self, caches, count):
        for cache in caches:
            cache.repeat(count)
        return caches

    def begin_training(self):
        return self.model.train()

    def end_training(self):
        self.model.eval().zero_grad()

    def hidden(self, ids):
        return self.model(ids)

    def head(self, hidden):
        return self.model.head(hidden)


# --------------------------------------------------------------------------------------------------------------- timing


class Clock:
    """Seconds of calls, and their peak memory without the weights."""

    def __init__(self, device):
        self.cuda = torch.device(device).type == "cuda"
        self.before = 0

    def wait(self):
        if self.cuda:
            torch.cuda.synchronize()

    def start_of_memory(self):
        """Excludes the memory that is allocated now."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()

    def peak(self):
        """GiB since then, None on a CPU."""
        return (torch.cuda.max_memory_allocated() - self.before) / 2**30 if self.cuda else None

    def time(self, call):
        self.wait()
        begin = time.perf_counter()
        result = call()
        self.wait()
        return time.perf_counter() - begin, result

    def medians(self, calls, repeats):
        """For each name its figures and the peak memory; the calls take turns, after one of each that is not timed."""
        seconds, peak = {name: [] for name in calls}, {}
        self.start_of_memory()
        for i in range(repeats + 1):
            for name, call in calls.items():
                if self.cuda:
                    torch.cuda.reset_peak_memory_stats()
                took, result = self.time(call)
                del result
                peak[name] = self.peak()
                if i:
                    seconds[name].append(took)
        return {name: figures(times, peak[name]) for name, times in seconds.items()}


def figures(seconds, peak=None):
    """Median, least and most in ms, and the peak memory in GiB."""
    return {
        "peak_gib": peak,
        "ms": 1e3 * statistics.median(seconds),
        "least_ms": 1e3 * min(seconds),
        "most_ms": 1e3 * max(seconds),
        "repeats": len(seconds),
    }


def training_step(model, optimizer, ids):
    """Forward, backward and AdamW; the logits of a chunk at a time are in memory."""

    def loss_of(hidden, labels):
        return F.cross_entropy(model.head(hidden).float(), labels, reduction="sum")

    hidden, labels = model.hidden(ids)[0, :-1], ids[0, 1:]
    parts = zip(hidden.split(LOSS_CHUNK), labels.split(LOSS_CHUNK), strict=True)
    loss = sum(checkpoint(loss_of, *part, use_reentrant=False) for part in parts) / labels.numel()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@torch.no_grad()
def greedy_steps(model, clock, logits, cache, count):
    """Seconds of each of `count` steps, and the tokens."""
    seconds, tokens = [], [logits.argmax(-1, keepdim=True)]

    def step():
        return model.step(tokens[-1], cache).argmax(-1, keepdim=True)

    for _ in range(count):
        took, token = clock.time(step)
        seconds.append(took)
        tokens.append(token)
    return seconds, torch.cat(tokens, 1)


@torch.no_grad()
def replays(model, clock, ids, count):
    """Seconds of each replay of a captured step on a cache of fixed size, and the tokens."""
    room = -(-(ids.shape[1] + count + 8) // 64) * 64
    logits, cache = model.start(ids, room)
    token = logits.argmax(-1, keepdim=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            token.copy_(model.step(token, cache).argmax(-1, keepdim=True))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token.copy_(model.step(token, cache).argmax(-1, keepdim=True))
    seconds, tokens = [], []
    for _ in range(count):
        seconds.append(clock.time(graph.replay)[0])
        tokens.append(token.clone())
    return seconds, torch.cat(tokens, 1)


# ------------------------------------------------------------------------------------------------ equality with the CPU


@contextmanager
def selections(kept, given=None):
    """Puts the blocks that each sparse layer selects into `kept`, and makes the layers take `given` ones instead."""
    operations = nsa.hf.models.functional, nsa.hf.models.reference
    before = [module.native_sparse_attention for module in operations]

    def recording(attend, *arguments, **options):
        indices = None if given is None else given[len(kept)].to(arguments[0].device)
        o, selected = attend(*arguments, **options | {"indices": indices, "return_indices": True})
        kept.append(selected)
        return (o, selected) if options["return_indices"] else o

    for module, attend in zip(operations, before, strict=True):
        module.native_sparse_attention = functools.partial(recording, attend)
    try:
        yield
    finally:
        for module, attend in zip(operations, before, strict=True):
            module.native_sparse_attention = attend


@torch.no_grad()
def equality(device, dtype):
    """Errors of the logits against float64, and the bound: twice those of plain torch, and 1e-5 of the largest."""
    torch.manual_seed(1)
    length, prompt, short = 1024, 360, 376  # in the short one every block is selected
    config = configuration("tiny", length)
    config.initializer_range = config.hidden_size**-0.5  # with less, attention hardly counts
    dense = LlamaForCausalLM(config)
    weights = nsa.hf.convert(dense, nsa={"topk": 6, "window_size": 128}, phi="linear").eval()
    for layer in weights.model.layers:  # gates that let all branches count
        nn.init.normal_(layer.self_attn.gate[2].weight, std=0.2)
        nn.init.normal_(layer.self_attn.gate[2].bias)
    weights.to(dtype)
    ids = torch.randint(weights.config.vocab_size, (1, length))

    def logits(where, kind, implementation, given=None):
        # Made in its dtype: `to` would round the rotation's frequencies, too.
        model = type(weights)._from_config(weights.config, dtype=kind, attn_implementation=implementation)
        model.load_state_dict(weights.state_dict())
        model.to(where).eval()
        kept = []
        with selections(kept, given):
            whole = model(ids.to(where), use_cache=False).logits
        parts, cache = [ids[:, :short]], None
        if implementation == "nsa":
            parts, cache = [ids[:, :prompt], *ids[:, prompt:short].split(1, 1)], DynamicCache(config=model.config)
        steps = [model(part.to(where), cache=cache, use_cache=cache is not None).logits for part in parts]
        return [x.double().cpu() for x in (whole, torch.cat(steps, 1))], [x.cpu() for x in kept]

    on_device, blocks = logits(device, dtype, "nsa")
    on_cpu, own = logits("cpu", dtype, "nsa", blocks)
    plain, _ = logits("cpu", dtype, "eager", blocks)
    exact, _ = logits("cpu", torch.float64, "eager", blocks)
    found = {
        "length": length,
        "rows_with_the_same_blocks": torch.cat([(a == b).all(-1) for a, b in zip(blocks, own, strict=True)])
        .double()
        .mean()
        .item(),
    }
    for i, name in enumerate(("forward", "prefill_and_steps")):
        errors = {
            who: (x[i] - exact[i]).abs().max().item()
            for who, x in (("device", on_device), ("cpu", on_cpu), ("plain", plain))
        }
        bound = 2 * errors["plain"] + 1e-5 * exact[i].abs().max().item()
        within = errors["device"] <= bound and errors["cpu"] <= bound
        found[name] = errors | {"bound": bound, "largest": exact[i].abs().max().item(), "within": within}
    return found


# ----------------------------------------------------------------------------------------------------------- end to end


def about(options):
    """Where, when and by which command."""
    commit = os.environ.get("COMMIT")
    if not commit:
        shown = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        commit = shown.stdout.strip()
    if options.device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        name, driver = (
            subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].split(", ")
        )
    else:
        name, driver = platform.processor() or platform.machine(), ""
    return {
        "command": shlex.join(["python", "bench/models/llama.py", *options.given]),
        "gpu": name,
        "driver": driver,
        "date": date.today().isoformat(),
        "commit": commit,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "shape": SHAPES[options.shape],
        "dtype": "bfloat16",
    }


def models_of(options):
    """Models of the same weights by their names."""
    torch.manual_seed(0)
    config = configuration(options.shape, max(options.lengths))
    with torch.device(options.device):
        dense = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    sparse = nsa.hf.convert(dense)
    return {
        "dense": ThroughTransformers(dense),
        "nsa": ThroughTransformers(sparse),
        "layers": WithoutTransformers(Layers(sparse).eval()),
    }


class Run:
    """The parts, each of which puts its figures into `self.found`."""

    def __init__(self, options):
        self.options, self.clock = options, Clock(options.device)
        self.found = about(options)
        self.failed = []

    def keep(self, part, key, figures):
        self.found.setdefault(part, {})[key] = figures
        print(f"{part} {key}: {json.dumps(figures)}", flush=True)
        if self.options.json:
            self.options.json.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")

    def ids(self, length, batch=1):
        vocabulary = SHAPES[self.options.shape]["vocab_size"]
        generator = torch.Generator().manual_seed(length)
        return torch.randint(vocabulary, (batch, length), generator=generator).to(self.options.device)

    def repeats(self, length):
        return self.options.repeats or (3 if length > 32768 else 5)

    @torch.no_grad()
    def prefill(self, length):
        ids = self.ids(length)
        calls = {name: functools.partial(model.start, ids) for name, model in self.models.items()}
        found = self.clock.medians(calls, self.repeats(length))
        logits = [self.models[name].start(ids)[0] for name in ("nsa", "layers")]
        self.keep("prefill", str(length), found | {"same_bits": torch.equal(*logits)})

    def train(self, length):
        found, ids = {}, self.ids(length)
        for name, model in self.models.items():
            module = model.begin_training()
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)
            step = functools.partial(training_step, model, optimizer, ids)
            found |= self.clock.medians({name: step}, max(1, self.repeats(length) - 1))
            del optimizer, step
            model.end_training()
            self.keep("train", str(length), found)

    @torch.no_grad()
    def decode(self, length):
        for batch in self.options.batches:
            found = {}
            for name, model in self.models.items():
                self.clock.start_of_memory()
                logits, cache = model.start(self.ids(length))
                if batch > 1:
                    cache = model.repeated(cache, batch)
                seconds, _ = greedy_steps(model, self.clock, logits.repeat(batch, 1), cache, 3 + STEPS)
                found[name] = figures(seconds[3:], self.clock.peak())
                del logits, cache
                self.keep("decode", f"{length}x{batch}", found)

    def graph(self, length):
        found, tokens = {}, {}
        for name in ("nsa", "layers", "dense"):
            self.clock.start_of_memory()
            seconds, tokens[name] = replays(self.models[name], self.clock, self.ids(length), 3 + STEPS)
            found[name] = figures(seconds[3:], self.clock.peak())
            self.keep("graph", str(length), found)
        found["same_tokens"] = torch.equal(tokens["nsa"], tokens["layers"])
        self.keep("graph", str(length), found)

    def equal(self, dtype):
        found = equality(self.options.device, getattr(torch, dtype))
        self.keep("equal", dtype, found)
        if not (found["forward"]["within"] and found["prefill_and_steps"]["within"]):
            self.failed.append(f"equal {dtype}: not within the bound")

    def everything(self):
        """Parts in the order of PARTS, the longest text first; what fails is said at the end."""
        begin = time.perf_counter()
        self.models = models_of(self.options)
        for part in PARTS:
            if part not in self.options.parts:
                continue
            for what in DTYPES if part == "equal" else sorted(self.options.lengths, reverse=True):
                try:
                    getattr(self, part)(what)
                except Exception as error:
                    traceback.print_exc()
                    self.keep(part, str(what), self.found.get(part, {}).get(str(what), {}) | {"error": repr(error)})
                    self.failed.append(f"{part} {what}: {error!r}")
                if self.clock.cuda:
                    torch.cuda.empty_cache()
            print(f"{part}: done after {time.perf_counter() - begin:.0f} s", flush=True)
        if self.failed:
            print("FAILED:", *self.failed, sep="\n  ")
        return 1 if self.failed else 0


def arguments(given):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument(
        "--lengths", type=integers, default="8192,32768,65536", help="text lengths, tokens (default %(default)s)"
    )
    parser.add_argument(
        "--batches", type=integers, default="1,8", help="numbers of sequences in a decode step (default %(default)s)"
    )
    parser.add_argument("--parts", help=f"parts to run: {','.join(PARTS)} (default: all; on a CPU without graph)")
    parser.add_argument(
        "--repeats",
        type=functools.partial(integer, least=0),
        default=0,
        help="repeats per figure (default: 5, for the longest texts 3)",
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args(given)
    options.given = [word for word in given if word not in ("--json", str(options.json))]
    can = PARTS if options.device == "cuda" else PARTS[:-1]
    options.parts = can if options.parts is None else options.parts.split(",")
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"--parts {part}: must be among {', '.join(PARTS)}")
        if part not in can:
            parser.error(f"--parts {part}: needs --device cuda")
    if options.device == "cuda" and not nsa.device_count():
        parser.error("--device cuda: no GPU, or this build of nsa has no CUDA")
    return options


if __name__ == "__main__":
    sys.exit(Run(arguments(sys.argv[1:])).everything())
