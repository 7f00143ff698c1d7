"""Decoders of transformers with Native Sparse Attention: all but the attention is transformers' own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Qwen3MoeConfig,
    initialization,
)
from transformers.cache_utils import Cache, DynamicCache
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import ColwiseParallel, ReplicatedWithGradAllReduce
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.modeling_llama import (
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
)
from transformers.models.mistral.modeling_mistral import (
    MistralForCausalLM,
    MistralForSequenceClassification,
    MistralForTokenClassification,
    MistralModel,
)
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
    Qwen2Model,
)
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
    Qwen3Model,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeForCausalLM,
    Qwen3MoeForSequenceClassification,
    Qwen3MoeForTokenClassification,
    Qwen3MoeModel,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
    Qwen3VLTextModel,
)
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.output_capturing import capture_outputs

from .. import functional, reference
from .._arguments import check_type
from ..compression import CompressionFunction, initial_compression_weights
from ..config import CompressionWeights
from ..layer import NativeSparseAttention
from ..rotary import rows_within
from .configuration import (
    COLWISE,
    LAYER_TYPE,
    PHI,
    Mixin,
    NsaLlamaConfig,
    NsaMistralConfig,
    NsaQwen2Config,
    NsaQwen3Config,
    NsaQwen3MoeConfig,
    NsaQwen3VLConfig,
    NsaQwen3VLTextConfig,
    Sparse,
)
from .packing import INTEGERS, Rows, is_padded, length_bound, offsets_of_restarts, self_attention_offsets
from .records import NsaLayerOutput, branch_weights, with_output_nsa
from .rotation import add_tokens, attention_by_token_tables


class Layout:
    """Positions of a batch's sequences, shared by all sparse layers of a forward.

    A plain class, into which FSDP does not look: it would cast the tables of a dataclass to the type of the parameters.

    Attributes:
        tables: cosines and sines, float32 (positions, D / 2); or (B, S, D / 2) of each token, those of a row in
            front, with a cache (B, positions, D / 2) of each token in it.
        rows: the order of a padded batch; None: no padding.
        tokens: bool (B, S), which slots hold tokens; None: all.
        cu_seqlens: int32 offsets of padding-free sequences in the flattened batch.
        max_seqlen: an upper bound of their lengths.
    """

    def __init__(self, tables: tuple[Tensor, Tensor]) -> None:
        self.tables = tables
        self.rows: Rows | None = None
        self.tokens: Tensor | None = None
        self.cu_seqlens: Tensor | None = None
        self.max_seqlen: int | None = None
        self._copies: dict[torch.device, Layout] = {}

    def to(self, device: torch.device | str | int) -> Layout:
        """Copies to another device, once: accelerate moves the inputs of each layer to its device."""
        device = torch.device(device)
        if self.tables[0].device == device:
            return self
        if device not in self._copies:
            cos, sin = self.tables
            copy = self._copies[device] = Layout((cos.to(device), sin.to(device)))
            copy.rows = None if self.rows is None else self.rows.to(device)
            copy.tokens = None if self.tokens is None else self.tokens.to(device)
            copy.cu_seqlens = None if self.cu_seqlens is None else self.cu_seqlens.to(device)
            copy.max_seqlen = self.max_seqlen
        return self._copies[device]


class NsaAttention(NativeSparseAttention):
    """The layer `nsa.NativeSparseAttention` with transformers' rotation, padding and caches."""

    def __init__(self, config: Sparse, layer_idx: int, dense: Any) -> None:
        """`dense`: the model's own attention, whose biases and norms the layer has."""
        options = {name: config.nsa[name] for name in ("share_kv", "phi", "phi_hidden", "phi_per_kv_head")}
        super().__init__(
            *(config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim),
            cfg=config.nsa_config(),
            qkv_bias=dense.q_proj.bias is not None,
            out_bias=dense.o_proj.bias is not None,
            qk_norm=hasattr(dense, "q_norm"),
            norm_eps=config.rms_norm_eps,
            rope_theta=None,
            **options,
        )
        self.config = config
        self.layer_idx = layer_idx
        self.keep_record = False
        self.record: NsaLayerOutput | None = None
        first: Any = self.gate[0]
        last: Any = self.gate[2]
        first.on_every_rank = True  # for SomeColwise
        last.starts_at_zero = True  # for _init_weights

    def forward(  # type: ignore[override]  # transformers' arguments
        self, hidden_states: Tensor, layout: Layout, cache: Cache | None = None, **_: object
    ) -> tuple[Tensor, None]:
        """hidden_states: (B, S, hidden_size), as the result."""
        rows, cu_seqlens = layout.rows, layout.cu_seqlens
        if self.context_parallel is not None:
            raise ValueError("context_parallel: must be None in a model of nsa.hf")
        self._drop_selector_loss()
        x = hidden_states if rows is None else rows.front(hidden_states)
        v = self._branches(self.v_proj, None, x)
        dtype = v["cmp"].dtype  # under autocast, norms leave queries and keys in another
        q = self._heads(self.q_proj(x), self.num_heads)
        q = (q if self.q_norm is None else self.q_norm(q)).to(dtype)
        k = {b: one.to(dtype) for b, one in self._branches(self.k_proj, self.k_norm, x).items()}
        gates = torch.sigmoid(self.gate(x)).to(dtype).unflatten(-1, (-1, 3))
        if cache is None and (rows is not None or cu_seqlens is not None):
            # Behind the projections: an adapter of each row takes rows.
            cu_seqlens = cu_seqlens if rows is None else rows.offsets()
            q, gates = q.flatten(0, 1), gates.flatten(0, 1)
            k, v = ({b: one.flatten(0, 1) for b, one in branches.items()} for branches in (k, v))
        inputs = {"weights_k": self.phi_k(dtype), "weights_v": self.phi_v(dtype), "rope": layout.tables}
        if isinstance(self.k_proj, nn.ModuleDict):
            inputs |= {"k_slc": k["slc"], "v_slc": v["slc"], "k_swa": k["swa"], "v_swa": v["swa"]}
        if cache is None:
            if cu_seqlens is not None:
                inputs |= {"cu_seqlens_q": cu_seqlens, "max_seqlen_q": layout.max_seqlen}
            if self.replayed is not None:
                shape = hidden_states.shape[:2]
                blocks = self.replayed.given(layout.tokens, shape, x.device, layout.cu_seqlens)
                blocks = blocks if rows is None else rows.front(blocks)
                inputs["indices"] = blocks if cu_seqlens is None else blocks.flatten(0, 1)
            operations = reference if self.config._attn_implementation == "eager" else functional
            attend: Any = operations.native_sparse_attention
            if layout.tables[0].dim() == 3:
                attend = partial(attention_by_token_tables, operations)
            wanted = self.keep_record if self.replayed is None else self.replayed.compares
            found: Any = attend(q, k["cmp"], v["cmp"], gates, cfg=self.cfg, return_indices=wanted, **inputs)
            o = found[0] if wanted else found
            if self.replayed is not None and wanted:
                self.replayed.compare(inputs["indices"], found[1])
            if self.keep_record:
                blocks = found[1] if self.replayed is None else inputs["indices"]
                self._keep_record(q, k, gates, blocks, inputs["weights_k"], layout)
            if self.selector_queries:
                where = (cu_seqlens, layout.max_seqlen)
                if rows is not None and cu_seqlens is not None:  # every other sequence is padding
                    where = (cu_seqlens[::2], layout.max_seqlen)
                lengths = None if rows is None else rows.count
                self._ask_selector(q, k, inputs["weights_k"], layout.tables, *where, lengths=lengths)
        else:
            held: Any = cache.layers[self.layer_idx]
            inputs |= {"tokens": layout.tokens, "record_selections": self.record_selections}
            o = held.step(q, k["cmp"], v["cmp"], gates, cfg=self.cfg, **inputs)
        o = o.flatten(-2)
        o = self.o_proj(o.view(*hidden_states.shape[:2], o.shape[-1]))
        return o if rows is None else rows.back(o), None

    def _keep_record(
        self,
        q: Tensor,
        k: dict[str, Tensor],
        gates: Tensor,
        indices: Tensor,
        weights: CompressionWeights,
        layout: Layout,
    ) -> None:
        rows = layout.rows
        if layout.cu_seqlens is not None:
            raise ValueError("output_nsa = True: must be False with packed sequences")
        if rows is not None:
            q, gates, indices, *keys = (x.unflatten(0, rows.order.shape) for x in (q, gates, indices, *k.values()))
            k = dict(zip(k, keys, strict=True))
        found = branch_weights(q, k, weights, indices, self.cfg, layout.tables)
        if rows is not None:
            behind = torch.arange(q.shape[1], device=q.device) >= rows.count[:, None]
            indices = rows.back(indices.masked_fill(behind[..., None, None], -1))
            gates = rows.back(gates.masked_fill(behind[..., None, None], 0.0))
            for branch, weight in found.items():
                by_query = weight.transpose(1, 2).masked_fill(behind[..., None, None], 0.0)
                found[branch] = rows.back(by_query).transpose(1, 2)
        self.record = NsaLayerOutput(indices, gates, found)

    def _heads(self, x: Tensor, heads: int) -> Tensor:  # type: ignore[override]  # there without self
        # With tensor parallelism `heads` is more than there are.
        if x.shape[-1] % self.head_dim:
            raise ValueError(
                f"tp_size: {x.shape[-1]} of {heads * self.head_dim} channels on this rank are not a multiple of "
                f"head_dim = {self.head_dim}: tp_size must divide the number of key/value heads, {self.num_kv_heads}"
            )
        return x.unflatten(-1, (-1, self.head_dim))


class PhiParallel(ReplicatedWithGradAllReduce):
    """Tensor parallelism of phi: its parameters are on every rank, and each rank uses those of its own heads."""

    def install_forward(self, module: CompressionFunction, mesh: DeviceMesh) -> CompressionFunction:
        super().install_forward(module, mesh)
        whole, per_rank = module.forward, module.num_sets // mesh.size()
        if module.num_sets == 1:
            return module
        own = slice(mesh.get_local_rank() * per_rank, (mesh.get_local_rank() + 1) * per_rank)

        def of_own_heads(dtype: torch.dtype) -> CompressionWeights:
            kind, *weights = whole(dtype).as_arguments()
            return CompressionWeights(kind, *(None if weight is None else weight[own] for weight in weights))

        module.forward = of_own_heads  # type: ignore[method-assign]
        return module


class SomeColwise(ColwiseParallel):
    """ColwiseParallel of projections that share a name with other things.

    transformers' plans take numbers for those of layers: "gate.*" is the first layer, too. And k_proj is a projection
    in dense layers, elsewhere a dict of such.
    """

    @staticmethod
    def _is_split(module: nn.Module) -> bool:
        return isinstance(module, nn.Linear) and not getattr(module, "on_every_rank", False)

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        if self._is_split(module):
            super().shard_param(module, param, mesh)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return super().install_forward(module, mesh) if self._is_split(module) else module


_styles: Any = ALL_PARALLEL_STYLES  # declared for functions
_styles.register(PHI, PhiParallel())
_styles.register(COLWISE, SomeColwise())


CAUSAL_MODELS: dict[type[Any], Any] = {}
"""The language model of each sparse configuration."""


class _Sparse(Mixin):
    """Methods that the classes of all families share. A class with a configuration registers with its Auto class."""

    _auto: Any = None
    _supports_flash_attn = _supports_sdpa = _supports_flex_attn = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__module__ == __name__ and "config_class" in vars(cls):
            cls.__doc__ = cls.__bases__[0].__doc__
            cls.forward = with_output_nsa(cls.forward)
            cls._auto.register(cls.config_class, cls)
            if cls._auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
                CAUSAL_MODELS[cls.config_class] = cls
                # Label smoothing in a Trainer shifts the labels of the classes in this table only.
                MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[cls.config_class.model_type] = cls.__name__

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *_: object, **__: object) -> str:
        if attn_implementation not in (None, "nsa", "eager"):
            raise ValueError(f"attn_implementation = {attn_implementation!r}: must be 'nsa' or 'eager'")
        return attn_implementation or "nsa"

    @classmethod
    def register_for_auto_class(cls, auto_class: object = "AutoModel") -> None:
        """Does nothing: the saved configuration names the module that a folder needs."""

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if getattr(module, "starts_at_zero", False):
            initialization.zeros_(module.get_parameter("weight"))
        elif isinstance(module, CompressionFunction) and module.pe is not None:
            for name, value in initial_phi(module):
                initialization.copy_(getattr(module, name), value)


class _SparseModel(_Sparse):
    """The decoder without a head: the layers that are not dense get an NsaAttention."""

    _auto = AutoModel
    _output: type[Any] = BaseModelOutputWithPast
    _has_axes = False

    def __init__(self, config: Any) -> None:
        config._complete()
        super().__init__(config)
        for i, layer in enumerate(self.layers):
            if i not in (config.dense_layers or ()):
                layer.self_attn = NsaAttention(config, i, layer.self_attn)
        self._tables: tuple[Tensor, Tensor] | None = None
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: object,
    ) -> Any:
        """Forward as in transformers, with these differences.

        Args:
            attention_mask: (B, tokens seen, these included), 1 for a token and 0 for padding, or None. Each row is
                computed as if its padding were not there: positions count tokens. Compiled code, and a step of a static
                cache on a GPU, do not check the values and take what is not 0 for 1.
            position_ids: integers (B or 1, S): where they restart, a sequence starts, but not in a padded batch; the
                dense layers rotate by them. With three axes (3, B or 1, S), or one for all three, or (4, ...) behind
                such, all layers rotate by them.
            use_cache: default the configuration's where gradients are off, else False: a step with a cache has none.
                False, too, for packed sequences.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids, inputs_embeds: exactly one must be given")
        for name, tensor in (("attention_mask", attention_mask), ("position_ids", position_ids)):
            check_type(name, tensor, Tensor | None)
        if position_ids is not None and position_ids.dtype not in INTEGERS:
            raise ValueError(f"position_ids: {str(position_ids.dtype).removeprefix('torch.')}: must be integers")
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(f"attention_mask: {tuple(attention_mask.shape)}: must be (B, S) or None")
        if kwargs.get("is_causal") is False:
            raise ValueError("is_causal = False: must be True in a sparse model")
        if kwargs.get("output_attentions", self.config.output_attentions):
            raise ValueError("output_attentions = True: must be False in a sparse model, which has output_nsa = True")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            checkpointing = self.gradient_checkpointing and self.training
            use_cache = self.config.use_cache and not torch.is_grad_enabled() and not checkpointing
            if use_cache and cache is None:
                use_cache = not _is_packed(hidden_states, attention_mask, position_ids, kwargs)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        check_type("cache", cache, Cache | None)
        layers: Any = self.layers[: self.config.num_hidden_layers]  # fewer for drafts with assistant_early_exit
        if cache is not None:
            for i, kind in enumerate(self.config.layer_types[: len(layers)]):
                held = cache.layers[i] if i < len(cache.layers) else None
                if held is None or (kind == LAYER_TYPE) != hasattr(held, "step"):
                    raise ValueError("cache: must be made for the model: DynamicCache(config=model.config)")
        axes = None
        if position_ids is not None and position_ids.dim() == 3:
            length = hidden_states.shape[1]
            if not self._has_axes or position_ids.shape[0] not in (1, 3, 4) or position_ids.shape[2] != length:
                expected = "(B, S)" + (", (3 or 1, B, S) or (4, B, S)" if self._has_axes else "")
                raise ValueError(f"position_ids: {tuple(position_ids.shape)}: must be {expected}")
            axes, position_ids = position_ids[-3:], position_ids[0] if position_ids.shape[0] == 4 else None
        layout = self._layout(hidden_states, attention_mask, position_ids, cache, kwargs)
        self._rotate_by_axes(layout, axes, hidden_states, cache)
        dense: dict[str, Any] = {"position_embeddings": None}
        if self.config.dense_layers:
            if position_ids is None and axes is None and layout.cu_seqlens is not None:
                shape = hidden_states.shape[:2]  # given offsets may lead over several rows
                position_ids = rows_within(layout.cu_seqlens, shape.numel())[0].view(shape)
            elif position_ids is None and axes is None:
                slots = 0 if cache is None else cache.get_seq_length()
                position_ids = (torch.arange(hidden_states.shape[1], device=hidden_states.device) + slots)[None]
            dense["attention_mask"] = create_causal_mask(
                config=self.config,
                inputs_embeds=hidden_states,
                attention_mask=attention_mask,
                cache=cache,
                position_ids=position_ids,
            )
            turned_by = position_ids if axes is None else axes
            dense["position_embeddings"] = self.rotary_emb(hidden_states, position_ids=turned_by)
            dense["position_ids"] = position_ids
        deepstack: Any = kwargs.pop("deepstack_visual_embeds", None) or ()
        images = kwargs.pop("visual_pos_masks", None)
        for i, layer in enumerate(layers):
            hidden_states = layer(hidden_states, cache=cache, layout=layout, use_cache=use_cache, **dense, **kwargs)
            if i < len(deepstack):
                hidden_states = self._deepstack_process(hidden_states, images, deepstack[i])
        return self._output(last_hidden_state=self.norm(hidden_states), cache=cache if use_cache else None)

    def _layout(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        kwargs: dict[str, Any],
    ) -> Layout:
        batch, length = x.shape[:2]
        seen = 0 if cache is None else cache.get_seq_length()
        fixed = -1 if cache is None else cache.get_max_length()
        if fixed > 0:
            positions = fixed
        elif cache is not None:  # capacity of a growing cache, tokens rolled back included
            positions = 3 * (seen + length) // 2 + 127
        else:  # given offsets may lead over several rows
            positions = length if kwargs.get("cu_seq_lens_q") is None else batch * length
        compiling, offsets = torch.compiler.is_compiling(), kwargs.get("cu_seq_lens_q")
        if cache is None and compiling:  # a graph for every length
            layout = Layout(self._rotate(positions, x.device))
        else:
            layout = Layout(self._rotation(positions, x.device))
        if attention_mask is not None:
            shape = tuple(attention_mask.shape)
            least = length if isinstance(seen, Tensor) else seen + length
            if shape[0] != batch or shape[1] < least or (shape[1] > least and fixed <= 0):
                expected = f"({batch}, {least}{' or more' if fixed > 0 else ''})"
                raise ValueError(f"attention_mask: {shape}: must be {expected}: rows, tokens seen and these")
            new = torch.arange(length, device=x.device) + (seen.to(x.device) if isinstance(seen, Tensor) else seen)
            mask = attention_mask.to(x.device)
            tokens = mask.bool().index_select(1, new)
            if mask.device.type == "cpu" and not compiling:  # a GPU would have to be waited for
                for layer in _sparse_layers(cache)[:1]:
                    if hasattr(layer, "check_mask"):
                        layer.check_mask(mask)
            if compiling and offsets is not None:
                torch._assert_async(tokens.all(), "cu_seq_lens_q: must be None with padding in attention_mask")
            elif is_padded(tokens, mask, wait=not isinstance(seen, Tensor)) or isinstance(seen, Tensor):
                layout.rows, layout.tokens, layout.max_seqlen = Rows.of(tokens), tokens, length
        if position_ids is not None:  # after the mask, from which `generate` computes them
            given = tuple(position_ids.shape)
            if given not in ((1, length), (batch, length)):  # no restart of a document would be seen
                raise ValueError(f"position_ids: {given}: must be (B = {batch} or 1, S = {length})")
        cu_seqlens = self_attention_offsets(offsets, kwargs.get("cu_seq_lens_k"))
        if cu_seqlens is not None and layout.rows is not None:
            raise ValueError("cu_seq_lens_q: must be None with padding in attention_mask")
        begins = cache is None or (not isinstance(seen, Tensor) and seen == 0)
        unpadded = layout.rows is None or (compiling and cache is None)
        if cu_seqlens is None and unpadded and position_ids is not None and begins:
            cu_seqlens = offsets_of_restarts(position_ids, batch, length, layout.tokens)
        if cu_seqlens is not None:
            if cache is not None:
                raise ValueError("use_cache: must be False with packed sequences")
            layout.cu_seqlens = cu_seqlens
            layout.max_seqlen = length_bound("max_length_q", kwargs.get("max_length_q"))
        return layout

    def _rotate_by_axes(self, layout: Layout, axes: Tensor | None, x: Tensor, cache: Cache | None) -> None:
        """Gives `layout` the tables of each token, unless all positions are the tokens' numbers."""
        layers = _sparse_layers(cache)
        kept = layers[0].rotation if layers else None
        if axes is None and kept is None:
            return
        (batch, length), device = x.shape[:2], x.device
        seen = layers[0].cache.cache_seqlens[:, None] if layers and layers[0].cache is not None else 0
        number = (seen + torch.arange(length, device=device)).expand(batch, -1)
        axes = number.expand(3, -1, -1) if axes is None else axes.to(device).expand(3, batch, -1)
        is_token = torch.ones_like(number, dtype=torch.bool)
        if layout.rows is not None:
            axes = torch.stack([layout.rows.front(axis) for axis in axes])
            is_token = torch.arange(length, device=device) < layout.rows.count[:, None]
        if kept is None and not torch.compiler.is_compiling() and bool(((axes == number) | ~is_token).all()):
            return
        like = torch.empty(0, dtype=torch.float32, device=device)
        cos, sin = (t[..., : t.shape[-1] // 2] for t in self.rotary_emb(like, position_ids=axes))
        if cache is not None:
            at = number.where(is_token, layout.tables[0].shape[0])
            cos, sin = layers[0].rotation = add_tokens(kept, layout.tables, (cos, sin), at)
        layout.tables = cos, sin

    @torch.inference_mode(False)  # cached tensors must do for training, too
    @torch.no_grad()
    def _rotation(self, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines of at least `positions` tokens; cached, so that a step computes none."""
        tables = self._tables
        if tables is None or tables[0].shape[0] < positions or tables[0].device != device:
            # A multiple of a cache's page, too.
            tables = self._tables = self._rotate(max(64, 1 << (positions - 1).bit_length()), device)
        return tables

    @torch.no_grad()
    def _rotate(self, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
        like = torch.empty(0, dtype=torch.float32, device=device)
        cos, sin = self.rotary_emb(like, position_ids=torch.arange(positions, device=device)[None])
        half = cos.shape[-1] // 2
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Rotation stays float32 in a model that `to` or `bfloat16` casts, as in one that is loaded in that type."""
        before = dict(self.rotary_emb.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            if (cast := getattr(self.rotary_emb, name)).dtype != buffer.dtype and not buffer.is_meta:
                setattr(self.rotary_emb, name, buffer.to(cast.device))
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": None}  # recomputed, so not pickled


def _is_packed(x: Tensor, mask: Tensor | None, position_ids: Tensor | None, kwargs: dict[str, Any]) -> bool:
    batch, length = x.shape[:2]
    if kwargs.get("cu_seq_lens_q") is not None:
        return True
    if (
        torch.compiler.is_compiling()
        or position_ids is None
        or position_ids.shape not in ((1, length), (batch, length))
    ):
        return False
    padded = mask is not None and not bool(mask.all())
    return not padded and offsets_of_restarts(position_ids, batch, length) is not None


def _sparse_layers(cache: Cache | None) -> list[Any]:
    return [] if cache is None else [layer for layer in cache.layers if hasattr(layer, "step")]


class _SparseForCausalLM(_Sparse):
    """Sparse model with a language modelling head."""

    _auto = AutoModelForCausalLM

    def __init__(self, config: Any) -> None:
        PreTrainedModel.__init__(self, config)  # the parent's would make a dense model
        self.model = AutoModel.from_config(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class _SparseForSequenceClassification(_Sparse):
    """Sparse model with a head on the last token of each sequence: classes, or a reward (num_labels=1)."""

    _auto = AutoModelForSequenceClassification


class _SparseForTokenClassification(_Sparse):
    """Sparse model with a head on every token."""

    _auto = AutoModelForTokenClassification


class NsaLlamaModel(_SparseModel, LlamaModel):
    config_class = NsaLlamaConfig


class NsaLlamaForCausalLM(_SparseForCausalLM, LlamaForCausalLM):
    config_class = NsaLlamaConfig


class NsaLlamaForSequenceClassification(_SparseForSequenceClassification, LlamaForSequenceClassification):
    config_class = NsaLlamaConfig


class NsaLlamaForTokenClassification(_SparseForTokenClassification, LlamaForTokenClassification):
    config_class = NsaLlamaConfig


class NsaMistralModel(_SparseModel, MistralModel):
    config_class = NsaMistralConfig


class NsaMistralForCausalLM(_SparseForCausalLM, MistralForCausalLM):
    config_class = NsaMistralConfig


class NsaMistralForSequenceClassification(_SparseForSequenceClassification, MistralForSequenceClassification):
    config_class = NsaMistralConfig


class NsaMistralForTokenClassification(_SparseForTokenClassification, MistralForTokenClassification):
    config_class = NsaMistralConfig


class NsaQwen2Model(_SparseModel, Qwen2Model):
    config_class = NsaQwen2Config


class NsaQwen2ForCausalLM(_SparseForCausalLM, Qwen2ForCausalLM):
    config_class = NsaQwen2Config


class NsaQwen2ForSequenceClassification(_SparseForSequenceClassification, Qwen2ForSequenceClassification):
    config_class = NsaQwen2Config


class NsaQwen2ForTokenClassification(_SparseForTokenClassification, Qwen2ForTokenClassification):
    config_class = NsaQwen2Config


class NsaQwen3Model(_SparseModel, Qwen3Model):
    config_class = NsaQwen3Config


class NsaQwen3ForCausalLM(_SparseForCausalLM, Qwen3ForCausalLM):
    config_class = NsaQwen3Config


class NsaQwen3ForSequenceClassification(_SparseForSequenceClassification, Qwen3ForSequenceClassification):
    config_class = NsaQwen3Config


class NsaQwen3ForTokenClassification(_SparseForTokenClassification, Qwen3ForTokenClassification):
    config_class = NsaQwen3Config


class NsaQwen3MoeModel(_SparseModel, Qwen3MoeModel):
    config_class = NsaQwen3MoeConfig
    _output = MoeModelOutputWithPast


class NsaQwen3MoeForCausalLM(_SparseForCausalLM, Qwen3MoeForCausalLM):
    config_class = NsaQwen3MoeConfig

    def __init__(self, config: NsaQwen3MoeConfig) -> None:
        super().__init__(config)
        self.router_aux_loss_coef = config.router_aux_loss_coef
        self.num_experts, self.num_experts_per_tok = config.num_experts, config.num_experts_per_tok


class NsaQwen3MoeForSequenceClassification(_SparseForSequenceClassification, Qwen3MoeForSequenceClassification):
    config_class = NsaQwen3MoeConfig


class NsaQwen3MoeForTokenClassification(_SparseForTokenClassification, Qwen3MoeForTokenClassification):
    config_class = NsaQwen3MoeConfig


class NsaQwen3VLTextModel(_SparseModel, Qwen3VLTextModel):
    config_class = NsaQwen3VLTextConfig
    _has_axes = True


class _VisionLanguage(_Sparse):
    """Images and text: transformers' model, whose decoder is sparse."""

    _auto: Any = AutoModel
    _supports_sdpa = True

    def _check_and_adjust_attn_implementation(self, *arguments: Any, **options: Any) -> Any:
        return super(_Sparse, self)._check_and_adjust_attn_implementation(*arguments, **options)


class NsaQwen3VLModel(_VisionLanguage, Qwen3VLModel):
    config_class = NsaQwen3VLConfig


class NsaQwen3VLForConditionalGeneration(_VisionLanguage, Qwen3VLForConditionalGeneration):
    config_class = NsaQwen3VLConfig
    _auto = AutoModelForImageTextToText


def initial_phi(phi: CompressionFunction) -> Iterator[tuple[str, Tensor]]:
    """Names and float32 values of what a phi starts from, drawn from torch's generator."""
    start = initial_compression_weights(phi.kind, phi.kernel_size, phi.head_dim, phi.num_sets, phi.hidden)
    for name in ("pe", "w1", "b1", "w2", "b2"):
        if getattr(start, name) is not None:
            yield name, getattr(start, name)


register_checkpoint_conversion_mapping(
    NsaQwen3MoeConfig.model_type, get_checkpoint_conversion_mapping(Qwen3MoeConfig.model_type)
)
