"""Sparse decoders behind a vision tower: positions of three axes, padding, caches, training."""

from __future__ import annotations

import pytest
import torch
import transformers

import nsa
import nsa.hf
from models import IMAGE, SMALL, error, pictures, sparse, tokens, vision_language
from nsa.selector import sampled_divergence

ROWS = (5, 10, 14, 30), (11, 3, 3, 60)
"""Text, an image, and text: the first row is longer than the blocks that a query selects."""


MASKS = ("attention_mask", "mm_token_type_ids")


@pytest.fixture
def sees(request):
    """A sparse model of images whose gates and phi are not at their start."""
    model = nsa.hf.convert(vision_language(), nsa=SMALL, phi="mlp", separate_kv=getattr(request, "param", False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".gate." in name or ".phi_" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("sees", [False, True], indirect=True)
def test_an_image_padded_alone_eager_and_cached_gives_the_same(sees):
    alone, state = [], torch.get_rng_state()
    with torch.no_grad():
        for side in ("left", "right"):
            torch.set_rng_state(state)
            inputs = pictures(*ROWS, side=side)
            mask = inputs["attention_mask"].bool()
            together = sees(**inputs).logits
            sees.set_attn_implementation({"text_config": "eager"})
            assert error(sees(**inputs).logits[mask], together[mask]) < 1e-4
            sees.set_attn_implementation({"text_config": "nsa"})
            assert error(sees(**inputs, use_cache=True).logits[mask], together[mask]) < 1e-4
            pixels = inputs["pixel_values"].split([560, 36])
            for i in range(2):
                row = {name: inputs[name][i : i + 1, mask[i]] for name in ("input_ids", "mm_token_type_ids")}
                grid = inputs["image_grid_thw"][i : i + 1]
                alone = sees(**row, pixel_values=pixels[i], image_grid_thw=grid).logits[0]
                assert error(together[i][mask[i]], alone) < 1e-4


def test_what_follows_an_image_is_generated_as_by_whole_forwards(sees):
    inputs = pictures(*ROWS)
    options = {"max_new_tokens": 20, "do_sample": False}
    for more in ({}, {"num_beams": 3}):
        expected = sees.generate(**inputs, **options, **more, use_cache=False)
        assert torch.equal(sees.generate(**inputs, **options, **more), expected)
    static = sees.generate(**inputs, **options, cache_implementation="static")
    assert torch.equal(static, sees.generate(**inputs, **options))
    text = {name: inputs[name] for name in ("input_ids", "attention_mask")}  # whose positions are its numbers
    text["input_ids"] = text["input_ids"] % 90
    held = sees.generate(**text, **options, return_dict_in_generate=True)
    assert held.cache.layers[0].rotation is None
    assert torch.equal(held.sequences, sees.generate(**text, **options, use_cache=False))


@pytest.mark.parametrize("static", [False, True])
def test_a_dialogue_goes_on_behind_an_image(sees, static):
    """A later turn gives no image again, and transformers one axis for all three."""
    inputs, options = pictures(*ROWS), {"max_new_tokens": 8, "do_sample": False}
    cache = transformers.StaticCache(sees.config.get_text_config(), max_cache_len=256) if static else None
    turn = sees.generate(**inputs, **options, cache=cache, return_dict_in_generate=True)
    more = tokens(len(ROWS), 20) % IMAGE
    added = turn.sequences.shape[1] + 20 - inputs["input_ids"].shape[1]
    whole = {name: torch.nn.functional.pad(inputs[name], (0, added), value=name == "attention_mask") for name in MASKS}
    whole["input_ids"] = torch.cat((turn.sequences, more), 1)
    expected = sees.generate(**{**inputs, **whole}, **options, use_cache=False)
    assert torch.equal(sees.generate(**whole, **options, cache=turn.cache), expected)


def test_axes_of_positions(sees):
    """A rotation by axes is relative, is by numbers where these are, and goes with packed sequences."""
    model, ids = sees.model.language_model, tokens(2, 150)
    axes = torch.stack([torch.arange(150).expand(2, -1), torch.randint(60, (2, 150)), torch.randint(60, (2, 150))])
    with torch.no_grad():
        by_axes, shifted = (model(ids, position_ids=p).last_hidden_state for p in (axes, axes + 9))
        assert error(shifted, by_axes) < 1e-4
        plain, off = (model(ids, position_ids=p).last_hidden_state for p in (None, axes[:1].expand(3, -1, -1) + 1))
        assert error(off, plain) < 1e-4 < error(by_axes, plain)
        packed = torch.cat((axes[:1], axes)).flatten(1)[:, None]
        rows = model(ids.view(1, 300), position_ids=packed, use_cache=False).last_hidden_state
        assert error(rows.view_as(by_axes), by_axes) < 1e-4
    for wrong in (axes[:2], torch.cat((axes, axes)), axes[..., 1:]):
        with pytest.raises(ValueError, match=r"^position_ids: \(\d, 2, 1..\): must be \(B, S\), \(3 or 1, B, S\)"):
            model(ids, position_ids=wrong)
    with pytest.raises(ValueError, match=r"^position_ids: \(3, 2, 150\): must be \(B, S\)$"):
        sparse("llama")(ids, position_ids=axes)


def test_images_train_and_have_a_selector_loss(sees):
    inputs = pictures(*ROWS)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"].cumsum(1) <= 1, -100)
    layers = [m for m in sees.modules() if isinstance(m, nsa.NativeSparseAttention)]
    for layer in layers:
        layer.selector_queries = 16
    sees.train()
    loss = sees(**inputs, labels=labels).loss + 0.1 * nsa.selector_loss(sees)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in sees.parameters())
    cos, sin = (torch.randn(150, 8) for _ in range(2))
    q, k, other = (torch.randn(2, 150, heads, 16) for heads in (8, 2, 2))
    losses = []
    for rope in ((cos, sin), tuple(table.expand(2, -1, -1) for table in (cos, sin))):
        torch.manual_seed(1)
        losses.append(sampled_divergence(q, k, other, layers[0].phi_k(q.dtype), layers[0].cfg, rope, 16))
    assert torch.equal(*losses) and losses[0] > 0


def test_a_padded_row_has_its_own_selection(sees):
    inputs = pictures(*ROWS)
    mask = inputs["attention_mask"].bool()
    with torch.no_grad():
        together = sees(**inputs, output_nsa=True).nsa
        names = ("input_ids", "mm_token_type_ids")
        row = {name: inputs[name][1:, mask[1]] for name in names} | {"image_grid_thw": inputs["image_grid_thw"][1:]}
        alone = sees(**row, pixel_values=inputs["pixel_values"][560:], output_nsa=True).nsa
    for many, one in zip(together, alone, strict=True):
        length = one.gates.shape[1]
        assert torch.equal(many.indices[1, mask[1]], one.indices[0]) and (many.indices[1, ~mask[1]] == -1).all()
        assert error(many.gates[1, mask[1]], one.gates[0]) < 1e-5
        for branch, weight in one.weights.items():
            assert error(many.weights[branch][1][:, mask[1], : weight.shape[-1]], weight[0]) < 1e-4
            assert not many.weights[branch][1][:, ~mask[1]].any() and weight.shape[2] == length
