"""Wrong calls of nsa.parallel by one rank or all, and the message on every rank."""

import dataclasses
from functools import partial

import torch

import nsa
from nsa.parallel import ContextParallel, shard_heads


def odd_strides(t):
    return torch.stack((t, t), -1)[..., 0]


def off_the_grid(t):
    """The same values at an address that is no multiple of an element's size."""
    memory = torch.zeros(t.numel() * t.element_size() + 1, dtype=torch.uint8)
    moved = torch.frombuffer(memory.numpy(), dtype=t.dtype, count=t.numel(), offset=1)
    return moved.copy_(t.reshape(-1)).view(t.shape)


def attention_calls(cp, inputs, settings, other_cfg):
    """Of native_sparse_attention, and what the error says."""
    cfg, rope, phi = settings["cfg"], settings["rope"], settings["weights_k"]
    last = cp.rank == cp.size - 1
    channels = rope[0].shape[1]
    here = {name: cp.shard(t) for name, t in inputs.items()}
    length = inputs["q"].shape[1]
    cuts = torch.tensor([0, length // 2, length], dtype=torch.int32, device=inputs["q"].device)
    packed = {name: t[0] for name, t in here.items()}
    short = {n: t[:, : 8 * len(cp.own) - 1] for n, t in here.items()}
    reduced = ContextParallel(cp.group, "head_tail", len(cp.owners), "reduce_scatter")

    def one(name, value):
        return {name: value} if last else {}

    calls = {
        "short": (short, "the shortest length that works is"),
        "rows of one rank": ({n: t[:, :-32] if last else t for n, t in here.items()}, "q: ((2, "),
        "dtype of one rank": ({n: t.bfloat16() if last else t for n, t in here.items()}, "bfloat16"),
        "gates of one rank": (one("gates", here["gates"][..., :2]), "gates: "),
        "type of one rank": (one("k", [1.0]), "k: list: must be a dense tensor"),
        "weights of one rank": (one("weights_k", "mlp"), "weights_k: str: must be"),
        "cfg of one rank": ({"cfg": other_cfg if last else cfg}, "cfg: NSAConfig("),
        "reduction of one rank": (one("cp", reduced), "'reduce_scatter') on rank"),
        "offsets of one rank": (packed | {"cu_seqlens": cuts if last else cuts[[0, 2]]}, "cu_seqlens: ('2 offsets'"),
        "offsets of a rank": (packed | {"cu_seqlens": cuts // 2}, f"from 0 to {length // 2}: must rise from 0 to S = "),
        "positions": ({"rope": tuple(t[:-1] for t in rope)}, f"rope: {length - 1} positions: must be at least "),
        "channels of one rank": (
            one("rope", tuple(t[:, :4] for t in rope)),
            f"rope: ({channels}, {channels}) on rank 0",
        ),
        "type of one rank's rope": (one("rope", tuple(t.double() for t in rope)), "rope_cos: float64"),
        "gradient of one rank's rope": (one("rope", tuple(t.clone().requires_grad_() for t in rope)), "a gradient"),
        "heads at once": ({"kv_heads_at_once": 3}, "kv_heads_at_once = 3: must divide the 2 heads of k"),
        "noise": ({"kv_heads_at_once": 1, "noise": 0.1}, "noise = 0.1: must be 0 with kv_heads_at_once"),
        "noise of one rank": (one("noise", 0.25), "noise: 0.0 on rank 0 of the group, 0.25 on rank"),
        "seed of one rank": (one("seed", torch.tensor(5)), "seed: 0 on rank 0 of the group, 5 on rank"),
        "scale of one rank": (one("softmax_scale", float("nan")), "softmax_scale = nan"),
        "indices of one rank": (one("indices", torch.zeros(1)), "indices: "),
        "wide indices": (one("indices", torch.zeros(*here["k"].shape[:3], 4, dtype=torch.int64)), "indices: dtype"),
    }
    for name in ("q", "k", "v", "gates", "k_slc", "v_swa"):
        t = here[name.split("_")[0]]
        plain = {"rope": None, name: t}  # what is rotated is copied
        calls[f"strides of {name}"] = (plain | one(name, odd_strides(t)), f"{name}: float32")
        calls[f"gradient of {name}"] = (one(name, t.clone().requires_grad_()), " on rank 0 of the group, ")
        if not t.is_cuda:
            calls[f"address of {name}"] = (plain | one(name, off_the_grid(t)), f"{name}: float32")
    for name in ("pe", "w1", "b2"):
        wrong = dataclasses.replace(phi, **{name: getattr(phi, name)[..., :-1]})
        calls[f"{name} of one rank"] = (one("weights_k", wrong), "weights_k.")

    def run(arguments):
        return partial(nsa.parallel.native_sparse_attention, **(here | settings | {"cp": cp} | arguments))

    learning = {"v": here["v"].clone().requires_grad_()}
    without = torch.no_grad()(run(learning)) if last else run(learning)
    return {name: (run(arguments), says) for name, (arguments, says) in calls.items()} | {
        "no gradient on one rank": (without, "backward: True on rank 0 of the group, False on rank")
    }


def other_calls(cp, mesh):
    """Of the other functions."""
    last = cp.rank == cp.size - 1
    x = torch.zeros(2, 3 * len(cp.own), 5, device=mesh.device_type)
    layer = nsa.NativeSparseAttention(32, 2 * cp.size, cp.size, 16).to(mesh.device_type)
    odd = nsa.NativeSparseAttention(32, 2 * cp.size + 2, cp.size + 1, 16).to(mesh.device_type)
    other = nsa.NativeSparseAttention(32, 2 * cp.size, cp.size, 16, qk_norm=True).to(mesh.device_type)
    heads = f"num_kv_heads = {cp.size + 1}: must be a multiple of the mesh's {cp.size} ranks"
    return {
        "a part that is no tensor": (lambda: cp.unshard([1] if last else x), "x: list: must be a dense tensor"),
        "a part of other rows": (lambda: cp.unshard(x[:, 1:] if last else x), f"x: {3 * len(cp.own) - 1} rows: must"),
        "a part in another dtype": (lambda: cp.unshard(x.int() if last else x), "torch.int32, "),
        "another dimension": (lambda: cp.unshard(x.repeat(1, 1, len(cp.own)), 2 if last else 1), "dim: 1 on rank 0"),
        "no such dimension": (lambda: cp.unshard(x, 3 if last else 1), "dim = 3: must be one of the 3 dimensions of x"),
        "heads of one rank": (lambda: shard_heads(odd if last else layer, mesh), heads),
        "no layer on one rank": (lambda: shard_heads(torch.nn.Linear(2, 2) if last else layer, mesh), "Linear: has no"),
        "another layer on one rank": (lambda: shard_heads(other if last else layer, mesh), "q_norm.weight: None on "),
    }


def told(calls):
    """This rank's message, and the expected one."""
    found = {}
    for name, (call, says) in calls.items():
        try:
            call()
            found[name] = "nothing", says
        except (ValueError, TypeError) as error:
            found[name] = str(error), says
    return found
