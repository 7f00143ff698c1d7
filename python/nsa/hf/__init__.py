"""Native Sparse Attention in Hugging Face transformers (extra `hf`).

Importing it registers attn_implementation="nsa", which runs a model's own attention pattern on the operators of this
package, and the sparse models with transformers' Auto classes.
"""

try:
    import transformers
except ImportError:
    raise ImportError("nsa.hf needs transformers 5.24 or newer: pip install 'transformers>=5.24'") from None

_VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
if _VERSION < (5, 16):
    raise ImportError(f"nsa.hf needs transformers 5.24 or newer, this is {transformers.__version__}")

from .configuration import (  # noqa: E402
    NsaLlamaConfig,
    NsaMistralConfig,
    NsaQwen2Config,
    NsaQwen3Config,
    NsaQwen3MoeConfig,
    NsaQwen3VLConfig,
    NsaQwen3VLTextConfig,
)

if _VERSION >= (5, 24):
    from .attention import nsa_attention_forward, nsa_attention_mask
    from .cache import NsaDynamicLayer, NsaStaticLayer
    from .conversion import convert
    from .models import (
        NsaLlamaForCausalLM,
        NsaLlamaForSequenceClassification,
        NsaLlamaForTokenClassification,
        NsaLlamaModel,
        NsaMistralForCausalLM,
        NsaMistralForSequenceClassification,
        NsaMistralForTokenClassification,
        NsaMistralModel,
        NsaQwen2ForCausalLM,
        NsaQwen2ForSequenceClassification,
        NsaQwen2ForTokenClassification,
        NsaQwen2Model,
        NsaQwen3ForCausalLM,
        NsaQwen3ForSequenceClassification,
        NsaQwen3ForTokenClassification,
        NsaQwen3Model,
        NsaQwen3MoeForCausalLM,
        NsaQwen3MoeForSequenceClassification,
        NsaQwen3MoeForTokenClassification,
        NsaQwen3MoeModel,
        NsaQwen3VLForConditionalGeneration,
        NsaQwen3VLModel,
        NsaQwen3VLTextModel,
    )
    from .records import NsaLayerOutput
    from .training import NsaTrainerMixin, lora_fields

__all__ = [
    "NsaDynamicLayer",
    "NsaLayerOutput",
    "NsaLlamaConfig",
    "NsaLlamaForCausalLM",
    "NsaLlamaForSequenceClassification",
    "NsaLlamaForTokenClassification",
    "NsaLlamaModel",
    "NsaMistralConfig",
    "NsaMistralForCausalLM",
    "NsaMistralForSequenceClassification",
    "NsaMistralForTokenClassification",
    "NsaMistralModel",
    "NsaQwen2Config",
    "NsaQwen2ForCausalLM",
    "NsaQwen2ForSequenceClassification",
    "NsaQwen2ForTokenClassification",
    "NsaQwen2Model",
    "NsaQwen3Config",
    "NsaQwen3ForCausalLM",
    "NsaQwen3ForSequenceClassification",
    "NsaQwen3ForTokenClassification",
    "NsaQwen3Model",
    "NsaQwen3MoeConfig",
    "NsaQwen3MoeForCausalLM",
    "NsaQwen3MoeForSequenceClassification",
    "NsaQwen3MoeForTokenClassification",
    "NsaQwen3MoeModel",
    "NsaQwen3VLConfig",
    "NsaQwen3VLForConditionalGeneration",
    "NsaQwen3VLModel",
    "NsaQwen3VLTextConfig",
    "NsaQwen3VLTextModel",
    "NsaStaticLayer",
    "NsaTrainerMixin",
    "convert",
    "lora_fields",
    "nsa_attention_forward",
    "nsa_attention_mask",
]

if _VERSION < (5, 24):  # what nsa.vllm needs: some versions of vLLM want an older transformers
    _NAMES, __all__ = __all__, [name for name in __all__ if name.endswith("Config")]

    def __getattr__(name: str) -> object:
        if name in _NAMES:
            version = transformers.__version__
            raise ImportError(f"nsa.hf.{name} needs transformers 5.24 or newer: {version} has configurations alone")
        raise AttributeError(f"module 'nsa.hf' has no attribute {name!r}")
