"""Configurations of transformers' decoders with Native Sparse Attention: dense fields, `nsa`, `dense_layers`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import (
    AutoConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    Qwen3VLTextConfig,
    Qwen3VLVisionConfig,
)

from ..config import NSAConfig
from ..layer import BRANCHES

LAYER_TYPE = "nsa"
"""Name of a sparse layer in `layer_types` and in the caches of transformers."""

PHI, COLWISE = "nsa_phi", "nsa_colwise"
"""Styles of tensor parallelism: for phi, and for names that denote a column-split module in some configurations."""

OPTIONS = {**NSAConfig().__dict__, "share_kv": False, "phi": "mlp", "phi_hidden": 0, "phi_per_kv_head": False}
"""Fields of `nsa` and their defaults: those of NSAConfig and of the layer `nsa.NativeSparseAttention`."""

RECIPE = {**NSAConfig.recipe().__dict__, "share_kv": True, "phi": "mlp"}
"""Fields of `nsa` in the recipe."""

LOADER = "import_nsa_hf"
"""Name of the module in a saved folder whose import registers the sparse classes."""

LOADER_TEXT = '''"""Classes of this folder's model, for from_pretrained(FOLDER, trust_remote_code=True).

A program that runs `import nsa.hf` needs neither this file nor trust_remote_code.
"""

try:
    from nsa.hf import *
except ImportError as error:
    raise ImportError(f"{error}: this model needs libnsa's package nsa, with its extra hf (import nsa.hf)") from error
'''

SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("num_experts", "moe_intermediate_size", "num_experts_per_tok", "decoder_sparse_step"),
)
ROPE_TYPES = ("default", "linear", "yarn", "llama3", "proportional")
"""Those whose angles do not depend on a text's length: keys of a cache and other rows of a batch stay as they are."""


if TYPE_CHECKING:
    Mixin = Any
    """Base of classes that mix into those of transformers, where most of their members are."""
else:
    Mixin = object


class Loadable(Mixin):
    """A configuration whose folder names the classes that load it."""

    _heads: ClassVar[tuple[str, ...]] = ("CausalLM", "SequenceClassification", "TokenClassification")
    _auto_heads: ClassVar[tuple[str, ...]] = _heads

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__module__ == __name__ and hasattr(cls, "model_type"):
            AutoConfig.register(cls.model_type, cls)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *arguments: Any, **options: Any) -> None:
        """Also writes the module that `auto_map` names, so that the folder loads where nsa.hf is not imported."""
        family = type(self).__name__.removesuffix("Config")
        parts = {"AutoConfig": "Config", "AutoModel": "Model"}
        parts |= {f"AutoModelFor{a}": f"For{h}" for a, h in zip(self._auto_heads, self._heads, strict=True)}
        self.auto_map = {auto: f"{LOADER}.{family}{name}" for auto, name in parts.items()}
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{LOADER}.py").write_text(LOADER_TEXT)
        super().save_pretrained(save_directory, *arguments, **options)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing: transformers would copy this module, without those it imports, into every saved folder."""


@dataclass(kw_only=True)
class Sparse(Loadable):
    """Fields that the sparse configurations add.

    Fields:
        nsa: hyperparameters of NSAConfig; `share_kv`, one key and one value projection for the three branches; `phi`,
            "mlp", "linear" or "mean"; `phi_hidden`, units of the mlp, 0: twice the head dim; `phi_per_kv_head`, a phi
            for each KV head or one for all. What is missing has its default.
        dense_layers: numbers of the layers that keep full attention.
    """

    if TYPE_CHECKING:  # settled by _complete()
        nsa: Any
        dense_layers: Any
        head_dim: Any
        base_model_tp_plan: Any
        layer_types: Any
    else:
        nsa: dict[str, Any] | None = None
        dense_layers: list[int] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        cls.__doc__ = cls.__doc__ or Sparse.__doc__  # else a dataclass gets its signature
        super().__init_subclass__(**options)

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_fields(kwargs)
        if hasattr(self, "layer_types"):
            self.layer_types = None
        super().__post_init__(**kwargs)
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        self._complete()

    @classmethod
    def recipe(cls, *, nsa: dict[str, Any] | None = None, **fields: Any) -> Any:
        """A configuration with the setting of `nsa train`, for a model that is trained from scratch.

        `nsa` is that of `nsa.NSAConfig.recipe` with shared keys and values, and `rope_parameters` rotate half of the
        channels with base 500000. Fields that are given, also within `nsa`, replace these.
        """
        rope = {"rope_type": "proportional", "rope_theta": 500000.0, "partial_rotary_factor": 0.5}
        if not isinstance(nsa, dict | None):
            raise ValueError(f"nsa = {nsa!r}: must be a dict or None")
        return cls(**{"rope_parameters": rope, **fields, "nsa": {**RECIPE, **(nsa or {})}})

    def _check_fields(self, more: dict[str, Any]) -> None:
        """Checks fields that transformers accepts and that would fail or be wrong later; `more`: unknown fields."""
        for name in OPTIONS:
            if name in more:
                raise ValueError(f"{name} = {more[name]!r}: must be given in nsa")
        for name in SIZES:
            if (value := getattr(self, name, None)) is not None and value < 1:
                raise ValueError(f"{name} = {value}: must be >= 1")
        if (used := getattr(self, "num_experts_per_tok", 0)) > (experts := getattr(self, "num_experts", 0)):
            raise ValueError(f"num_experts_per_tok = {used}: must be at most num_experts = {experts}")
        if self.num_attention_heads % (self.num_key_value_heads or 1):
            what = f"num_key_value_heads = {self.num_key_value_heads}"
            raise ValueError(f"{what}: must divide num_attention_heads = {self.num_attention_heads}")
        for name, least in (("rms_norm_eps", "> 0"), ("initializer_range", ">= 0")):
            value = getattr(self, name)
            if not 0 <= value < math.inf or (value == 0 and least == "> 0"):
                raise ValueError(f"{name} = {value}: must be {least} and finite")
        if self.attention_dropout not in (None, 0):
            raise ValueError(f"attention_dropout = {self.attention_dropout}: must be 0")

    def _complete(self) -> None:
        """Checks `nsa` and `dense_layers` and what follows from them; again for a model, as fields may be changed."""
        if (window := getattr(self, "sliding_window", None)) is not None:
            switch = "" if not hasattr(self, "use_sliding_window") else " (use_sliding_window = False)"
            raise ValueError(f"sliding_window = {window}: must be None{switch}")
        if (causal := getattr(self, "is_causal", True)) is not True:  # else transformers' masks see the future
            raise ValueError(f"is_causal = {causal!r}: must be True")
        given = {} if self.nsa is None else self.nsa
        if not isinstance(given, dict):
            raise ValueError(f"nsa = {given!r}: must be a dict or None")
        for name, value in given.items():
            if name not in OPTIONS:
                raise ValueError(f"nsa: unknown field {name!r}: must be one of {', '.join(OPTIONS)}")
            if type(value) is not type(OPTIONS[name]):
                raise ValueError(f"nsa: {name} = {value!r}: must be of type {type(OPTIONS[name]).__name__}")
        self.nsa = {**OPTIONS, **given}
        if self.nsa["phi"] not in ("mlp", "linear", "mean"):
            raise ValueError(f"nsa: phi = {self.nsa['phi']!r}: must be mean, linear or mlp")
        if self.nsa["phi_hidden"] < 0:
            raise ValueError(f"nsa: phi_hidden = {self.nsa['phi_hidden']}: must be >= 1, or 0 for 2 x head dim")
        self.nsa_config()
        if self.head_dim % 8:
            raise ValueError(f"head_dim = {self.head_dim}: must be a multiple of 8")
        self._check_rope()
        dense = [] if self.dense_layers is None else self.dense_layers
        if not isinstance(dense, (list, tuple)):
            raise ValueError(f"dense_layers = {dense!r}: must be a list of integers or None")
        for layer in dense:
            if type(layer) is not int or not 0 <= layer < self.num_hidden_layers:
                raise ValueError(f"dense_layers: {layer!r}: must be 0 ... {self.num_hidden_layers - 1}")
        self.dense_layers = sorted(set(dense))
        self.base_model_tp_plan = dict(self._tensor_parallel())
        self.layer_types = ["full_attention" if i in dense else LAYER_TYPE for i in range(self.num_hidden_layers)]

    def _check_rope(self) -> None:
        rope = self.rope_parameters or {}
        kind = rope.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            allowed = f"{', '.join(ROPE_TYPES[:-1])} or {ROPE_TYPES[-1]}, whose angles do not depend on a text's length"
            raise ValueError(f"rope_parameters: rope_type = {kind!r}: must be {allowed}")
        axes = rope.get("mrope_section", [0, 0, 0])
        if not isinstance(axes, list | tuple) or len(axes) != 3 or any(type(n) is not int or n < 0 for n in axes):
            raise ValueError(f"rope_parameters: mrope_section = {axes!r}: must be three integers >= 0")
        ignored = getattr(self, "ignore_keys_at_rope_validation", None) or set()
        for name in rope.keys() - {"rope_type", "type", "truncate"} - ignored:
            value = rope[name]
            if value is None and name not in ("rope_theta", "factor"):
                continue
            if type(value) not in (int, float) or not math.isfinite(value):
                raise ValueError(f"rope_parameters: {name} = {value!r}: must be a finite number")
            if value <= 0 and name != "partial_rotary_factor":
                raise ValueError(f"rope_parameters: {name} = {value}: must be positive")
        share = rope.get("partial_rotary_factor")
        if share is not None and not 0 <= share <= 1:
            raise ValueError(f"rope_parameters: partial_rotary_factor = {share}: must be 0 ... 1")
        if share not in (None, 1) and kind != "proportional":
            what = f"partial_rotary_factor = {share}"
            raise ValueError(f"rope_parameters: {what}: must be 1 with rope_type = {kind!r}; goes with 'proportional'")

    def nsa_config(self) -> NSAConfig:
        """Hyperparameters of `nsa` as the operators take them."""
        return NSAConfig(**{name: self.nsa[name] for name in NSAConfig.__dataclass_fields__})

    def _tensor_parallel(self) -> Iterator[tuple[str, str]]:
        """Styles of transformers for the parts of a layer: heads are split, the gradients of what they share summed."""
        attention = "layers.*.self_attn."
        dense: dict[str, str] = getattr(type(self), "base_model_tp_plan", None) or {}
        if f"{attention}q_proj" not in dense:
            yield from dense.items()
            return
        branches = [] if self.nsa["share_kv"] else [f".{branch}" for branch in BRANCHES]
        for part, style in dense.items():
            name = part.removeprefix(attention)
            if not branches or name not in ("k_proj", "v_proj", "k_norm"):
                yield part, style
                continue
            yield from ((part + branch, style) for branch in branches)
            if self.dense_layers:
                yield part, style if name == "k_norm" else COLWISE
        yield f"{attention}gate.*", COLWISE
        if self.nsa["phi"] != "mean":
            yield f"{attention}phi_k", PHI
            yield f"{attention}phi_v", PHI

    def to_dict(self) -> dict[str, Any]:
        """Omits layer_types, because Trainer reads config.json without a model and would refuse the names."""
        return {name: value for name, value in super().to_dict().items() if name != "layer_types"}

    def validate_layer_type(self) -> None:
        """transformers knows a fixed list of names; `_complete` has made the list itself."""


@strict
class NsaLlamaConfig(Sparse, LlamaConfig):
    model_type = "nsa_llama"


@strict
class NsaMistralConfig(Sparse, MistralConfig):
    model_type = "nsa_mistral"
    sliding_window: int | None = None


@strict
class NsaQwen2Config(Sparse, Qwen2Config):
    model_type = "nsa_qwen2"
    head_dim: int | None = None


@strict
class NsaQwen3Config(Sparse, Qwen3Config):
    model_type = "nsa_qwen3"


@strict
class NsaQwen3MoeConfig(Sparse, Qwen3MoeConfig):
    model_type = "nsa_qwen3_moe"
    head_dim: int | None = None


@strict
class NsaQwen3VLTextConfig(Sparse, Qwen3VLTextConfig):
    model_type = "nsa_qwen3_vl_text"
    _heads = _auto_heads = ()


@strict
class NsaQwen3VLConfig(Loadable, Qwen3VLConfig):
    """Qwen3-VL with a sparse decoder: `text_config` has the fields `nsa` and `dense_layers`."""

    model_type = "nsa_qwen3_vl"
    sub_configs_defaults: ClassVar[Any] = {"vision_config": Qwen3VLVisionConfig, "text_config": NsaQwen3VLTextConfig}
    _heads = ("ConditionalGeneration",)
    _auto_heads = ("ImageTextToText",)
