"""Native Sparse Attention in Hugging Face transformers (extra `hf`).

Importing it registers attn_implementation="nsa", which runs a model's own attention pattern on the operators of this
package.
"""

try:
    import transformers  # noqa: F401
except ImportError:
    raise ImportError("nsa.hf needs transformers 5.23 or newer: pip install 'nsa[hf]'") from None

from .attention import nsa_attention_forward, nsa_attention_mask

__all__ = ["nsa_attention_forward", "nsa_attention_mask"]
