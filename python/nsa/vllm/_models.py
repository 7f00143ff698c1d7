"""Causal models of `nsa.hf` for vLLM: all but the attention is vLLM's Llama."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3Attention
from vllm.model_executor.models.utils import extract_layer_index

from ..compression import CompressionFunction
from . import check_supported
from ._attention import NsaAttentionLayer


class NsaAttention(nn.Module):
    """An attention layer of `nsa.hf` with the projections of vLLM, which share out the heads over ranks."""

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool,
        bias_o_proj: bool,
        prefix: str,
        **_: object,
    ) -> None:
        super().__init__()
        vllm_config = get_current_vllm_config()
        ranks = get_tensor_model_parallel_world_size()
        cfg, options, dim = config.nsa_config(), config.nsa, config.head_dim
        self.head_dim = dim
        self.num_heads, self.num_kv_heads = num_heads // ranks, num_kv_heads // ranks
        self.qkv_proj = QKVParallelLinear(
            hidden_size, dim, num_heads, num_kv_heads, bias=bias, prefix=f"{prefix}.qkv_proj"
        )
        self.o_proj = RowParallelLinear(num_heads * dim, hidden_size, bias=bias_o_proj, prefix=f"{prefix}.o_proj")
        hidden = max(1, hidden_size // 4)
        self.gate = nn.ModuleDict(
            {
                "0": ReplicatedLinear(hidden_size, hidden, prefix=f"{prefix}.gate.0"),
                "2": ColumnParallelLinear(hidden, 3 * num_heads, prefix=f"{prefix}.gate.2"),
            }
        )
        own = options["phi_per_kv_head"] and num_kv_heads > 1
        phi = options["phi"], cfg.kernel_size, dim, self.num_kv_heads if own else 1, options["phi_hidden"] or None
        self.phi_k, self.phi_v = CompressionFunction(*phi), CompressionFunction(*phi)
        for module in (self.phi_k, self.phi_v):
            for parameter in module.parameters():
                if own:
                    parameter.weight_loader = load_own_sets  # type: ignore[attr-defined]
        self.q_norm = self.k_norm = None
        if config.model_type == "nsa_qwen3":
            self.q_norm = RMSNorm(dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(dim, eps=config.rms_norm_eps)
        self.rope = rotation(config, vllm_config)
        self.attn = NsaAttentionLayer(
            self.num_heads,
            self.num_kv_heads,
            dim,
            cfg,
            (self.phi_k, self.phi_v, self.rope),
            vllm_config,
            f"{prefix}.attn",
        )

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """hidden_states: (T, hidden_size), as the result."""
        qkv, _ = self.qkv_proj(hidden_states)
        q, kv = qkv.unflatten(-1, (-1, self.head_dim)).split((self.num_heads, 2 * self.num_kv_heads), dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            k, v = kv.chunk(2, dim=-2)
            q, kv = self.q_norm(q.contiguous()), torch.cat((self.k_norm(k.contiguous()), v), dim=-2)
        hidden, _ = self.gate["0"](hidden_states)
        gates, _ = self.gate["2"](nn.functional.silu(hidden))
        o = self.attn(q, kv, torch.sigmoid(gates).unflatten(-1, (-1, 3)))
        return self.o_proj(o.flatten(-2))[0]


def load_own_sets(parameter: Tensor, loaded: Tensor) -> None:
    """Loads the φ of this rank's KV heads."""
    rank, sets = get_tensor_model_parallel_rank(), parameter.shape[0]
    parameter.data.copy_(loaded[rank * sets : (rank + 1) * sets])


def rotation(config: Any, vllm_config: VllmConfig) -> tuple[Tensor, Tensor]:
    """float32 cosines and sines (positions, head_dim / 2) as `nsa.hf` has them, one copy for all layers."""
    for layer in vllm_config.compilation_config.static_forward_context.values():
        if isinstance(layer, NsaAttentionLayer):
            return layer.sources[2]
    with torch.device("cpu"):
        positions = torch.arange(vllm_config.model_config.max_model_len + 1)
        cos, sin = LlamaRotaryEmbedding(config)(torch.empty(0, dtype=torch.float32), position_ids=positions[None])
    half = cos.shape[-1] // 2
    device = torch.get_default_device()
    return cos[0, :, :half].to(device).contiguous(), sin[0, :, :half].to(device).contiguous()


def _attention(config: Any, prefix: str, **options: Any) -> nn.Module:
    options["bias"] |= config.model_type == "nsa_qwen2"
    if extract_layer_index(prefix) not in config.dense_layers:
        return NsaAttention(config=config, prefix=prefix, **options)
    if config.model_type != "nsa_qwen3":
        return LlamaAttention(config=config, prefix=prefix, **options)
    return Qwen3Attention(
        *(options["hidden_size"], options["num_heads"], options["num_kv_heads"], config.rope_parameters),
        max_position=options["max_position_embeddings"],
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        cache_config=options["cache_config"],
        prefix=prefix,
    )


class NsaDecoderLayer(LlamaDecoderLayer):
    """vLLM's layer with sparse attention, or with full attention for those in `dense_layers`."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: Any = None) -> None:
        super().__init__(vllm_config, prefix, config, attn_layer_type=_attention)


class NsaLlamaForCausalLM(LlamaForCausalLM):
    """vLLM's model, made of these layers."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        check_supported(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=NsaDecoderLayer)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads weights: of a checkpoint all, later any, as a trainer sends them.

        vLLM starts with what is in memory for a linear layer that a checkpoint lacks. Its loaders end with `eval()`.
        Some write the parameters themselves: "dummy", and "sharded_state", which checks that it has them all.

        Raises:
            ValueError: the checkpoint lacks weights.
        """
        loaded = super().load_weights(weights)
        missing = sorted({name for name, _ in self.named_parameters()} - loaded)
        if self.training and missing:
            raise ValueError(f"weights: {missing[0]} and {len(missing) - 1} others: must be in the checkpoint")
        return loaded


class NsaMistralForCausalLM(NsaLlamaForCausalLM):
    """The same model."""


class NsaQwen2ForCausalLM(NsaLlamaForCausalLM):
    """The same with biases of q, k and v."""


class NsaQwen3ForCausalLM(NsaLlamaForCausalLM):
    """The same with norms of q and k."""
