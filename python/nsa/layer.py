"""Native Sparse Attention as a layer of a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ._arguments import check_offsets, check_sizes, checked
from .cache import KVCache
from .compression import CompressionFunction
from .config import NSAConfig
from .decoding import decode, prefill
from .functional import native_sparse_attention
from .rotary import check_rotation, rotary_tables, rotate

BRANCHES = ("cmp", "slc", "swa")
MAX_DECODE_TOKENS = 16
"""The most new tokens of one decode step; more is prefill."""


class NativeSparseAttention(nn.Module):
    """Projections, rotation, gates and output projection around `native_sparse_attention`.

    q is rotated once for all branches, k_slc and k_swa at their positions, compressed key i at position i*d after
    phi has seen the unrotated k_cmp; values never. Gates are sigmoid(gate(x)), one per branch, token and head; the last
    gate layer starts at zero, so that every gate starts at 1/2. phi starts as the mean of its block.

    Parameters are named q_proj, k_proj.{cmp,slc,swa}, v_proj.{cmp,slc,swa} (k_proj and v_proj with share_kv),
    phi_k.{pe,w1,b1,w2,b2}, phi_v.{...}, gate.0, gate.2, o_proj: as in the checkpoints of the program `nsa`.

    Args:
        hidden_size: width of x.
        num_heads, num_kv_heads: H and Hkv, which divides H.
        head_dim: Dk, even if keys are rotated.
        v_head_dim: Dv, default Dk.
        cfg: hyperparameters, default the paper's.
        share_kv: one key and one value projection for the three branches.
        compression: phi's kind, "mlp", "linear" or "mean".
        compression_hidden: E of the mlp, default 2 * D.
        shared_phi: one phi for all KV heads instead of one for each.
        rope_theta: base of the rotation; None: no rotation.
        noise: exploration noise of the selection while training, see `select_blocks`; the attribute may be changed.
        seed: of phi's initial units beyond the mean.
        recompute_compressed: as in `native_sparse_attention`; the attribute may be changed.

    Raises:
        ValueError: num_kv_heads does not divide num_heads, or a size is not allowed.
        TypeError: an argument is of another type.
    """

    @checked
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        cfg: NSAConfig | None = None,
        *,
        share_kv: bool = False,
        compression: str = "mlp",
        compression_hidden: int | None = None,
        shared_phi: bool = False,
        rope_theta: float | None = 10000.0,
        noise: float = 0.0,
        seed: int = 0,
        recompute_compressed: bool = False,
    ) -> None:
        super().__init__()
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        check_sizes(**sizes, head_dim=head_dim, v_head_dim=v_head_dim)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads = {num_kv_heads}: must divide num_heads = {num_heads}")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim, self.v_head_dim = head_dim, v_head_dim
        self.cfg = NSAConfig() if cfg is None else cfg
        self.noise = noise
        self.recompute_compressed = recompute_compressed

        def key_value_projection(dim: int) -> nn.Module:
            def one() -> nn.Linear:
                return nn.Linear(hidden_size, num_kv_heads * dim, bias=False)

            return one() if share_kv else nn.ModuleDict({branch: one() for branch in BRANCHES})

        def phi(dim: int, salt: int) -> CompressionFunction:
            generator = torch.Generator().manual_seed(2 * seed + salt)
            sets = 1 if shared_phi else num_kv_heads
            return CompressionFunction(
                compression, self.cfg.kernel_size, dim, sets, compression_hidden, generator=generator
            )

        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = key_value_projection(head_dim)
        self.v_proj = key_value_projection(v_head_dim)
        self.phi_k, self.phi_v = phi(head_dim, 0), phi(v_head_dim, 1)
        gate_hidden = max(1, hidden_size // 4)
        self.gate = nn.Sequential(nn.Linear(hidden_size, gate_hidden), nn.SiLU(), nn.Linear(gate_hidden, 3 * num_heads))
        nn.init.zeros_(self.gate[2].weight)
        nn.init.zeros_(self.gate[2].bias)
        self.o_proj = nn.Linear(num_heads * v_head_dim, hidden_size, bias=False)
        if rope_theta is not None:
            check_rotation(head_dim, "rope_theta", rope_theta)
        self.rope_theta = rope_theta
        self._fold_tables: tuple[Tensor, Tensor] | None = None  # for the compressed keys of a cache

    def make_cache(self, batch_size: int, max_length: int, dtype: torch.dtype | None = None, **options) -> KVCache:
        """A KVCache for this layer, on its device; `options` are KVCache's (page_size, num_pages)."""
        weight = self.q_proj.weight
        return KVCache(
            *(batch_size, self.num_kv_heads, self.head_dim, self.v_head_dim, self.cfg),
            max_length=max_length,
            dtype=weight.dtype if dtype is None else dtype,
            device=weight.device,
            **options,
        )

    @checked
    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        *,
        cache: KVCache | None = None,
        num_new: Tensor | None = None,
        seed: int = 0,
        return_indices: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention over whole sequences, or, with a cache, of new tokens to all that the cache holds.

        Args:
            x: (B, S, hidden_size); or packed (total, hidden_size) with cu_seqlens.
            cu_seqlens: int32 (batch + 1).
            max_seqlen: upper bound of the lengths in tokens, default the total.
            cache: x are the next S tokens per row, appended to it; no gradient. Up to 16 run as `decode`, more as
                `prefill`. Room must have been reserved.
            num_new: int32 (B), with a cache: how many of the S tokens of each row count, default all.
            seed: of the exploration noise in training; derive it from run, step, micro-batch, rank and layer.
            return_indices: also return the selected blocks.

        Returns:
            Like x; or (that, indices int32 (B, S, Hkv, topk) or (total, Hkv, topk)).

        Raises:
            ValueError: arguments that do not go together, or that an operation refuses.
            TypeError: an argument of another type.
        """
        if cache is not None and cu_seqlens is not None:
            raise ValueError("cu_seqlens: must not be given with a cache, whose rows are the sequences")
        if num_new is not None and cache is None:
            raise ValueError("num_new: must be given with a cache only")
        width = self.q_proj.weight.shape[1]
        if x.dim() != (3 if cu_seqlens is None else 2) or x.shape[-1] != width:
            expected = f"({'B, S' if cu_seqlens is None else 'total'}, hidden_size = {width})"
            raise ValueError(f"x: {tuple(x.shape)}: expected the shape {expected}")
        if max_seqlen is not None and max_seqlen < 0:
            raise ValueError(f"max_seqlen = {max_seqlen}: must be at least 0, or None for the total")
        if cu_seqlens is not None:
            check_offsets(cu_seqlens)
        for name, tensor in (("cu_seqlens", cu_seqlens), ("q_proj.weight", self.q_proj.weight)):
            if tensor is not None and tensor.device != x.device:
                raise ValueError(f"{name}: on {tensor.device}: expected {x.device} as x")
        q = self._heads(self.q_proj(x), self.num_heads)
        k = self._branches(self.k_proj, x)
        v = self._branches(self.v_proj, x)
        gates = self._heads(torch.sigmoid(self.gate(x)).to(q.dtype), self.num_heads)
        weights_k, weights_v = self.phi_k.weights(q.dtype), self.phi_v.weights(q.dtype)
        angles = self._angles(self._positions(x, cu_seqlens, cache))
        q, k_slc = self._rotate(angles, q), self._rotate(angles, k["slc"])
        k_swa = k_slc if k["swa"] is k["slc"] else self._rotate(angles, k["swa"])
        kv = (k["cmp"], v["cmp"], k_slc, v["slc"], k_swa, v["swa"])
        if cache is not None:
            step = decode if x.shape[1] <= MAX_DECODE_TOKENS else prefill
            o, indices = step(
                *(q, kv, gates, cache, weights_k, weights_v, self.cfg),
                rope=self._tables_for(cache),
                num_new=num_new,
                return_indices=True,
            )
        else:
            if cu_seqlens is not None:  # else the rows are the positions
                longest = x.shape[0] if max_seqlen is None else min(max_seqlen, x.shape[0])
                angles = self._angles(torch.arange(longest, device=x.device))
            o, indices = native_sparse_attention(
                *(q, kv, gates, weights_k, weights_v, self.cfg),
                rope=angles,
                noise=self.noise if self.training else 0.0,
                seed=seed,
                recompute_compressed=self.recompute_compressed,
                return_indices=True,
                cu_seqlens_q=cu_seqlens,
                max_seqlen_q=max_seqlen,
            )
        o = self.o_proj(o.flatten(-2))
        return (o, indices) if return_indices else o

    @staticmethod
    def _heads(x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, x.shape[-1] // heads)  # unflatten does not compile under a default device

    def _branches(self, projection: nn.Module, x: Tensor) -> dict[str, Tensor]:
        if isinstance(projection, nn.ModuleDict):
            return {branch: self._heads(projection[branch](x), self.num_kv_heads) for branch in BRANCHES}
        return dict.fromkeys(BRANCHES, self._heads(projection(x), self.num_kv_heads))

    def _positions(self, x: Tensor, cu_seqlens: Tensor | None, cache: KVCache | None) -> Tensor:
        """Positions of the rows of x in their sequences, to be broadcast over the batch."""
        if cu_seqlens is not None:
            return _rows_within(cu_seqlens, x.shape[0])
        rows = torch.arange(x.shape[1], device=x.device)
        return rows if cache is None else cache.cache_seqlens[:, None] + rows

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of positions; None: no rotation."""
        return None if self.rope_theta is None else rotary_tables(positions, self.head_dim, self.rope_theta)

    @staticmethod
    def _rotate(angles: tuple[Tensor, Tensor] | None, x: Tensor) -> Tensor:
        return x if angles is None else rotate(x, *angles)

    def _tables_for(self, cache: KVCache) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of every position in the cache."""
        if self.rope_theta is None:
            return None
        tables, device = self._fold_tables, cache.cache_seqlens.device
        if tables is None or tables[0].shape[0] < cache.max_length or tables[0].device != device:
            tables = self._fold_tables = self._angles(torch.arange(cache.max_length, device=device))
        return tables


def _rows_within(cu_seqlens: Tensor, total: int) -> Tensor:
    """Number of each of `total` packed rows within its sequence, int32; rows past the last sequence count on."""
    rows = torch.arange(total, dtype=torch.int32, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:-1].contiguous(), rows, right=True)
    return rows - cu_seqlens[sequence]
