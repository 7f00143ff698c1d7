"""Tiny random models of transformers, and comparisons."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

from nsa.hf import NsaLlamaConfig, NsaLlamaForCausalLM, NsaQwen3Config, NsaQwen3ForCausalLM

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # else a random model says the same whatever it attends to
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MINIMAX = {
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rotary_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk_blocks": 2,
    "layer_types": ["full_attention", "minimax_m3_sparse"],
}


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]}


def dense(name: str, **changes: object) -> PreTrainedModel:
    """An eager model in evaluation mode."""
    kind, config, more = {
        "llama": (LlamaForCausalLM, LlamaConfig, {}),
        "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
        "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, MOE),
        "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 16}),
        "minimax": (MiniMaxM3VLForCausalLM, MiniMaxM3VLTextConfig, MINIMAX),
    }[name]
    model = kind(config(**{**SIZES, **more, **changes}, attn_implementation="eager")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases and norms, which start as zeros and ones
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


DECODERS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Names of the dense models that convert() takes."""


def convertible(name: str, **changes: object) -> PreTrainedModel:
    """A dense model for convert(), with another head_dim than hidden_size / num_attention_heads."""
    return dense(name, **({"sliding_window": None} if name == "mistral" else {}), **changes)


IMAGE, IMAGE_START, IMAGE_END = 90, 91, 92
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}


def vision_language(**changes: object) -> PreTrainedModel:
    """A dense model of images and text in evaluation mode."""
    special = {"image_token_id": IMAGE, "vision_start_token_id": IMAGE_START, "vision_end_token_id": IMAGE_END}
    config = Qwen3VLConfig(
        text_config={**SIZES, "rope_parameters": MROPE, **changes}, vision_config=VISION, video_token_id=93, **special
    )
    return Qwen3VLForConditionalGeneration(config).eval()


def pictures(*rows: tuple[int, int, int, int], side: str = "left") -> dict[str, Tensor]:
    """Inputs whose rows are text, an image of height x width merged patches, and text again."""
    texts, patches = [], []
    for before, height, width, after in rows:
        image = torch.tensor([IMAGE_START, *[IMAGE] * (height * width), IMAGE_END])
        texts.append(torch.cat((tokens(before) % IMAGE, image, tokens(after) % IMAGE)))
        patches.append(torch.randn(4 * height * width, 3 * 2 * 4 * 4))
    ids, mask = padded(texts, side)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": torch.cat(patches),
        "image_grid_thw": torch.tensor([[1, 2 * height, 2 * width] for _, height, width, _ in rows]),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


SMALL = {"kernel_size": 8, "kernel_stride": 4, "block_size": 16, "topk": 4, "window_size": 20}
SPARSE = {"llama": (NsaLlamaForCausalLM, NsaLlamaConfig), "qwen3": (NsaQwen3ForCausalLM, NsaQwen3Config)}


def sparse(
    name: str, nsa: dict | None = None, dtype: torch.dtype = torch.float32, **changes: object
) -> PreTrainedModel:
    """A sparse model in evaluation mode whose gates and phi are not at their start."""
    kind, config = SPARSE[name]
    model = kind._from_config(config(**{**SIZES, **changes}, nsa={**SMALL, **(nsa or {})}), dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".gate." in name or ".phi_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def name_tied_head(folder: Path) -> None:
    """Lets the index of a tied model's folder name the head, which is in no file, as indexes of some models do."""
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    assert "lm_head.weight" not in index["weight_map"]
    index["weight_map"]["lm_head.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    file.write_text(json.dumps(index))


def move_to_hub(folder: Path, hub: Path, below: str) -> Path:
    """Moves a folder's files to blobs/HASH in the hub's cache; returns the one of links, snapshots/COMMIT/`below`."""
    blobs, snapshot = hub / "blobs", hub / "snapshots" / "0a1b" / below
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f"{number:040}")
        (snapshot / file.name).symlink_to(os.path.relpath(blobs / f"{number:040}", snapshot))
    return snapshot


def padded(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """ids and attention_mask (B, longest)."""
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        place = slice(longest - len(row), None) if side == "left" else slice(0, len(row))
        ids[i, place], mask[i, place] = row, 1
    return ids, mask


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, VOCABULARY, shape)


def error(given: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value expected."""
    return ((given - expected).abs().max() / expected.abs().max()).item()


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
