"""Random inputs of an operation, and the operation on them by the library and by nsa.reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

import nsa
from devices import head_dims, here

SMALL = nsa.NSAConfig(kernel_size=8, kernel_stride=4, block_size=16, topk=4, window_size=20)
OPERATIONS = (
    *("compress", "compressed_attention", "selected_attention", "sliding_window_attention", "combine"),
    *("nsa_attention", "native_sparse_attention"),
)
PHI = ("pe", "w1", "b1", "w2", "b2")
WEIGHTS = tuple(f"{name}{of}" for of in ("", "_k", "_v") for name in PHI)


class Result(NamedTuple):
    out: Tensor  # (total, heads, D)
    lse: Tensor | None = None  # (H, total)
    indices: Tensor | None = None  # (total, Hkv, n), those attended to


@dataclass
class Problem:
    """Sequences of (queries, keys) tokens; packed one after the other, or batched if they are all alike.

    The same values on every device, if the head dims are.
    """

    lengths: list[tuple[int, int]]
    cfg: nsa.NSAConfig = SMALL
    heads: tuple[int, int] = (4, 2)  # H, Hkv
    dims: tuple[int, int] = (16, 24)  # Dk, Dv, at least
    packed: bool = False
    phi: str = "mlp"
    shared_phi: bool = False
    seed: int = 0
    tail: int = 0  # packed: rows past the last sequence, which nothing may read
    generator: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        assert self.packed or len(set(self.lengths)) == 1
        self.generator = torch.Generator().manual_seed(self.seed)
        self.q_lens, self.k_lens = [q for q, _ in self.lengths], [k for _, k in self.lengths]
        self.cu_q, self.cu_k = (
            torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device="cpu") for lens in (self.q_lens, self.k_lens)
        )
        self.c_lens = [self.cfg.num_compressed(k) for k in self.k_lens]
        self.total_q, self.total_k = sum(self.q_lens) + self.tail, sum(self.k_lens) + self.tail
        self.total_c = self.total_k // self.cfg.kernel_stride if self.packed else sum(self.c_lens)

    def random(self, *shape: int) -> Tensor:
        return here(torch.randn(*shape, generator=self.generator, dtype=torch.float64, device="cpu"))

    def inputs(self, operation: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Differentiable inputs: (total, heads, D), and phi's weights."""
        (h, hkv), (dk, dv) = self.heads, head_dims(*self.dims)
        q, k, v = (self.total_q, h, dk), (self.total_k, hkv, dk), (self.total_k, hkv, dv)
        k_c, v_c, o = (self.total_c, hkv, dk), (self.total_c, hkv, dv), (self.total_q, h, dv)
        shapes = {
            "compress": {"k": k},
            "compressed_attention": {"q": q, "k_c": k_c, "v_c": v_c},
            "selected_attention": {"q": q, "k": k, "v": v},
            "sliding_window_attention": {"q": q, "k": k, "v": v},
            "combine": {"o_cmp": o, "o_slc": o, "o_swa": o, "gates": (self.total_q, h, 3)},
        }
        whole, window = {"q": q, "k": k, "v": v, "gates": (self.total_q, h, 3)}, {"k_swa": k, "v_swa": v}
        shapes["nsa_attention"] = {**whole, "k_c": k_c, "v_c": v_c, **window}
        shapes["native_sparse_attention"] = {**whole, "k_slc": k, "v_slc": v, **window}
        result = {name: self.random(*shape) for name, shape in shapes[operation].items()}
        if "gates" in result:
            result["gates"] = result["gates"].sigmoid()
        if operation == "compress":
            result |= self.random_weights(dk)
        if operation == "native_sparse_attention":
            for of, width in (("k", dk), ("v", dv)):
                result |= {f"{name}_{of}": t for name, t in self.random_weights(width).items()}
        return {name: t.to(dtype).requires_grad_() for name, t in result.items()}

    def random_weights(self, width: int) -> dict[str, Tensor]:
        if self.phi == "mean":
            return {}
        sets, size = 1 if self.shared_phi else self.heads[1], self.cfg.kernel_size * width
        hidden = width + 8 if self.phi == "mlp" else width
        result = {"pe": self.random(sets, self.cfg.kernel_size, width), "b1": self.random(sets, hidden)}
        result["w1"] = self.random(sets, size, hidden) / size**0.5
        if self.phi == "mlp":
            result |= {"w2": self.random(sets, hidden, width) / hidden**0.5, "b2": self.random(sets, width)}
        return result

    def random_indices(self, n: int = 5) -> Tensor:
        """int32 (total_q, Hkv, n) in any order, with duplicates, -1, blocks of the future and out of range."""
        blocks = -(-max(self.k_lens, default=0) // self.cfg.block_size) + 2
        shape = (self.total_q, self.heads[1], n)
        return here(torch.randint(-1, blocks, shape, generator=self.generator, dtype=torch.int32, device="cpu"))

    # ------------------------------------------------------------------------------------------------- the library

    def shaped(self, t: Tensor) -> Tensor:
        """As the library takes it."""
        batch = len(self.lengths)
        return t if self.packed else t.view(batch, t.shape[0] // batch, *t.shape[1:])

    def flat(self, t: Tensor) -> Tensor:
        return t if self.packed else t.flatten(0, 1)

    def packing(self, like: Tensor) -> dict[str, Tensor]:
        """Where the sequences lie, on the device of the tensors."""
        if not self.packed:
            return {}
        return {"cu_seqlens_q": self.cu_q.to(like.device), "cu_seqlens_k": self.cu_k.to(like.device)}

    def raw_length(self) -> dict[str, int]:
        return {} if self.packed else {"seqlen_k": self.k_lens[0]}

    def weights(self, inputs: dict[str, Tensor], of: str = "") -> nsa.CompressionWeights:
        return nsa.CompressionWeights(self.phi, *(inputs.get(name + of) for name in PHI))

    def rope(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Angles by position."""
        positions = torch.arange(max([1, *self.k_lens]), device=like.device)
        return nsa.rotary_tables(positions, like.shape[-1], theta=30.0)

    def rotated(self, name: str, inputs: dict[str, Tensor]) -> Tensor:
        """One of native_sparse_attention's inputs as attention sees it, (total, heads, D)."""
        lens = self.k_lens if name[0] == "k" else self.q_lens
        at = [i for n, sk in zip(lens, self.k_lens, strict=True) for i in range(sk - n, sk)]
        return self.rotated_at(inputs[name], at)

    def compressed(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """k_c, rotated with one rounding, and v_c behind the inputs of native_sparse_attention; (total_c, Hkv, D)."""
        k, v = (self.shaped(inputs[name]) for name in ("k", "v"))
        cu_seqlens = self.cu_k.to(k.device) if self.packed else None
        k_c = nsa.compress(k, self.weights(inputs, "_k"), self.cfg, cu_seqlens)
        v_c = nsa.compress(v, self.weights(inputs, "_v"), self.cfg, cu_seqlens)
        first = [i * self.cfg.kernel_stride for n in self.c_lens for i in range(n)]
        return self.rotated_at(self.flat(k_c).double(), first).to(k_c.dtype), self.flat(v_c)

    def rotated_at(self, x: Tensor, at: list[int]) -> Tensor:
        """Rows of x rotated; those past `at` stay."""
        positions = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        positions[: len(at)] = torch.tensor(at, dtype=torch.int64, device=x.device)
        return nsa.rotate(x, *(table[positions] for table in self.rope(x)))

    def by_library(self, operation: str, inputs: dict[str, Tensor], indices: Tensor | None = None) -> Result:
        return self.by(nsa, operation, inputs, indices if operation == "selected_attention" else None)

    def by_masks(self, operation: str, inputs: dict[str, Tensor], indices: Tensor | None = None) -> Result:
        return self.by(nsa.reference, operation, inputs, indices)

    def layer(self, inputs: dict[str, Tensor], module: ModuleType = nsa, **options) -> Tensor | tuple[Tensor, Tensor]:
        x = {name: self.shaped(t) for name, t in inputs.items() if name not in WEIGHTS}
        weights = {"weights_k": self.weights(inputs, "_k"), "weights_v": self.weights(inputs, "_v")}
        packing = {"cfg": self.cfg, "rope": self.rope(x["q"]), **self.packing(x["q"])}
        return module.native_sparse_attention(**x, **weights, **packing, **options)

    def by(self, module: ModuleType, operation: str, inputs: dict[str, Tensor], indices: Tensor | None) -> Result:
        """The operation by `nsa` or `nsa.reference`; `indices`: to attend to."""
        named = {name: self.shaped(t) for name, t in inputs.items() if name not in WEIGHTS}
        x, blocks = list(named.values()), None if indices is None else self.shaped(indices)
        if operation == "compress":
            cu_seqlens = self.cu_k.to(x[0].device) if self.packed else None
            return Result(self.flat(module.compress(*x, self.weights(inputs), self.cfg, cu_seqlens)))
        if operation == "combine":
            return Result(self.flat(module.combine(*x)))
        if operation in ("nsa_attention", "native_sparse_attention"):
            options = {"indices": blocks, "return_indices": True}
            if operation == "nsa_attention":
                o, own = module.nsa_attention(**named, cfg=self.cfg, **options, **self.packing(x[0]))
            else:
                o, own = self.layer(inputs, module, **options)
            return Result(self.flat(o), None, self.flat(own))
        if operation == "compressed_attention":
            o, lse = module.compressed_attention(*x, self.cfg, **self.raw_length(), **self.packing(x[0]))
        elif operation == "selected_attention":
            o, lse = module.selected_attention(*x, blocks, self.cfg.block_size, **self.packing(x[0]))
        else:
            o, lse = module.sliding_window_attention(*x, self.cfg.window_size, **self.packing(x[0]))
        return Result(self.flat(o), lse if self.packed else lse.transpose(0, 1).flatten(1), indices)

    def part(self, name: str, t: Tensor, i: int) -> Tensor:
        """The rows of sequence i."""
        lens = self.c_lens if name in ("k_c", "v_c") else self.k_lens if name[0] in "kv" else self.q_lens
        return t[sum(lens[:i]) : sum(lens[: i + 1])]


def selection_errors(
    indices: Tensor, q: Tensor, k_c: Tensor, cfg: nsa.NSAConfig, sk: int, rho: float = 1e-5
) -> list[str]:
    """What is wrong with indices (Sq, Hkv, topk) by the specification's tolerance rule; q and k_c float64."""
    scores = nsa.reference.importance(q[None], k_c[None], cfg, sk)[0].tolist()
    rows = indices.tolist()
    group = q.shape[1] // k_c.shape[1]
    errors = []
    for i, t in enumerate(range(sk - q.shape[0], sk)):
        own = t // cfg.block_size
        forced = {j for j in range(own + 1) if j < cfg.init_blocks or j > own - cfg.local_blocks}
        for h in range(k_c.shape[1]):
            row = rows[i][h]
            picks = [j for j in row if j >= 0]
            where = f"query {i}, KV head {h}: {row}"
            count = min(cfg.topk, own + 1)
            if row != sorted(set(picks)) + [-1] * (cfg.topk - len(picks)) or len(picks) != count:
                errors.append(f"{where}: not {count} ascending distinct blocks padded with -1")
            elif not forced <= set(picks) or picks[-1] > own:
                errors.append(f"{where}: a forced block is missing, or a block lies in the future")
            else:
                free = count - len(forced)
                others = [(scores[h][i][j], j) for j in range(own + 1) if j not in forced]
                if free == 0 or not others:
                    continue
                nth = sorted((s for s, _ in others), reverse=True)[free - 1]
                tolerance = rho * nth + 1e-7 * group
                if any((s < nth - tolerance) if j in picks else (s > nth + tolerance) for s, j in others):
                    errors.append(f"{where}: a pick is too low or a block left out too high")
    return errors


def cast(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The same values in another dtype, as new leaves."""
    return {name: t.detach().to(dtype).requires_grad_() for name, t in inputs.items()}


def gradients(out: Tensor, inputs: dict[str, Tensor], d_out: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(out, list(inputs.values()), d_out.to(out.dtype), allow_unused=True)
    return {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(inputs.items(), found, strict=True)}


def assert_within_bound(
    name: str, actual: Tensor, plain: Tensor, truth: Tensor, luck: float = 1.0, floor: float = 0.0
) -> None:
    """The specification's error bound: twice the error of a plain computation in the same precision, and a little.

    `luck` multiplies the plain computation's error where a tensor is too small for its maximum to mean much. `floor` is
    allowed where the truth is zero everywhere, to a backend whose sums do not cancel exactly.
    """
    assert actual.shape == truth.shape, name
    assert actual.isfinite().all(), name
    if truth.numel() == 0:
        return
    error = (actual.double() - truth).abs().max().item()
    largest = truth.abs().max().item()
    allowed = 2 * luck * (plain.double() - truth).abs().max().item() + (1e-5 * largest if largest else floor)
    assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def feed(layer, cache, x, steps, **options):
    """The layer's outputs over x (B, S, hidden), given in chunks of the given sizes."""
    outs, begin = [], 0
    for m in steps:
        outs.append(layer(x[:, begin : begin + m], cache=cache, **options))
        begin += m
    assert begin == x.shape[1]
    cache.check()
    return torch.cat(outs, 1)


def assert_same(actual, expected):
    """But for rounding in float32."""
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
