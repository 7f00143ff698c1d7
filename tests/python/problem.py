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
    "nsa_attention",
)
WEIGHTS = ("pe", "w1", "b1", "w2", "b2")


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
        result = {name: self.random(*shape) for name, shape in shapes[operation].items()}
        if "gates" in result:
            result["gates"] = result["gates"].sigmoid()
        if operation == "compress" and self.phi != "mean":
            sets, size, hidden = 1 if self.shared_phi else hkv, self.cfg.kernel_size * dk, dk + 8
            first = hidden if self.phi == "mlp" else dk
            result |= {"pe": self.random(sets, self.cfg.kernel_size, dk), "b1": self.random(sets, first)}
            result["w1"] = self.random(sets, size, first) / size**0.5
            if self.phi == "mlp":
                result |= {"w2": self.random(sets, hidden, dk) / hidden**0.5, "b2": self.random(sets, dk)}
        return {name: t.to(dtype).requires_grad_() for name, t in result.items()}

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

    def weights(self, inputs: dict[str, Tensor]) -> nsa.CompressionWeights:
        return nsa.CompressionWeights(self.phi, *(inputs.get(name) for name in WEIGHTS))

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
