"""What the sparse layers of a forward attended to: `model(..., output_nsa=True).nsa`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._arguments import check_type
from ..config import CompressionWeights, NSAConfig
from ..functional import compress
from ..layer import BRANCHES
from ..rotary import rotate
from ..selector import block_mask


@dataclass
class NsaLayerOutput:
    """Block selection of a sparse layer. Keys and blocks are numbered by a row's tokens, without padding.

    Attributes:
        indices: int32 (B, S, Hkv, topk), the blocks that each query selected, ascending, padded with -1.
        gates: (B, S, H, 3) of the branches cmp, slc and swa.
        weights: attention weights of each branch, float32 (B, H, S, keys); `cmp` has compressed keys. Rows sum to 1,
            or to 0 where a query sees no key. Their memory is quadratic in the text.
    """

    indices: Tensor
    gates: Tensor
    weights: dict[str, Tensor]


def with_output_nsa(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model's forward that takes `output_nsa`: the output then has `nsa`, an NsaLayerOutput or None for each layer.

    `output_nsa` is True or the numbers of the layers to keep. Such a forward runs without a cache.
    """

    @functools.wraps(forward)
    def wrapper(self: Any, *arguments: Any, **inputs: Any) -> Any:
        wanted = inputs.pop("output_nsa", False)
        if wanted is None or wanted is False:
            return forward(self, *arguments, **inputs)
        if inputs.get("cache") is not None or inputs.get("use_cache"):
            raise ValueError("output_nsa = True: must be False with a cache")
        layers = [layer.self_attn for layer in self.get_decoder().layers]
        if wanted is not True:
            check_type("output_nsa", wanted, bool | Sequence[int])
            for number in wanted:
                if not 0 <= number < len(layers):
                    raise ValueError(f"output_nsa: {number}: must be 0 ... {len(layers) - 1}, the number of a layer")
        chosen = range(len(layers)) if wanted is True else wanted
        sparse = [layer for i, layer in enumerate(layers) if i in chosen and hasattr(layer, "keep_record")]
        try:
            for layer in sparse:
                layer.keep_record = True
            outputs = forward(self, *arguments, **{**inputs, "use_cache": False})
            records = tuple(getattr(layer, "record", None) for layer in layers)
        finally:
            for layer in sparse:
                layer.keep_record, layer.record = False, None
        if isinstance(outputs, tuple):
            return (*outputs, records)
        outputs["nsa"] = records
        return outputs

    if forward.__module__.startswith("transformers."):
        wrapper.__doc__ = (
            "As in transformers, with `output_nsa`: True or the numbers of layers. The output then has `nsa`."
        )
    return wrapper


@torch.no_grad()
def branch_weights(
    q: Tensor,
    k: dict[str, Tensor],
    weights_k: CompressionWeights,
    indices: Tensor,
    cfg: NSAConfig,
    rope: tuple[Tensor, Tensor],
) -> dict[str, Tensor]:
    """Attention weights of each branch, float32 (B, H, S, keys).

    Args:
        q: (B, S, H, D), and k of each branch (B, S, Hkv, D); not rotated.
        weights_k: phi of keys.
        indices: (B, S, Hkv, topk), the selected blocks.
        rope: cosines and sines (positions, D / 2), or of each token (B, S, D / 2).
    """
    length, group = q.shape[1], q.shape[2] // k["cmp"].shape[2]
    cos, sin = (table[..., :length, :] for table in rope)
    k_c = compress(k["cmp"], weights_k, cfg)
    ends = torch.arange(k_c.shape[1], device=q.device) * cfg.kernel_stride
    rotated = {branch: rotate(k[branch], cos, sin) for branch in BRANCHES[1:]}
    rotated["cmp"] = rotate(k_c, cos.index_select(-2, ends), sin.index_select(-2, ends))
    at = torch.arange(length, device=q.device)
    past = at <= at[:, None]
    blocks = -(-length // cfg.block_size)
    tokens = block_mask(indices, blocks).repeat_interleave(cfg.block_size, -1)[..., :length].transpose(1, 2)
    visible = {
        "cmp": ends + (cfg.kernel_size - 1) <= at[:, None],
        "slc": tokens.repeat_interleave(group, 1) & past,
        "swa": past & (at > at[:, None] - cfg.window_size),
    }
    q = rotate(q, cos, sin).float() * q.shape[-1] ** -0.5
    result = {}
    for branch in BRANCHES:
        keys = rotated[branch].float().repeat_interleave(group, 2)
        scores = torch.einsum("bshd,bthd->bhst", q, keys).masked_fill(~visible[branch], -torch.inf)
        result[branch] = scores.softmax(-1).nan_to_num(0.0)
    return result
