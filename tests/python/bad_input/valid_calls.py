"""A good call of every public function, and what replaces its arguments."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

import nsa
from nsa import parallel, serving
from nsa.cache import NAMES
from problem import SMALL

S, H, HKV, D = 20, 2, 1, 16
HALF = torch.ones(64, D // 2)
WEIGHTS = nsa.initial_compression_weights("mlp", SMALL.kernel_size, D)
LAYER = nsa.NativeSparseAttention(32, H, HKV, D, cfg=SMALL).requires_grad_(False)
Calls = dict[str, tuple[Callable[..., Any], dict[str, Any]]]


def calls() -> Calls:
    """The function and its arguments by name, new ones each time."""
    torch.manual_seed(0)
    q, k, gates = torch.randn(1, S, H, D), torch.randn(1, S, HKV, D), torch.rand(1, S, H, 3)
    k_c, cu = torch.randn(1, SMALL.num_compressed(S), HKV, D), torch.tensor([0, 8, S], dtype=torch.int32)
    packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": S, "max_seqlen_k": S}
    o, lse = nsa.compressed_attention(q, k_c, k_c, SMALL)
    indices = nsa.select_blocks(q, k_c, lse, SMALL)
    phi = {"weights_k": WEIGHTS, "weights_v": WEIGHTS}
    own = {name: k.clone() for name in ("k_slc", "v_slc", "k_swa", "v_swa")}
    whole = {"q": q, "k": k, "v": k.clone(), "gates": gates, "indices": indices}
    branches = {**whole, "k_c": k_c, "v_c": k_c, "k_swa": k, "v_swa": k}
    options = {"softmax_scale": 0.5, "noise": 0.5, "seed": 3}
    result: Calls = {
        "compress": (nsa.compress, {"k": k[0], "weights": WEIGHTS, "cfg": SMALL, "cu_seqlens": cu}),
        "compressed_cu_seqlens": (nsa.compressed_cu_seqlens, {"cu_seqlens": cu, "cfg": SMALL}),
        "compressed_attention": (
            nsa.compressed_attention,
            {"q": q, "k_c": k_c, "v_c": k_c, "cfg": SMALL, "softmax_scale": 0.5, "seqlen_k": S},
        ),
        "select_blocks": (nsa.select_blocks, {"q": q, "k_c": k_c, "lse": lse, "cfg": SMALL, **options}),
        "selected_attention": (
            nsa.selected_attention,
            {"q": q[0], "k": k[0], "v": k[0], "indices": indices[0], "block_size": 16, "softmax_scale": 0.5, **packed},
        ),
        "sliding_window_attention": (
            nsa.sliding_window_attention,
            {"q": q[0], "k": k[0], "v": k[0], "window_size": 9, "softmax_scale": 0.5, **packed},
        ),
        "combine": (nsa.combine, {"o_cmp": o, "o_slc": o, "o_swa": o, "gates": gates}),
        "nsa_attention": (nsa.nsa_attention, {**branches, "cfg": SMALL, **options}),
        "native_sparse_attention": (
            nsa.native_sparse_attention,
            {**whole, **own, **phi, **options, "cfg": SMALL, "rope": (HALF, HALF)},
        ),
        "layer": (LAYER, {"x": torch.randn(S, 32), "cu_seqlens": cu, "max_seqlen": S, "seed": 1}),
        "rotary_tables": (
            nsa.rotary_tables,
            {"positions": torch.arange(9), "head_dim": D, "theta": 100.0, "partial_rotary_factor": 0.5},
        ),
        "rotate": (nsa.rotate, {"x": q, "cos": HALF[:S], "sin": HALF[:S]}),
    }
    for name, m in (("decode", 2), ("prefill", S)):
        step = {name: t[:, :m] for name, t in (whole | own).items()} | phi | {"rope": (HALF, HALF)}
        step |= {"num_new": torch.tensor([m], dtype=torch.int32), "softmax_scale": 0.5, "cache": make_cache()}
        result[name] = (getattr(nsa, name), step)
    fp8 = {"dtype": torch.float8_e4m3fn, "raw_dtype": torch.float32, "k_scale": 0.5, "v_scale": torch.ones(HKV)}
    result["prefill in fp8"] = (nsa.prefill, step | {"cache": make_cache(**fp8)})
    result["first chunk"] = (nsa.prefill, step | {"cache": make_cache(), "first_chunk": True})
    x = torch.randn(1, 2, 32)
    whole |= own | phi | options | {"cfg": SMALL, "rope": (HALF, HALF)}
    result["parallel.native_sparse_attention"] = (
        parallel.native_sparse_attention,
        {**whole, "cp": parallel.ContextParallel(layout="contiguous")},
    )
    result["ContextParallel.shard"] = (parallel.ContextParallel().shard, {"x": q, "dim": 1})
    result["cached layer"] = (LAYER, {"x": x, "cache": make_cache(), "num_new": torch.tensor([2], dtype=torch.int32)})
    for name, arguments in CACHE_METHODS.items():
        result[f"KVCache.{name}"] = (getattr(used_cache(), name), dict(arguments))
    tensors = {"tensors": CacheTensors(*used_cache().tensors()), "cfg": SMALL, "max_length": 64}
    result["KVCache.from_tensors"] = (nsa.KVCache.from_tensors, tensors)
    sizes = {"batch_size": 1, "num_kv_heads": 1, "head_dim": 8, "v_head_dim": 8, "cfg": SMALL, "max_length": 64}
    result["KVCache"] = (
        nsa.KVCache,
        {**sizes, "page_size": 16, "num_pages": 4, "num_prefixes": 1, "record_selections": True},
    )
    sizes = {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "cfg": SMALL, "rope_theta": 10.0}
    result["NativeSparseAttention"] = (nsa.NativeSparseAttention, {**sizes, "partial_rotary_factor": 0.5})
    result["CompressionWeights"] = (nsa.CompressionWeights, vars(WEIGHTS))
    result["initial weights"] = (
        nsa.initial_compression_weights,
        {"kind": "mlp", "kernel_size": 8, "head_dim": 8, "num_sets": 1, "hidden": 16},
    )
    return result | serving_calls()


CacheTensors = namedtuple("CacheTensors", NAMES)

CACHE_METHODS: dict[str, dict[str, Any]] = {
    "reserve": {"upper_bound": 30},
    "rollback": {"sequence": 0, "length": 7},
    "fork": {"parent": 0, "child": 1, "length": 5},
    "release": {"sequence": 0},
    "crop": {"length": [8, 0]},
    "select": {"rows": [0, 0, 1]},
    "repeat": {"count": 2},
    "grow": {"max_length": 100, "num_pages": 30},
    "keep_prefix": {"sequence": 0, "tokens": [7, 8, 9]},
    "selected": {"sequence": 0},
    "match_prefix": {"sequence": 1, "tokens": [7, 8, 9]},
    "reset": {},
    "check": {},
}


def make_cache(batch: int = 1, **options: Any) -> nsa.KVCache:
    return nsa.KVCache(batch, HKV, D, cfg=SMALL, max_length=64, **options)


def used_cache() -> nsa.KVCache:
    """Of two rows, the first with 9 tokens."""
    cache = make_cache(2, page_size=16, num_prefixes=1, record_selections=True)
    cache.reserve([9, 0])
    x, gates = torch.randn(2, 9, HKV, D), torch.rand(2, 9, H, 3)
    nsa.prefill(torch.randn(2, 9, H, D), x, x, gates, cache, num_new=torch.tensor([9, 0], dtype=torch.int32))
    return cache


def serving_calls() -> Calls:
    """Two requests, a decode in slot 2 and a chunk of 17 tokens in slot 0."""
    sizes = {"page_size": 16, "num_pages": 4, "num_pages_c": 2, "num_slots": 3}
    layer = serving.allocate(SMALL, HKV, D, **sizes)
    step = {
        "query_start_loc": [0, 1, 18],
        "seq_lens": torch.tensor([5, 17], dtype=torch.int32),
        "block_table": torch.tensor([[3, -1], [0, 1]], dtype=torch.int32),
        "block_table_c": torch.tensor([[0], [1]], dtype=torch.int32),
        "slots": [2, 0],
    }
    engine = {"cfg": SMALL, "max_length": 32, "page_size": 16, "slot_mapping": torch.tensor([52, *range(17)])}
    new = {"q": torch.randn(18, H, D), "k": torch.randn(18, HKV, D), "v": torch.randn(18, HKV, D)}
    new |= {"gates": torch.rand(18, H, 3), "weights_k": WEIGHTS, "weights_v": WEIGHTS, "rope": (HALF, HALF)}
    shared = {"parent": 0, "child": 1, "block_table": step["block_table"].flip(0)}
    shared |= {"block_table_c": step["block_table_c"].flip(0), "length": 16, "parent_length": 17, "cfg": SMALL}
    paged = serving.LayerCache(*(torch.zeros(4, rows, HKV, D) for rows in (16, 4, 16, 16) for _ in "kv"))
    table = step["block_table"]
    packed = {name: step[name] for name in ("seq_lens", "block_table")} | {"cfg": SMALL, "max_query_len": 17}
    packed |= {"query_start_loc": torch.tensor([0, 1, 18], dtype=torch.int32), "softmax_scale": 0.5}
    packed |= {"block_table_swa": table, "block_table_cmp": table, "overflow": torch.zeros(1, dtype=torch.int32)}
    made = {"cfg": SMALL, "num_kv_heads": 1, "head_dim": 8, "v_head_dim": 16, **sizes}
    return {
        "serving.allocate": (serving.allocate, made),
        "serving.compressed_page_size": (serving.compressed_page_size, {"cfg": SMALL, "page_size": 32}),
        "serving.Step": (serving.Step, step | engine),
        "serving.attend": (serving.Step(**step, **engine).attend, {"layer": layer, **new}),
        "serving.decode_paged": (serving.decode_paged, {"layer": paged, **packed, **new}),
        "serving.fork": (serving.fork, {"layer": serving.allocate(SMALL, HKV, D, **sizes), **shared}),
    }


def tensors_of(arguments: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor among the arguments: its name as an error shows it, and the tensor."""
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield name, value
        elif hasattr(value, "_fields"):
            yield from ((f"{name}.{field}", member) for field, member in zip(value._fields, value, strict=True))
        elif isinstance(value, tuple):
            yield from ((f"{name}[{i}]", member) for i, member in enumerate(value))


def with_another(arguments: dict[str, Any], argument: str, value: Any) -> dict[str, Any]:
    """The arguments with `value` in the place of that tensor."""
    name, _, field = argument.partition(".")
    if field:
        return arguments | {name: arguments[name]._replace(**{field: value})}
    name, _, place = argument.rstrip("]").partition("[")
    if not place:
        return arguments | {name: value}
    return arguments | {name: tuple(value if i == int(place) else t for i, t in enumerate(arguments[name]))}


ADVERSARIAL = [
    *(None, True, 0, -1, 1, 16, 2**31, 2**63, 2**64, -(2**63), 10**30, 0.0, -0.5, 1e308, math.nan, math.inf, 1j),
    *("", "mlp", [], [1], (), (None, None), {}, object(), np.zeros((1, S, 1, D)), np.int64(3), np.float64(0.5)),
    *(torch.tensor(3), torch.tensor([]), torch.zeros(3), torch.zeros((1,) * 6), torch.zeros(1, S, 1, 0)),
    *(torch.zeros(1, S, H, D), torch.zeros(S, H, D), torch.zeros(1, S, H, D, dtype=torch.int32)),
    *(torch.zeros(1, S, HKV, D, device="meta"), torch.zeros(3, dtype=torch.int32, device="meta")),
    *(torch.tensor([0, 5, 3], dtype=torch.int32), torch.tensor([0, 8, 2**31 - 1], dtype=torch.int32)),
    *(torch.tensor([-1, 8, S], dtype=torch.int32), torch.tensor([0, 8, S]), torch.tensor([True, False])),
    *(torch.full((1, S, H, D), math.nan), torch.zeros(1).expand(1, S, HKV, D), torch.zeros(1, S, H, D).bfloat16()),
    *(torch.zeros(1, S, HKV, D, dtype=torch.complex64), torch.zeros(1, S, HKV, D).to_sparse(), WEIGHTS, SMALL),
    *(torch.zeros(1, S, HKV, D).transpose(1, 3), nsa.NSAConfig(), nsa.CompressionWeights("mean"), torch.float32),
    *(nsa.CompressionWeights("mlp"), (torch.zeros(1, 2, HKV, D),) * 6, (torch.zeros(2, 2),) * 2, "cpu"),
]
