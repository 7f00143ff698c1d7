"""attn_implementation="nsa": the attention pattern that a decoder already has, on the operators of this package.

Causal attention and `sliding_window` run as `sliding_window_attention`, the `block_indices` of MiniMax-M3 as
`selected_attention`. Padded and padding-free batches become packed sequences; nothing of size S x S is made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from ..functional import selected_attention, sliding_window_attention
from .packing import Rows, int32_offsets, is_padded, length_bound, offsets_of_restarts

NAME = "nsa"


def nsa_attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: object = None,
    device: torch.device | str = "cpu",
    **_: object,
) -> Tensor | None:
    """The mask for `nsa_attention_forward`, from padding and documents: None, or a tensor (B, kv_length).

    With padding, int8: 1 for a token, 0 for padding, -1 behind the last query in a cache of fixed size. For a
    padding-free batch, int32: the document index of each token.

    Raises:
        ValueError: the model's attention is its own, or asks for a pattern that is neither causal nor a sliding window;
            `attention_mask` holds another value than 0 and 1, and is in host memory or waited for.
    """
    if not _hands_over(type(config)):
        model = getattr(config, "model_type", None)
        raise ValueError(f"attn_implementation = 'nsa': must be 'eager' for {model!r}, whose attention is its own code")
    if use_vmap:
        raise ValueError("or_mask_function, and_mask_function: must be None with attn_implementation='nsa'")
    if local_size is not None and local_size != getattr(config, "sliding_window", None):
        raise ValueError(f"attention_chunk_size = {local_size}: must be None with attn_implementation='nsa'")
    if mask_function is not causal_mask_function and not isinstance(q_offset, Tensor) and q_length > 1:
        rows = torch.arange(q_offset, q_offset + q_length - 1, device=device)
        batch = torch.arange(batch_size, device=device)[:, None]
        later = torch.as_tensor(mask_function(batch, 0, rows, rows + 1)).any()
        refusal = "is_causal = False: attn_implementation='nsa' has causal attention only"
        if compiling := torch.compiler.is_compiling():  # a graph cannot depend on values
            torch._assert_async(~later, refusal)
        elif bool(later):
            raise ValueError(refusal)
        if attention_mask is None and kv_length == q_length and local_size != 1:
            starts = ~torch.as_tensor(mask_function(batch, 0, rows + 1, rows)).expand(batch_size, -1)
            if compiling or bool(starts.any()):
                return torch.nn.functional.pad(starts.cumsum(1, dtype=torch.int32), (1, 0))
    full = not isinstance(q_offset, Tensor) and kv_length + kv_offset == q_offset + q_length
    if full and attention_mask is None:
        return None
    mask = torch.ones(batch_size, kv_length, dtype=torch.int8, device=device)
    if attention_mask is not None:
        given = attention_mask[:, kv_offset : kv_offset + kv_length].to(device)
        tokens = given.bool()
        mask[:, : given.shape[1]] = tokens
        padded = is_padded(tokens, given, wait=full)
        if full:
            return mask if padded else None
    slots = torch.arange(kv_offset, kv_offset + kv_length, device=device)
    return torch.where(slots < q_offset + q_length, mask, -1)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _hands_over(config: type) -> bool:
    """Returns whether a configuration's model calls the attention function that is set; True if unknown."""
    try:
        model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(config, None) or MODEL_MAPPING.get(config, None)
    except ValueError:  # the table names a class that does not exist
        return True
    if not hasattr(model, "_can_set_attn_implementation"):
        return True
    return bool(model._supports_attention_backend or model._can_set_attn_implementation())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _masks_slide(layer: type) -> bool:
    """Returns whether the model of a layer has masks of sliding windows, which not all with a `sliding_window` have."""
    return hasattr(sys.modules.get(layer.__module__), "create_sliding_window_causal_mask")


def _configured_window(module: Any) -> int | None:
    if not _masks_slide(type(module)):
        return None
    config = getattr(module, "config", None)
    window, kinds = (getattr(config, name, None) for name in ("sliding_window", "layer_types"))
    slides = kinds is None or kinds[module.layer_idx] == "sliding_attention"
    return window or None if slides else None


def nsa_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = 0,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    read_index: object = None,
    block_indices: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    output_attentions: bool = False,
    **_: object,
) -> tuple[Tensor, None]:
    """An attention function of transformers' AttentionInterface.

    Args:
        query: (B, H, Sq, D).
        key, value: (B, Hkv, Sk, D and Dv); query i has position i + Sk - Sq.
        attention_mask: result of `nsa_attention_mask`; int32: document indices, one sequence per document.
        sliding_window: number of last tokens that a query attends to, itself included; None: all. 0, from models that
            hand it over in the mask alone (Phimoe, Qwen2-MoE): what the configuration says of the layer.
        block_indices: int (B, Hkv, Sq, n), the blocks of `module.indexer.block_size` keys that a query sees, in any
            order, padded with -1.
        position_ids: (B or 1, Sq); a position that does not follow the one before starts a sequence.
        cu_seq_lens_q, cu_seq_lens_k: offsets of padding-free sequences in the flattened batch.

    Returns:
        (B, Sq, H, Dv), None.

    Raises:
        ValueError: an option that the operators do not have; the message names it.
    """
    if sliding_window == 0:
        sliding_window = _configured_window(module)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    refused = (
        ("attention_dropout", dropout, dropout > 0.0, "0 in training"),
        ("softcap", softcap, softcap is not None, "None"),
        ("s_aux (attention sinks)", "a tensor", s_aux is not None, "None"),
        ("position_bias", "a tensor", position_bias is not None, "None"),
        ("is_causal", causal, not causal, "True"),
        ("output_attentions", output_attentions, bool(output_attentions), "False"),
        ("read_index", "given", read_index is not None, "None: continuous batching is not supported"),
    )
    for name, given, wrong, rule in refused:
        if wrong:
            raise ValueError(f"{name} = {given}: must be {rule} with attn_implementation='nsa'")
    if attention_mask is not None and attention_mask.dim() != 2:
        shape = tuple(attention_mask.shape)
        raise ValueError(f"attention_mask: {shape}: must be (B, S) or None with attn_implementation='nsa'")

    # Autocast and norms that PEFT keeps in float32 leave queries and keys in another type than values.
    device = value.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (query, key, value))
    indices = None if block_indices is None else block_indices.transpose(1, 2).to(torch.int32)

    def attend(q: Tensor, k: Tensor, v: Tensor, indices: Tensor | None, **packed: Any) -> Tensor:
        if indices is not None:
            return selected_attention(q, k, v, indices, module.indexer.block_size, scaling, **packed)[0]
        longest = packed.get("max_seqlen_k") or k.shape[0 if packed else 1]
        window = longest if sliding_window is None else sliding_window
        return sliding_window_attention(q, k, v, max(1, window), scaling, **packed)[0]

    if attention_mask is not None and attention_mask.dtype == torch.int32:
        slots = torch.arange(q.shape[1], device=attention_mask.device)
        position_ids, attention_mask = attention_mask + slots, None  # they skip one where a document starts
    if cu_seq_lens_q is None and cu_seq_lens_k is not None:
        raise ValueError("cu_seq_lens_q: None: must be given with cu_seq_lens_k")
    if attention_mask is not None:
        if cu_seq_lens_q is not None:
            raise ValueError("cu_seq_lens_q: must be None with padding in attention_mask")
        return _padded(attend, q, k, v, indices, attention_mask), None
    if cu_seq_lens_q is None and position_ids is not None and q.shape[1] == k.shape[1] > 1:
        cu_seq_lens_q = cu_seq_lens_k = offsets_of_restarts(position_ids, q.shape[0], q.shape[1])
    if cu_seq_lens_q is None:
        return attend(q, k, v, indices), None
    if indices is not None:
        raise ValueError("block_indices: must be None in a padding-free batch, whose blocks would span sequences")
    o = attend(
        *(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), None),
        cu_seqlens_q=int32_offsets("cu_seq_lens_q", cu_seq_lens_q),
        cu_seqlens_k=int32_offsets("cu_seq_lens_k", cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k),
        max_seqlen_q=length_bound("max_length_q", max_length_q),
        max_seqlen_k=length_bound("max_length_k", max_length_k),
    )
    return o.unflatten(0, q.shape[:2]), None


def _padded(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, indices: Tensor | None, mask: Tensor
) -> Tensor:
    """Attention of the tokens among the keys, `mask` as from `nsa_attention_mask`, as if nothing else were there."""
    (batch, sq), sk = q.shape[:2], k.shape[1]
    tokens = mask > 0
    if indices is not None and bool((tokens[:, 1:] & ~tokens[:, :-1]).any()):
        raise ValueError("attention_mask: block_indices goes with right padding only: blocks would hold padding")
    slots_of_queries = (mask[0] >= 0).sum() - sq + torch.arange(sq, device=mask.device)
    rows_q, rows_k = Rows.of(tokens[:, slots_of_queries]), Rows.of(tokens)
    o = attend(
        rows_q.front(q).flatten(0, 1),
        *(rows_k.front(x).flatten(0, 1) for x in (k, v)),
        None if indices is None else rows_q.front(indices).flatten(0, 1),
        cu_seqlens_q=rows_q.offsets(),
        cu_seqlens_k=rows_k.offsets(),
        max_seqlen_q=sq,
        max_seqlen_k=sk,
    )
    return rows_q.back(o.unflatten(0, (batch, sq)))


AttentionInterface.register(NAME, nsa_attention_forward)
AttentionMaskInterface.register(NAME, nsa_attention_mask)
