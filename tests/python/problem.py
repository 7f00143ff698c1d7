"""Random inputs of an operation, and the operation on them by the library and by masked.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

import masked
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
        shapes["nsa_attention"] = {"q": q, "k_c": k_c, "v_c": v_c, "k_slc": k, "v_slc": v, "k_swa": k, "v_swa": v}
        shapes["nsa_attention"]["gates"] = (self.total_q, h, 3)
        shapes["native_sparse_attention"] = {"q": q, "k_cmp": k, "v_cmp": v, "k_slc": k, "v_slc": v, "k_swa": k}
        shapes["native_sparse_attention"] |= {"v_swa": v, "gates": (self.total_q, h, 3)}
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

    def layer(self, inputs: dict[str, Tensor], **options) -> Tensor | tuple[Tensor, Tensor]:
        q, *kv, gates = (self.shaped(t) for name, t in inputs.items() if name not in WEIGHTS)
        weights = self.weights(inputs, "_k"), self.weights(inputs, "_v")
        return nsa.native_sparse_attention(
            *(q, kv, gates, *weights, self.cfg), rope=self.rope(q), **self.packing(q), **options
        )

    def compressed(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """k_c, rotated, and v_c behind the inputs of native_sparse_attention; (total_c, Hkv, D)."""
        k, v = (self.shaped(inputs[name]) for name in ("k_cmp", "v_cmp"))
        cu_seqlens = self.cu_k.to(k.device) if self.packed else None
        k_c = nsa.compress(k, self.weights(inputs, "_k"), self.cfg, cu_seqlens)
        v_c = nsa.compress(v, self.weights(inputs, "_v"), self.cfg, cu_seqlens)
        positions = torch.zeros(self.total_c, dtype=torch.int64, device=k.device)
        first = [i * self.cfg.kernel_stride for n in self.c_lens for i in range(n)]
        positions[: len(first)] = torch.tensor(first, dtype=torch.int64, device=k.device)
        return self.turned(self.flat(k_c), positions), self.flat(v_c)

    def turned(self, k_c: Tensor, positions: Tensor) -> Tensor:
        """Rotated with one rounding, as the library does it."""
        cos, sin = (table[positions].double() for table in self.rope(k_c))
        return masked.rotate(k_c.double(), cos, sin).to(k_c.dtype)

    def by_library(self, operation: str, inputs: dict[str, Tensor], indices: Tensor | None = None) -> Result:
        x = [self.shaped(t) for name, t in inputs.items() if name not in WEIGHTS]
        if operation == "compress":
            cu_seqlens = self.cu_k.to(x[0].device) if self.packed else None
            return Result(self.flat(nsa.compress(*x, self.weights(inputs), self.cfg, cu_seqlens)))
        if operation == "combine":
            return Result(self.flat(nsa.combine(*x)))
        if operation == "nsa_attention":
            o, indices = nsa.nsa_attention(*x, self.cfg, return_indices=True, **self.packing(x[0]))
            return Result(self.flat(o), None, self.flat(indices))
        if operation == "native_sparse_attention":
            o, indices = self.layer(inputs, return_indices=True)
            return Result(self.flat(o), None, self.flat(indices))
        if operation == "compressed_attention":
            o, lse = nsa.compressed_attention(*x, self.cfg, **self.raw_length(), **self.packing(x[0]))
        elif operation == "selected_attention":
            o, lse = nsa.selected_attention(*x, self.shaped(indices), self.cfg.block_size, **self.packing(x[0]))
        else:
            o, lse = nsa.sliding_window_attention(*x, self.cfg.window_size, **self.packing(x[0]))
        return Result(self.flat(o), lse if self.packed else lse.transpose(0, 1).flatten(1), indices)

    # --------------------------------------------------------------------------------------------- masked formulation

    def part(self, name: str, t: Tensor, i: int) -> Tensor:
        """The rows of sequence i."""
        if name in WEIGHTS:
            return t
        lens = self.c_lens if name in ("k_c", "v_c") else self.k_lens if name[0] in "kv" else self.q_lens
        return t[sum(lens[:i]) : sum(lens[: i + 1])]

    def by_masks(self, operation: str, inputs: dict[str, Tensor], indices: Tensor | None = None) -> Result:
        if operation == "combine":  # row by row: it knows no sequences
            return Result(masked.combine(*inputs.values()))
        results = [
            self.one_by_masks(
                operation,
                {name: self.part(name, t, i) for name, t in inputs.items()},
                self.k_lens[i],
                None if indices is None else self.part("q", indices, i),
            )
            for i in range(len(self.lengths))
        ]
        rows = self.total_c if operation == "compress" else self.total_q
        out = torch.cat([r.out for r in results])
        out = torch.cat((out, out.new_zeros(rows - out.shape[0], *out.shape[1:])))
        if results[0].lse is None:
            return Result(out)
        lse = torch.cat([r.lse for r in results], 1)
        return Result(out, torch.cat((lse, lse.new_full((lse.shape[0], rows - lse.shape[1]), -torch.inf)), 1))

    def one_by_masks(self, operation: str, x: dict[str, Tensor], sk: int, indices: Tensor | None) -> Result:
        if operation == "compress":
            return Result(masked.compress(x["k"], self.weights(x), self.cfg))
        if operation == "compressed_attention":
            return Result(*masked.compressed_attention(*x.values(), self.cfg, sk))
        if operation == "selected_attention":
            return Result(*masked.selected_attention(*x.values(), indices, self.cfg.block_size))
        if operation == "sliding_window_attention":
            return Result(*masked.sliding_window_attention(*x.values(), self.cfg.window_size))
        if operation == "native_sparse_attention":
            q, k_cmp, v_cmp, *rest = (t for name, t in x.items() if name not in WEIGHTS)
            k_c = masked.compress(k_cmp, self.weights(x, "_k"), self.cfg)
            v_c = masked.compress(v_cmp, self.weights(x, "_v"), self.cfg)
            k_c = self.turned(k_c, torch.arange(k_c.shape[0]) * self.cfg.kernel_stride)
            return Result(masked.nsa_attention(q, k_c, v_c, *rest, indices, self.cfg))
        return Result(masked.nsa_attention(*x.values(), indices, self.cfg))


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
