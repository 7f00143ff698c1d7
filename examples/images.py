"""A tiny Qwen3-VL with a sparse decoder learns to say which colour a corner of a generated image has.

The image is 64 tokens with positions of three axes. A query reads two blocks of 16 tokens, the window and summaries.

    python examples/images.py
"""

from typing import Any

import torch

import nsa
import nsa.hf

PATCH, SIDE, STEPS, BATCH = 4, 64, 75, 8
COLOURS, CORNERS, START, IMAGE, END = 8, 8, 12, 13, 14
"""Tokens: 0 to 7 are colours, 8 to 11 corners, the others begin an image, hold a place in it, and end it."""

BLOCKS = {"block_size": 16, "topk": 2, "init_blocks": 0, "local_blocks": 1, "window_size": 16}
PALETTE = torch.tensor([[i >> 2 & 1, i >> 1 & 1, i & 1] for i in range(COLOURS)]) - 0.5


def pictures(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images whose four corners have a colour each, as patches, and those colours (count, 4)."""
    colours = torch.randint(COLOURS, (count, 4))
    corners = PALETTE[colours].view(count, 2, 2, 3)
    pixels = corners.repeat_interleave(SIDE // 2, 1).repeat_interleave(SIDE // 2, 2)
    pixels = pixels + 0.1 * torch.randn_like(pixels)
    # The order of Qwen's processor: 2 x 2 patches make a token, and a still image is two equal frames.
    grid = pixels.view(count, SIDE // 8, 2, PATCH, SIDE // 8, 2, PATCH, 3).permute(0, 1, 4, 2, 5, 7, 3, 6)
    return grid.unsqueeze(6).expand(-1, -1, -1, -1, -1, -1, 2, -1, -1).reshape(-1, 3 * 2 * PATCH * PATCH), colours


def batch(count: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Inputs, an image and four corners in any order with their colours behind them; and labels of the colours."""
    patches, colours = pictures(count)
    order = torch.rand(count, 4).argsort(1)
    image = torch.tensor([START, *[IMAGE] * (SIDE // 8) ** 2, END])
    answers = torch.stack((CORNERS + order, colours.gather(1, order)), 2).flatten(1)
    ids = torch.cat((image.expand(count, -1), answers), 1)
    grid = torch.tensor([[1, SIDE // PATCH, SIDE // PATCH]]).expand(count, -1)
    inputs = {"input_ids": ids, "pixel_values": patches, "image_grid_thw": grid}
    labels = ids.where(ids < COLOURS, -100)
    return {**inputs, "mm_token_type_ids": (ids == IMAGE).int()}, labels


def main() -> None:
    """Trains, then counts right answers."""
    torch.manual_seed(0)
    text = {
        "vocab_size": 16,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
        "nsa": {"kernel_size": 8, "kernel_stride": 4, **BLOCKS, "share_kv": True},
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": PATCH,
        "out_hidden_size": 64,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [],
    }
    special: dict[str, Any] = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
    config = nsa.hf.NsaQwen3VLConfig(text_config=text, vision_config=vision, **special)
    model: Any = nsa.hf.NsaQwen3VLForConditionalGeneration(config)
    optimizer = torch.optim.AdamW(nsa.parameter_groups(model, 3e-3, 0.1))
    for step in range(1, STEPS + 1):
        inputs, labels = batch(BATCH)
        loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 0:
            print(f"step {step:3}: {loss.item():.3f} nats per colour")

    model.eval()
    inputs, labels = batch(64)
    with torch.no_grad():
        said = model(**inputs).logits[:, :-1].argmax(-1)
    asked = labels[:, 1:] >= 0
    share = (said == labels[:, 1:])[asked].float().mean().item()
    print(f"right colours: {share:.0%}, by chance {1 / COLOURS:.0%}")


if __name__ == "__main__":
    main()
