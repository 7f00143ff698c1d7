"""Configurations of Llama and Qwen3 with Native Sparse Attention: the dense fields, `nsa` and `dense_layers`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig, Qwen3Config

from ..config import NSAConfig
from ..layer import BRANCHES

LAYER_TYPE = "nsa"
"""What `layer_types` calls a sparse layer, and caches of transformers look up."""

PHI, COLWISE = "nsa_phi", "nsa_colwise"
"""Styles of tensor parallelism: of phi, and of names that stand for what is split by columns and for other things."""

OPTIONS = {**NSAConfig().__dict__, "share_kv": False, "phi": "mlp", "phi_hidden": 0, "phi_per_kv_head": False}
"""Fields of `nsa` and their defaults: those of NSAConfig and of the layer `nsa.NativeSparseAttention`."""


if TYPE_CHECKING:
    Mixin = Any
    """Base of classes that mix into those of transformers, where most of their members are."""
else:
    Mixin = object


class _Sparse(Mixin):
    """What both configurations add.

    Fields:
        nsa: hyperparameters of NSAConfig; `share_kv`, one key and one value projection for the three branches; `phi`,
            "mlp", "linear" or "mean"; `phi_hidden`, units of the mlp, 0: twice the head dim; `phi_per_kv_head`, a phi
            for each KV head or one for all. What is missing has its default.
        dense_layers: numbers of the layers that keep full attention.
    """

    if TYPE_CHECKING:  # settled by _complete()
        nsa: Any
        dense_layers: Any
        base_model_tp_plan: Any
        layer_types: Any

    def _complete(self) -> None:
        given = dict(self.nsa or {})
        for name, value in given.items():
            if name not in OPTIONS:
                raise ValueError(f"nsa: unknown field {name!r}: must be one of {', '.join(OPTIONS)}")
            if type(value) is not type(OPTIONS[name]):
                raise ValueError(f"nsa: {name} = {value!r}: must be of type {type(OPTIONS[name]).__name__}")
        self.nsa = {**OPTIONS, **given}
        if self.nsa["phi"] not in ("mlp", "linear", "mean"):
            raise ValueError(f"nsa: phi = {self.nsa['phi']!r}: must be mean, linear or mlp")
        self.nsa_config()
        if self.attention_dropout:
            raise ValueError(f"attention_dropout = {self.attention_dropout}: must be 0")
        if self.head_dim % 8:
            raise ValueError(f"head_dim = {self.head_dim}: must be a multiple of 8")
        rope = (self.rope_parameters or {}).get("rope_type")
        if rope in ("dynamic", "longrope"):  # keys of a cache and other rows of the batch would turn otherwise
            allowed = "default, linear, yarn, llama3 or proportional, whose angles do not depend on a text's length"
            raise ValueError(f"rope_parameters: rope_type = {rope!r}: must be {allowed}")
        layers = sorted(set(self.dense_layers or []))
        for layer in layers:
            if not 0 <= layer < self.num_hidden_layers:
                raise ValueError(f"dense_layers: {layer}: must be 0 ... {self.num_hidden_layers - 1}")
        self.dense_layers = layers
        self.base_model_tp_plan = {f"layers.*.{part}": style for part, style in self._tensor_parallel()}
        self.layer_types = ["full_attention" if i in layers else LAYER_TYPE for i in range(self.num_hidden_layers)]

    def nsa_config(self) -> NSAConfig:
        return NSAConfig(**{name: self.nsa[name] for name in NSAConfig.__dataclass_fields__})

    def _tensor_parallel(self) -> Iterator[tuple[str, str]]:
        """Styles of transformers for the parts of a layer: heads are split, the gradients of what they share summed."""
        branches = [""] if self.nsa["share_kv"] else [f".{branch}" for branch in BRANCHES]
        yield "self_attn.q_proj", "colwise"
        for branch in branches:
            yield f"self_attn.k_proj{branch}", "colwise"
            yield f"self_attn.v_proj{branch}", "colwise"
        if self.dense_layers and not self.nsa["share_kv"]:
            yield "self_attn.k_proj", COLWISE
            yield "self_attn.v_proj", COLWISE
            branches.append("")
        yield "self_attn.gate.*", COLWISE
        yield "self_attn.o_proj", "rowwise"
        if self.nsa["phi"] != "mean":
            yield "self_attn.phi_k", PHI
            yield "self_attn.phi_v", PHI
        if isinstance(self, Qwen3Config):
            for norm in ("q_norm", *(f"k_norm{branch}" for branch in branches)):
                yield f"self_attn.{norm}", "replicated_with_grad_allreduce"
        yield "mlp.gate_proj", "colwise"
        yield "mlp.up_proj", "colwise"
        yield "mlp.down_proj", "rowwise"

    def to_dict(self) -> dict[str, Any]:
        """Without layer_types, whose names Trainer, which reads config.json as of no model, would refuse."""
        return {name: value for name, value in super().to_dict().items() if name != "layer_types"}

    def validate_layer_type(self) -> None:
        """transformers knows a fixed list of names; `_complete` has made the list itself."""


@strict
class NsaLlamaConfig(_Sparse, LlamaConfig):
    __doc__ = _Sparse.__doc__
    model_type = "nsa_llama"

    nsa: dict[str, Any] | None = None
    dense_layers: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self._complete()


@strict
class NsaQwen3Config(_Sparse, Qwen3Config):
    __doc__ = _Sparse.__doc__
    model_type = "nsa_qwen3"

    nsa: dict[str, Any] | None = None
    dense_layers: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.layer_types = None
        super().__post_init__(**kwargs)
        if self.sliding_window is not None:
            raise ValueError(f"sliding_window = {self.sliding_window}: must be None (use_sliding_window = False)")
        self._complete()
