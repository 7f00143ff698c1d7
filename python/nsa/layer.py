"""Native Sparse Attention as a layer of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ._arguments import check_offsets, check_sizes, checked
from .cache import KVCache
from .compression import CompressionFunction
from .config import CompressionWeights, NSAConfig
from .decoding import MAX_DECODE_TOKENS, decode, prefill
from .functional import compress, native_sparse_attention
from .parallel.attention import native_sparse_attention as context_parallel_attention
from .parallel.exchange import ContextParallel
from .rotary import FLOATS, check_rotation, rotary_tables
from .selector import Rope, sampled_divergence

if TYPE_CHECKING:
    from .replay import LayerReplay

BRANCHES = ("cmp", "slc", "swa")


class Branches(nn.ModuleDict):
    """One module per branch. PEFT prints its repr if target_modules names the container, so the repr explains this."""

    def extra_repr(self) -> str:
        """The line for adapters."""
        return "one for each branch; adapters take them by name: k_proj.cmp, ..., v_proj.swa, or 'all-linear'"


class NativeSparseAttention(nn.Module):
    """Projections, rotation, gates and output projection around `native_sparse_attention`.

    q is rotated once for all branches, k_slc and k_swa at their positions, compressed key i at position i*d after
    phi has seen the unrotated k_cmp; values never. Gates are sigmoid(gate(x)), one per branch, token and head; the last
    gate layer starts with weights of zero. phi starts as the mean of its block.

    Parameters are named q_proj, k_proj.{cmp,slc,swa}, v_proj.{cmp,slc,swa} (k_proj and v_proj with share_kv),
    q_norm, k_norm.{cmp,slc,swa} (or k_norm) with qk_norm, phi_k.{pe,w1,b1,w2,b2}, phi_v.{...}, gate.0, gate.2, o_proj:
    as in the checkpoints of the program `nsa`.

    Attributes:
        context_parallel: an `nsa.parallel.ContextParallel`, whose ranks share the sequences. `forward` then takes this
            rank's rows of x and the global cu_seqlens; the backward always recomputes compressed tokens. None: this
            process has complete sequences.
        selector_loss: scalar of the last forward for `nsa.selector_loss`, float32 (float64 in a float64 layer). It is
            the mean over `selector_queries` queries of one sequence and over KV heads of KL(attention || importances)
            over the blocks that are not forced, both normalised. The attention is the mass that the selected branch
            would give each block if it attended to all past tokens. 0 if all sequences are too short to select.
            None after a forward with selector_queries = 0, in evaluation, with a cache or, unless `keep_selector_loss`,
            without gradients.

    Args:
        hidden_size: width of x.
        num_heads, num_kv_heads: H and Hkv, which divides H.
        head_dim: Dk, even if keys are rotated.
        v_head_dim: Dv, default Dk.
        cfg: hyperparameters, default the paper's.
        share_kv: one key and one value projection for the three branches.
        phi: the compression function's kind, "mlp", "linear" or "mean".
        phi_hidden: E of the mlp; 0: 2 * D.
        phi_per_kv_head: own weights of phi for each KV head instead of one set for all.
        rope_theta: RoPE base; None: no RoPE.
        partial_rotary_factor: fraction of the channels that RoPE rotates, as in `rotary_tables`.
        rope: instead of rope_theta, cosines and sines as in `native_sparse_attention`, float32 (max_positions, R / 2)
            each, or a function that gives those of int64 positions (n), (n, R / 2) each.
        qkv_bias, out_bias: biases of the projections.
        qk_norm: RMSNorm of q and of every branch's k, per head, before the rotation and before phi; q_norm and k_norm.
        norm_eps: its epsilon.
        gate_bias: what sigmoid(gate) starts from for cmp, slc and swa; 0: every gate starts at 1/2.
        noise: exploration noise of the selection while training, see `select_blocks`; the attribute may be changed.
        seed: of phi's initial units beyond the mean.
        recompute_compressed: as in `native_sparse_attention`; the attribute may be changed.
        selector_queries: how many queries of a sequence a forward in training asks for `selector_loss`; `nsa train`
            has one for every 256 tokens of a batch, 16 to 128, at most 2 ** 20 / context. The sequence is drawn by how
            many queries with a choice it has, they evenly over these, by torch's generator of x's device. 0: none, at
            no cost; the attribute may be changed.

    Raises:
        ValueError: num_kv_heads does not divide num_heads, a size is not allowed, or selector_queries > 0 although
            the selector has no weights to train: phi = "mean" with share_kv.
        TypeError: an argument is of another type.
    """

    keep_selector_loss = False
    """Whether forwards without gradients leave `selector_loss`. A Trainer's may follow the one that is trained."""

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
        phi: str = "mlp",
        phi_hidden: int = 0,
        phi_per_kv_head: bool = False,
        rope_theta: float | None = 10000.0,
        partial_rotary_factor: float = 1.0,
        rope: tuple[Tensor, Tensor] | Callable | None = None,  # type: ignore[type-arg]  # the bare type is checked
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        gate_bias: Sequence[float] = (0.0, 0.0, 0.0),
        noise: float = 0.0,
        seed: int = 0,
        recompute_compressed: bool = False,
        selector_queries: int = 0,
    ) -> None:
        super().__init__()
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        check_sizes(**sizes, head_dim=head_dim, v_head_dim=v_head_dim)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads = {num_kv_heads}: must divide num_heads = {num_heads}")
        if len(gate_bias) != len(BRANCHES):
            raise ValueError(f"gate_bias: {len(gate_bias)} numbers: must be three, for {', '.join(BRANCHES)}")
        if phi_hidden < 0:
            raise ValueError(f"phi_hidden = {phi_hidden}: must be >= 1, or 0 for 2 x head dim")
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, num_kv_heads
        self.head_dim, self.v_head_dim = head_dim, v_head_dim
        self.cfg = NSAConfig() if cfg is None else cfg
        self.gate_bias = tuple(gate_bias)
        self.noise = noise
        self.seed = seed
        self.recompute_compressed = recompute_compressed

        def of_branches(one: Callable[[], nn.Module]) -> nn.Module:
            return one() if share_kv else Branches({branch: one() for branch in BRANCHES})

        def compression(dim: int, salt: int) -> CompressionFunction:
            sets = num_kv_heads if phi_per_kv_head else 1
            return CompressionFunction(
                phi, self.cfg.kernel_size, dim, sets, phi_hidden or None, generator=self._generator(salt)
            )

        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=qkv_bias)
        self.k_proj = of_branches(lambda: nn.Linear(hidden_size, num_kv_heads * head_dim, bias=qkv_bias))
        self.v_proj = of_branches(lambda: nn.Linear(hidden_size, num_kv_heads * v_head_dim, bias=qkv_bias))
        self.q_norm = nn.RMSNorm(head_dim, norm_eps) if qk_norm else None
        self.k_norm = of_branches(lambda: nn.RMSNorm(head_dim, norm_eps)) if qk_norm else None
        self.phi_k, self.phi_v = compression(head_dim, 0), compression(v_head_dim, 1)
        gate_hidden = max(1, hidden_size // 4)
        self.gate = nn.Sequential(nn.Linear(hidden_size, gate_hidden), nn.SiLU(), nn.Linear(gate_hidden, 3 * num_heads))
        self.o_proj = nn.Linear(num_heads * v_head_dim, hidden_size, bias=out_bias)
        self._reset_gate()
        # Has the layer's dtype and device where q_proj has none: quantized modules have other weights or none.
        self.register_buffer("_like", torch.empty(0), persistent=False)
        if rope is not None:
            rope_theta = None
        if rope_theta is not None:
            check_rotation(head_dim, "rope_theta", rope_theta, partial_rotary_factor)
        self.rope_theta, self.partial_rotary_factor, self.rope = rope_theta, partial_rotary_factor, rope
        self.context_parallel: ContextParallel | None = None
        self.ranks = 1  # over which nsa.parallel.shard_heads has divided the heads
        # For the compressed keys of a cache: of which rope_theta, partial_rotary_factor and rope.
        self._fold_tables: tuple[Any, Any, Any, tuple[Tensor, Tensor] | None] = None, None, None, None
        self.selector_queries = selector_queries
        self.selector_loss: Tensor | None = None
        self._check_selector_queries()
        # Set by nsa.replay: whether caches keep selections, and recorded ones.
        self.record_selections = False
        self.replayed: LayerReplay | None = None

    def __getstate__(self) -> dict[str, Any]:  # a copy or a file has no graph
        return {**self.__dict__, "selector_loss": None, "replayed": None}

    def reset_parameters(self) -> None:
        """Gives the parameters, wherever they are now, new initial values, as a new layer's with torch's random state.

        So a layer made on the meta device, after `to_empty`, gets the values of one made in place.
        """
        for module in self.modules():  # in the order in which they were made
            if isinstance(module, (nn.Linear, nn.RMSNorm)):
                module.reset_parameters()
        self.phi_k.reset_parameters(self._generator(0))
        self.phi_v.reset_parameters(self._generator(1))
        self._reset_gate()

    def _generator(self, salt: int) -> torch.Generator:
        return torch.Generator().manual_seed(2 * self.seed + salt)

    def _reset_gate(self) -> None:
        last = self.gate[2]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        with torch.no_grad():
            last.bias.copy_(torch.tensor(self.gate_bias).repeat(self.num_heads))

    def make_cache(self, batch_size: int, max_length: int, dtype: torch.dtype | None = None, **options: Any) -> KVCache:
        """A KVCache for this layer, on its device; `options` are KVCache's (page_size, num_pages)."""
        like = self.q_proj.weight if self._is_plain(self.q_proj) else self.get_buffer("_like")
        if dtype == torch.float8_e4m3fn:
            options = {"raw_dtype": like.dtype} | options
        options = {"record_selections": self.record_selections} | options
        return KVCache(
            *(batch_size, self.num_kv_heads, self.head_dim, self.v_head_dim, self.cfg),
            max_length=max_length,
            dtype=like.dtype if dtype is None else dtype,
            device=like.device,
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
        first_chunk: bool = False,
        indices: Tensor | None = None,
        seed: int | None = None,
        return_indices: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention over complete sequences, or, with a cache, of new tokens to all cached tokens.

        Args:
            x: (B, S, hidden_size); or packed (total, hidden_size) with cu_seqlens.
            cu_seqlens: int32 (batch + 1).
            max_seqlen: upper bound of the lengths in tokens, default the total.
            cache: x are the next S tokens per row, appended to it; a backward through the step raises RuntimeError. Up
                to 16 run as `decode`, more as `prefill`. Room must have been reserved.
            num_new: int32 (B), with a cache: how many of the S tokens of each row count, default all.
            first_chunk: with a cache: its rows are empty, as `prefill` takes it.
            indices: the blocks to attend to, as `native_sparse_attention` takes them.
            seed: of the exploration noise, which needs it in training; derive it from run, step, micro-batch, rank and
                layer.
            return_indices: also return the blocks that the importance selects.

        Returns:
            Like x; or (that, indices int32 (B, S, Hkv, topk) or (total, Hkv, topk)).

        Raises:
            ValueError: arguments that do not go together, or that an operation refuses; selector_queries > 0
                although the selector has no weights to train, or with context_parallel.
            TypeError: an argument of another type.
        """
        if cache is not None and cu_seqlens is not None:
            raise ValueError("cu_seqlens: must not be given with a cache, whose rows are the sequences")
        if cache is not None and self.context_parallel is not None:
            raise ValueError("cache: must not be given to a layer with context_parallel")
        if self.context_parallel is not None and self._attend is not native_sparse_attention:
            raise ValueError("context_parallel: must be None in the layer of nsa.reference")
        if cache is not None and cache.cfg != self.cfg:
            raise ValueError(f"cache: of {cache.cfg}: must be of the layer's {self.cfg}")
        if max_seqlen is not None and cu_seqlens is None:
            raise ValueError(f"max_seqlen = {max_seqlen}: must be given with cu_seqlens only")
        for name, given in (("num_new", num_new is not None), ("first_chunk", first_chunk)):
            if given and cache is None:
                raise ValueError(f"{name}: must be given with a cache only")
        noise = self.noise if self.training else 0.0
        if noise and seed is None:
            raise ValueError("seed: None: must be given in training with noise, another one for each step")
        if x.dim() != (3 if cu_seqlens is None else 2) or x.shape[-1] != self.hidden_size:
            expected = f"({'B, S' if cu_seqlens is None else 'total'}, hidden_size = {self.hidden_size})"
            raise ValueError(f"x: {tuple(x.shape)}: expected the shape {expected}")
        if max_seqlen is not None and not 0 <= max_seqlen <= 2**63 - 1:
            raise ValueError(f"max_seqlen = {max_seqlen}: must be 0 ... 2^63 - 1, or None for the total")
        if cu_seqlens is not None:
            check_offsets(cu_seqlens)
        weight = self.q_proj.weight if self._is_plain(self.q_proj) else None
        for name, tensor in (("cu_seqlens", cu_seqlens), ("q_proj.weight", weight)):
            if tensor is not None and tensor.device != x.device:
                raise ValueError(f"{name}: on {tensor.device}: expected {x.device} as x")
        self._check_dtype(x, weight)
        self._drop_selector_loss()
        replay = self.replayed if cache is None else None
        if replay is not None:
            if indices is not None:
                raise ValueError("indices: must be None in nsa.replay.replay")
            indices = self._recorded(replay, x, cu_seqlens)
        q = self._heads(self.q_proj(x), self.num_heads)
        q = q if self.q_norm is None else self.q_norm(q)
        k, v = self._branches(self.k_proj, self.k_norm, x), self._branches(self.v_proj, None, x)
        gates = self._heads(torch.sigmoid(self.gate(x)).to(q.dtype), self.num_heads)
        arguments: dict[str, Any] = {
            f"{name}_{branch}": t[branch] for name, t in (("k", k), ("v", v)) for branch in BRANCHES[1:]
        }
        # Where blocks are given and these not wanted, none are selected.
        wanted = return_indices or (replay is not None and replay.compares)
        arguments |= {"weights_k": self.phi_k(q.dtype), "weights_v": self.phi_v(q.dtype), "indices": indices}
        arguments["return_indices"] = wanted
        found: Any
        if cache is not None:
            step: Callable[..., Any] = decode
            if first_chunk or x.shape[1] > MAX_DECODE_TOKENS:
                step = functools.partial(prefill, first_chunk=first_chunk)
            found = step(
                *(q, k["cmp"], v["cmp"], gates, cache),
                **arguments,
                rope=self._tables_for(cache),
                num_new=num_new,
            )
        else:
            cp = self.context_parallel
            rows = x.shape[-2] * (1 if cp is None else cp.size)
            longest = rows if cu_seqlens is None or max_seqlen is None else min(max(1, max_seqlen), rows)
            arguments |= {
                "cfg": self.cfg,
                "rope": self._tables(longest, x.device),
                "noise": noise,
                "seed": 0 if seed is None else seed,
            }
            if cp is None:
                found = self._attend(
                    *(q, k["cmp"], v["cmp"], gates),
                    **arguments,
                    recompute_compressed=self.recompute_compressed,
                    cu_seqlens_q=cu_seqlens,
                    max_seqlen_q=max_seqlen,
                )
            else:
                found = context_parallel_attention(
                    *(q, k["cmp"], v["cmp"], gates, cp), **arguments, cu_seqlens=cu_seqlens
                )
            self._ask_selector(q, k, arguments["weights_k"], arguments["rope"], cu_seqlens, max_seqlen)
            if replay is not None and replay.compares and indices is not None:
                replay.compare(indices, found[1])
        o = self.o_proj((found[0] if wanted else found).flatten(-2))
        return (o, found[1]) if return_indices else o

    def _recorded(self, replay: LayerReplay, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """The recorded blocks of this rank's rows of x."""
        cp, shape = self.context_parallel, list(x.shape[:-1])
        if cp is None:
            return replay.given(None, shape, x.device, cu_seqlens)
        shape[-1] *= cp.size
        return cp.shard(replay.given(None, shape, x.device, cu_seqlens), dim=len(shape) - 1)

    def _drop_selector_loss(self) -> None:
        """At the start of a forward."""
        if torch.is_grad_enabled() or not self.keep_selector_loss:
            self.selector_loss = None

    def _ask_selector(
        self,
        q: Tensor,
        k: dict[str, Tensor],
        weights: CompressionWeights,
        rope: Rope | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
        lengths: Tensor | None = None,
    ) -> None:
        """Leaves `selector_loss`; the arguments as of `sampled_divergence`."""
        if not (self.selector_queries and self.training and torch.is_grad_enabled()):
            return
        self._check_selector_queries()
        if q.shape[-2] < self.num_heads * self.ranks:
            given = f"selector_queries = {self.selector_queries}"
            raise ValueError(f"{given}: must be 0 with tensor parallelism, where a rank has some of the heads")
        # Keys shared with the selected branch define the target of the loss, so they get no gradient from it.
        k_cmp = k["cmp"] if isinstance(self.k_proj, nn.ModuleDict) else k["cmp"].detach()
        self.selector_loss = sampled_divergence(
            *(q, k_cmp, k["slc"], weights, self.cfg, rope, self.selector_queries),
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            lengths=lengths,
            compress=self._compress,
        )

    def _check_selector_queries(self) -> None:
        given = f"selector_queries = {self.selector_queries}"
        if self.selector_queries < 0:
            raise ValueError(f"{given}: must be >= 0")
        if self.selector_queries and self.phi_k.kind == "mean" and not isinstance(self.k_proj, nn.ModuleDict):
            raise ValueError(
                f"{given}: must be 0 with share_kv and phi = mean, as the selector has no weights to train"
            )
        if self.selector_queries and self.context_parallel is not None:
            raise ValueError(f"{given}: must be 0 with context_parallel")

    @staticmethod
    def _is_plain(projection: nn.Module) -> bool:
        """Returns whether the projection uses its weight unchanged: not quantized, adapted or replaced."""
        if type(projection) is not nn.Linear:
            return False
        # torch.compile does not read __dict__.
        return torch.compiler.is_compiling() or not ("forward" in vars(projection) or projection._forward_pre_hooks)

    @staticmethod
    def _check_dtype(x: Tensor, weight: Tensor | None) -> None:
        """`weight`: of a plain projection. What others take is for them to say."""
        if x.dtype in FLOATS and (weight is None or x.dtype == weight.dtype):
            return
        came, kind = str(x.dtype).removeprefix("torch."), x.device.type
        if weight is None:
            raise ValueError(f"x: dtype {came}: must be floating-point")
        cast = torch.amp.autocast_mode.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        if x.dtype not in FLOATS or not cast:
            expected = str(weight.dtype).removeprefix("torch.")
            raise ValueError(f"x: dtype {came}: must be {expected} as q_proj.weight, or floating-point in an autocast")

    _attend: Callable[..., Any] = staticmethod(native_sparse_attention)  # nsa.reference has others
    _compress: Callable[..., Tensor] = staticmethod(compress)

    @staticmethod
    def _heads(x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, x.shape[-1] // heads)  # unflatten does not compile under a default device

    def _branches(self, projection: nn.Module, norm: nn.Module | None, x: Tensor) -> dict[str, Tensor]:
        def one(projection: nn.Module, norm: nn.Module | None) -> Tensor:
            heads = self._heads(projection(x), self.num_kv_heads)
            return heads if norm is None else norm(heads)

        if not isinstance(projection, nn.ModuleDict):
            return dict.fromkeys(BRANCHES, one(projection, norm))
        return {
            branch: one(projection[branch], norm[branch] if isinstance(norm, nn.ModuleDict) else None)
            for branch in BRANCHES
        }

    def _tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of the positions below `length`; None: no rotation."""
        if self.rope is not None and not callable(self.rope):
            cos, sin = self.rope
            if cos.device != device:
                self.rope = cos.to(device), sin.to(device)
            return self.rope
        if self.rope is not None:
            return self.rope(torch.arange(length, device=device))
        if self.rope_theta is None:
            return None
        positions = torch.arange(length, device=device)
        return rotary_tables(positions, self.head_dim, self.rope_theta, self.partial_rotary_factor)

    def _tables_for(self, cache: KVCache) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of every position in the cache; cached as long as the rotation is the same."""
        device = cache.cache_seqlens.device
        rope_theta, factor, rope, tables = self._fold_tables
        same = rope_theta == self.rope_theta and factor == self.partial_rotary_factor and rope is self.rope
        if not same or tables is None or tables[0].shape[0] < cache.max_positions or tables[0].device != device:
            tables = self._tables(cache.max_positions, device)
            self._fold_tables = self.rope_theta, self.partial_rotary_factor, self.rope, tables
        return tables
