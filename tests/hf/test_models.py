"""Sparse decoders: saving, generation, caches, training modes."""

from __future__ import annotations

import copy
import inspect
import json
import math
import os
import pickle
import re
import subprocess
import sys
import textwrap

import pytest
import tokenizers
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorWithFlattening,
    DynamicCache,
    StaticCache,
)

import nsa
import nsa.hf
from models import (
    IMAGE,
    SIZES,
    SMALL,
    SPARSE,
    VOCABULARY,
    dense,
    error,
    gradients,
    padded,
    pictures,
    sparse,
    tokens,
    vision_language,
)
from nsa.inspect import main as draw_inspected
from nsa.selector import sampled_divergence

BOTH = pytest.mark.parametrize("name", SPARSE)
LENGTHS = (5, 83, 150)  # below l = 8; about n * l' = 64; far above
GREEDY = {"max_new_tokens": 20, "do_sample": False}


def greedy(model, row, count=20):
    """Tokens by whole forwards without a cache, and the logits that chose them."""
    logits = []
    for _ in range(count):
        last = model(row[None], use_cache=False).logits[0, -1]
        logits.append(last)
        row = torch.cat((row, last.argmax()[None]))
    return row[-count:], torch.stack(logits)


# Saving


@pytest.mark.bits
@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_saved_and_loaded_by_the_auto_classes_it_gives_the_same_bits(name, dtype, tied, tmp_path):
    model = sparse(name, dtype=dtype, tie_word_embeddings=tied, dense_layers=[1])
    ids = tokens(2, 100)
    model.save_pretrained(tmp_path, max_shard_size="100kB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model) and loaded.dtype == dtype
    assert loaded.config.nsa == model.config.nsa and loaded.config.dense_layers == [1]
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True)
        assert torch.equal(loaded(ids).logits, expected.logits)
        base = AutoModel.from_pretrained(tmp_path)
        assert torch.equal(base(ids).last_hidden_state, expected.hidden_states[-1])
    assert type(AutoConfig.from_pretrained(tmp_path)) is SPARSE[name][1]
    assert type(model)._from_config(model.config).config.nsa == model.config.nsa


@pytest.mark.bits
@BOTH
@pytest.mark.parametrize("side", ["left", "right"])
def test_classifiers_begin_with_a_language_model(name, side, tmp_path):
    """A reward for each sequence and classes for each token, in a padded batch as alone; and they learn."""
    causal = sparse(name)
    causal.save_pretrained(tmp_path)
    rows = [tokens(length) for length in (40, 90)]
    ids, mask = padded(rows, side)
    for auto, labels in ((AutoModelForSequenceClassification, 1), (AutoModelForTokenClassification, 3)):
        model = auto.from_pretrained(tmp_path, num_labels=labels).eval()
        assert all(torch.equal(t, causal.get_parameter(n)) for n, t in model.named_parameters() if "score" not in n)
        with torch.no_grad():
            together = model(ids, attention_mask=mask).logits
            for b, row in enumerate(rows):
                alone = model(row[None]).logits[0]
                torch.testing.assert_close(together[b] if labels == 1 else together[b][mask[b].bool()], alone)
                last = model.score(model.model(row[None]).last_hidden_state)[0]
                assert torch.equal(alone, last[-1] if labels == 1 else last)
        target = torch.tensor([[0.5], [-1.0]]) if labels == 1 else torch.where(mask.bool(), ids % labels, -100)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
        for _ in range(4):
            losses.append(model(ids, attention_mask=mask, labels=target).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[-1] < losses[0]


@BOTH
@pytest.mark.parametrize("phi", ["mlp", "linear", "mean"])
def test_missing_weights_start_as_in_a_new_layer(name, phi, tmp_path):
    """Where a checkpoint has no phi and gates, they start as a new layer's: phi the mean, gates one half."""
    model = SPARSE[name][0](SPARSE[name][1](**SIZES, nsa={**SMALL, "phi": phi}))
    weights = {n: p for n, p in model.state_dict().items() if ".phi_" not in n and ".gate." not in n}
    model.save_pretrained(tmp_path, state_dict=weights)
    attention = AutoModelForCausalLM.from_pretrained(tmp_path).model.layers[0].self_attn
    k = torch.randn(1, 8, 2, 16)
    assert error(nsa.compress(k, attention.phi_k(k.dtype), attention.cfg), k.mean(1, keepdim=True)) < 1e-5
    assert not attention.gate[2].weight.any() and not attention.gate[2].bias.any()


def test_a_configuration_is_checked():
    config = SPARSE["llama"][1]
    for nsa_, message in (
        ({"topk": 0}, r"^topk = 0: must be >= 1"),
        ({"top": 4}, r"^nsa: unknown field 'top': must be one of kernel_size, "),
        ({"share_kv": 1}, r"^nsa: share_kv = 1: must be of type bool"),
        ({"phi": "max"}, r"^nsa: phi = 'max': must be mean, linear or mlp"),
    ):
        with pytest.raises(ValueError, match=message):
            config(**SIZES, nsa=nsa_)
    with pytest.raises(ValueError, match=r"^dense_layers: 2: must be 0 \.\.\. 1"):
        config(**SIZES, dense_layers=[2])
    for rope in ("dynamic", "longrope"):
        parameters = {"rope_type": rope, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
        parameters |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if rope == "longrope" else {}
        with pytest.raises(ValueError, match=f"^rope_parameters: rope_type = '{rope}': must be default, linear, "):
            config(**SIZES, rope_parameters=parameters)
    assert config().nsa_config() == nsa.NSAConfig()
    with pytest.raises(ValueError, match=r"^attn_implementation = 'sdpa': must be 'nsa' or 'eager'"):
        SPARSE["llama"][0]._from_config(config(**SIZES), attn_implementation="sdpa")


# The attention is the layer's


@BOTH
@pytest.mark.parametrize("share_kv", [False, True])
def test_an_attention_layer_is_native_sparse_attention(name, share_kv):
    model = sparse(name, nsa={"share_kv": share_kv}, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    attention = model.model.layers[0].self_attn
    cfg = nsa.NSAConfig(**SMALL)
    layer = nsa.NativeSparseAttention(64, 8, 2, 16, cfg=cfg, share_kv=share_kv, qk_norm=name == "qwen3")
    layer.load_state_dict(attention.state_dict())
    x = torch.randn(2, 100, 64)
    layout = model.model._layout(x, None, None, None, {})
    with torch.no_grad():
        assert error(attention(x, layout)[0], layer(x)) < 1e-6


@BOTH
@pytest.mark.parametrize("rope", ["default", "linear", "yarn", "llama3", "proportional"])
def test_eager_is_the_reference_for_every_rotation(name, rope):
    parameters = {"rope_type": rope, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    parameters |= {"llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0}}.get(rope, {})
    parameters |= {"proportional": {"partial_rotary_factor": 0.5}}.get(rope, {})
    model = sparse(name, rope_parameters=parameters, max_position_embeddings=256, dense_layers=[1])
    rows = [tokens(n) for n in (60, 200)]
    ids, mask = padded(rows, "left")
    labels = ids.masked_fill(mask.cumsum(1) <= 1, -100)  # padding before the first token would predict it
    results = {}
    for implementation in ("eager", "nsa"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        out = model(ids, attention_mask=mask, labels=labels)
        out.loss.backward()
        results[implementation] = out.logits.detach()[mask.bool()], gradients(model)
    assert error(results["nsa"][0], results["eager"][0]) < 1e-4
    largest = max(g.abs().max() for g in results["eager"][1].values())
    for n, grad in results["eager"][1].items():
        assert (results["nsa"][1][n] - grad).abs().max() < 1e-3 * largest
    with torch.no_grad():  # the rotation of a position does not depend on the length
        cache = model(ids[:, :150], attention_mask=mask[:, :150], use_cache=True).cache
        last = model(ids[:, 150:], attention_mask=mask, cache=cache, use_cache=True).logits
    assert error(last[1], out.logits[1, 150:]) < 1e-4


def test_tables_of_the_rotation_are_as_long_as_needed():
    model = sparse("llama", num_hidden_layers=1).model

    def positions_after(*lengths, cache=None):
        model._tables = None
        for length in lengths:
            model(tokens(1, length), cache=cache, use_cache=cache is not None)
        return model._tables[0].shape[0]

    with torch.no_grad():
        assert [positions_after(n) for n in (1, 64, 65, 128, 129)] == [64, 64, 128, 128, 256]
        for size, positions in ((60, 64), (128, 128), (129, 256)):
            assert positions_after(30, 1, cache=StaticCache(config=model.config, max_cache_len=size)) == positions
        for length in (1, 31, 32, 33, 127, 128, 129, 190):  # a cache has more capacity than tokens
            cache = DynamicCache(config=model.config)
            assert positions_after(length, *[1] * 70, length, cache=cache) < 4 * cache.layers[0].cache.max_length
        offsets = torch.tensor([0, 120], dtype=torch.int32)
        model._tables = None  # a sequence that goes over two rows
        assert model(tokens(2, 60), cu_seq_lens_q=offsets, use_cache=False).last_hidden_state.isfinite().all()
        assert pickle.loads(pickle.dumps(model))._tables is None and model._tables is not None


def test_trained_after_a_forward_in_inference_mode():
    model, ids = sparse("llama", dense_layers=[1]), tokens(1, 50)
    with torch.inference_mode():
        model(ids)
    model.train()(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


# Images


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


# What a layer attended to


@pytest.mark.parametrize("share_kv", [False, True])
def test_gates_weights_and_values_make_the_attention(share_kv):
    model = sparse("qwen3", nsa={"share_kv": share_kv, "topk": 3}, dense_layers=[1])
    attention, seen = model.model.layers[0].self_attn, []
    attention.register_forward_pre_hook(lambda _, __, given: seen.append(given["hidden_states"]), with_kwargs=True)
    attention.o_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        layer, dense_layer = model(tokens(2, 100), output_nsa=True).nsa
        v = attention._branches(attention.v_proj, None, seen[0])
        v["cmp"] = nsa.compress(v["cmp"], attention.phi_v(v["cmp"].dtype), attention.cfg)
    parts = [
        gate[..., None] * torch.einsum("bhst,bthd->bshd", layer.weights[branch], v[branch].repeat_interleave(4, 2))
        for gate, branch in zip(layer.gates.unbind(-1), layer.weights, strict=True)
    ]
    assert list(v) == ["cmp", "slc", "swa"] and dense_layer is None
    assert error(sum(parts).flatten(-2), seen[1]) < 1e-5
    assert layer.indices.shape == (2, 100, 2, 3) and layer.indices.max() == 6
    assert not attention.keep_record and attention.record is None


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


@pytest.mark.parametrize("shape", [(39,), (1, 39), (1, 41), (2, 40), (), (40,)])
def test_positions_of_another_shape_are_refused(shape):
    """They would separate no documents."""
    model, ids = sparse("llama"), tokens(1, 40)
    with pytest.raises(ValueError, match=r"^position_ids: \(.*\): must be \(B = 1 or 1, S = 40\)$"):
        model(ids, position_ids=torch.zeros(shape, dtype=torch.int64))


def test_forwards_that_keep_no_record():
    model, ids = sparse("llama"), tokens(1, 40)
    for inputs, message in (
        ({"use_cache": True}, r"^output_nsa = True: must be False with a cache$"),
        ({"position_ids": torch.arange(40)[None] % 20}, r"^output_nsa = True: must be False with packed sequences$"),
        ({"output_attentions": True}, r"^output_attentions = True: must be False in a sparse model, which has out"),
    ):
        with pytest.raises(ValueError, match=message):
            model(ids, output_nsa=True, **inputs)
    for numbers, message in (
        ([0.5], r"output_nsa\[0\]: float"),
        ([True], r"output_nsa\[0\]: bool"),
        (0, "output_nsa: int"),
    ):
        with pytest.raises(TypeError, match=f"^{message}: must be"):
            model(ids, output_nsa=numbers)
    for number in (-1, 2):
        with pytest.raises(ValueError, match=rf"^output_nsa: {number}: must be 0 \.\.\. 1, the number of a layer$"):
            model(ids, output_nsa=[0, number])
    assert "input_ids" in inspect.signature(model.forward).parameters  # by which Trainer chooses columns
    assert len(model(ids, output_nsa=True, return_dict=False)[-1]) == 2


def draw_failed(capsys, folder, ids):
    """The last line of a picture's refusal; transformers may report before it."""
    assert draw_inspected([str(folder), "--ids", str(ids), "--out", str(ids.parent / "none.png")]) == 2
    return capsys.readouterr().err.splitlines(keepends=True)[-1]


def test_a_picture_of_what_layers_attend_to(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    folder, file = tmp_path / "model", tmp_path / "ids"
    sparse("llama", dense_layers=[1], num_hidden_layers=3).save_pretrained(folder)
    file.write_text(" ".join(str(i % VOCABULARY) for i in range(150)))

    def drawn(out, *options):
        code = draw_inspected([str(folder), "--out", str(tmp_path / out), *options])
        printed = capsys.readouterr()
        assert code == 0 or len(printed.err.splitlines()) == 1
        return printed.out if code == 0 else printed.err.removeprefix("error: ")

    assert drawn("a.png", "--ids", str(file)) == f"{tmp_path / 'a.png'}: layers 0, 2 of {folder}, 150 tokens\n"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert drawn("b.png", "--prompt", "w1 w2").startswith(f"--prompt: {folder} has no tokenizer of transformers: must")
    assert drawn("b.png", "--ids", str(file), "--layers", "1").startswith(
        "--layers 1: must be numbers of sparse layers"
    )
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    assert drawn("b.html", "--prompt", "w1 <b> w2", "--layers", "2").endswith(f"layers 2 of {folder}, 3 tokens\n")
    assert "w1 &lt;b&gt; w2" in (tmp_path / "b.html").read_text() and not (tmp_path / "b.png").exists()
    file.write_text("1 97")
    assert drawn("b.png", "--ids", str(file)) == f"{file}: must be token numbers 0 ... 96, at least one\n"
    assert drawn("b.png", "--ids", "/dev/zero") == "/dev/zero: not a regular file\n"
    os.mkfifo(tmp_path / "waits")
    assert drawn("b.png", "--ids", str(tmp_path / "waits")) == f"{tmp_path / 'waits'}: not a regular file\n"
    file.write_bytes(b"\xff")
    assert drawn("b.png", "--ids", str(file)) == f"{file}: must hold decimal numbers with spaces between them\n"
    file.write_text("1 2")
    with pytest.raises(SystemExit):
        drawn("none/b.png", "--ids", str(file))
    assert "none/b.png: must be in a folder that exists" in capsys.readouterr().err
    config, weights = folder / "config.json", folder / "model.safetensors"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, "intermediate_size": 32}))
    assert "weights cannot be loaded" in draw_failed(capsys, folder, file)
    config.write_text(json.dumps({**fields, "dense_layers": [0, 1, 2]}))
    assert draw_failed(capsys, folder, file).endswith("dense_layers = [0, 1, 2]: must leave a sparse layer\n")
    config.write_text(json.dumps(fields))
    weights.write_bytes(weights.read_bytes()[:1000])
    assert draw_failed(capsys, folder, file).startswith(f"error: {folder}: its weights cannot be loaded: ")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "nsa.report.style")
    monkeypatch.delattr(nsa.report, "style")
    assert drawn("b.png", "--ids", str(file)).endswith(": pip install matplotlib\n")


@pytest.mark.parametrize("folder", ["/no/such", "./none", "~/none", "a/b/c", "runs/none", "none", "none/", "", "file"])
def test_a_path_that_is_no_folder_is_not_asked_for_on_the_hub(folder, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "file").touch()
    assert draw_inspected([folder, "--prompt", "w1", "--out", "a.png"]) == 2
    assert capsys.readouterr().err == f"error: FOLDER = {folder}: not a folder\n"
    assert draw_inspected(["user/none", "--prompt", "w1", "--out", "a.png"]) == 2
    assert "offline mode" in capsys.readouterr().err


# Generation


@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0, 0)])
def test_a_batch_without_tokens(shape):
    model = sparse("llama")
    assert model(torch.zeros(shape, dtype=torch.long), use_cache=False).logits.shape == (*shape, VOCABULARY)


@BOTH
@pytest.mark.parametrize("layers", [[], [0]])
def test_padded_prompts_generate_the_tokens_of_each_alone(name, layers):
    model = sparse(name, dense_layers=layers)
    rows = [tokens(n) for n in LENGTHS]
    ids, mask = padded(rows, "left")
    forwards = []
    model.model.register_forward_hook(lambda *_: forwards.append(1))
    out = model.generate(ids, attention_mask=mask, **GREEDY, output_logits=True, return_dict_in_generate=True)
    assert len(forwards) == 20
    with torch.no_grad():
        for i, row in enumerate(rows):
            expected, logits = greedy(model, row)
            assert torch.equal(out.sequences[i, ids.shape[1] :], expected)
            assert error(torch.stack([step[i] for step in out.logits]), logits) < 1e-5


@BOTH
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_is_the_row_alone(name, side):
    model = sparse(name, dense_layers=[1])
    rows = [tokens(n) for n in LENGTHS]
    ids, mask = padded(rows, side)
    labels = ids.masked_fill(mask == 0, -100)
    out = model(ids, attention_mask=mask, labels=labels)
    for i, row in enumerate(rows):
        assert error(out.logits[i][mask[i].bool()], model(row[None]).logits[0]) < 1e-5
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        cached = model(ids, attention_mask=mask, use_cache=True).logits
    assert error(cached[mask.bool()], out.logits[mask.bool()]) < 1e-5


@BOTH
def test_sampling_by_seed_beams_and_several_sequences(name):
    model = sparse(name)
    rows = [tokens(n) for n in LENGTHS]
    ids, mask = padded(rows, "left")
    samples = []
    for _ in range(2):
        torch.manual_seed(7)
        samples.append(model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=True))
    assert torch.equal(*samples)
    options = {"max_new_tokens": 20, "do_sample": False, "num_beams": 3, "num_return_sequences": 2}
    together = model.generate(ids, attention_mask=mask, **options)
    for i, row in enumerate(rows):
        alone = model.generate(row[None], **options, use_cache=False)
        assert torch.equal(together[2 * i : 2 * i + 2, ids.shape[1] :], alone[:, len(row) :])


@BOTH
def test_chunked_prompt_and_returned_cache(name):
    model = sparse(name, dense_layers=[1])
    row = tokens(150)
    expected = model.generate(row[None], **GREEDY)
    assert torch.equal(model.generate(row[None], **GREEDY, prefill_chunk_size=37), expected)
    options = {"do_sample": False, "return_dict_in_generate": True}
    first = model.generate(row[None], **options, max_new_tokens=8)
    rest = model.generate(first.sequences, **options, max_new_tokens=12, cache=first.cache)
    assert torch.equal(rest.sequences, expected)


@BOTH
def test_chunks_of_padded_rows(name):
    model = sparse(name, dense_layers=[1])
    rows = [tokens(n) for n in LENGTHS]
    for side in ("left", "right"):
        ids, mask = padded(rows, side)
        cache, logits = DynamicCache(config=model.config), []
        with torch.no_grad():
            expected = model(ids, attention_mask=mask).logits
            for begin, end in ((0, 60), (60, 61), (61, 75), (75, 150)):
                out = model(ids[:, begin:end], attention_mask=mask[:, :end], cache=cache, use_cache=True)
                logits.append(out.logits)
        assert error(torch.cat(logits, 1)[mask.bool()], expected[mask.bool()]) < 1e-5


@pytest.mark.bits
@BOTH
def test_cropping_up_to_32_tokens(name):
    model = sparse(name)
    rows = [tokens(n) for n in (90, 150)]
    ids, mask = padded(rows, "left")
    more = tokens(2, 40)
    whole = torch.cat((mask, torch.ones_like(more)), 1)
    with torch.no_grad():
        cache = model(ids, attention_mask=mask, use_cache=True).cache
        expected = model(more, attention_mask=whole, cache=copy.deepcopy(cache), use_cache=True).logits
        model(tokens(2, 32), attention_mask=whole[:, :182], cache=cache, use_cache=True)
        cache.crop(-32)
        assert cache.get_seq_length() == 150
        with pytest.raises(ValueError, match=r"must be at most 32 below the longest it has been, 122"):
            cache.crop(-1)
        assert torch.equal(model(more, attention_mask=whole, cache=cache, use_cache=True).logits, expected)


@BOTH
def test_assisted_decoding(name):
    model = sparse(name)
    row = tokens(150)
    assistant = sparse(name)  # other weights: most of its drafts are refused
    for helper in (assistant, copy.deepcopy(model)):
        helper.generation_config.num_assistant_tokens = 8
        helper.generation_config.num_assistant_tokens_schedule = "constant"
        out = model.generate(row[None], **GREEDY, assistant_model=helper)
        assert torch.equal(out, model.generate(row[None], **GREEDY))


@pytest.mark.parametrize("layers", [[], [0], [1]])
def test_drafts_of_the_first_layers(layers):
    model, row = sparse("llama", dense_layers=layers), tokens(1, 150)
    out = model.generate(row, **GREEDY, assistant_early_exit=1)
    assert torch.equal(out, model.generate(row, **GREEDY))


def test_more_drafts_than_a_cache_takes_back():
    model, row = sparse("llama"), tokens(1, 150).repeat(1, 2)
    options = {"max_new_tokens": 60, "do_sample": False}
    with pytest.raises(
        ValueError,
        match=r"^tokens_to_remove = -4.: length = 30.: must be at most 32 below the longest it has been, 34.; "
        r"num_assistant_tokens and prompt_lookup_num_tokens must be at most 32$",
    ):
        model.generate(row, **options, prompt_lookup_num_tokens=40)
    out = model.generate(row, **options, prompt_lookup_num_tokens=32)
    assert torch.equal(out, model.generate(row, **options))


def test_what_a_cache_takes():
    """Memory of a layer: keys and values of the selection and compressed ones by capacity, rings of w + 32, l + 32."""
    model = sparse("llama")
    with torch.no_grad():
        cache = model(tokens(3, 500), use_cache=True).cache
        for _ in range(600):
            model(tokens(3, 1), cache=cache, use_cache=True)
    held = cache.layers[0].cache
    assert 1100 <= held.max_length <= 1.5 * 1100 + 64
    per_token = 3 * 2 * 16 * 4 * 2  # rows, KV heads, head dim, bytes, keys and values
    capacity = held.max_length + -(-held.cfg.num_compressed(held.max_length) // 16) * 16
    rings = 20 + 32 + 8 + 32
    assert sum(t.nbytes for t in held.tensors()[:8]) == per_token * (capacity + rings)


def test_only_the_first_chunk_is_a_full_sequence(monkeypatch):
    firsts = []

    def recording(*arguments, first_chunk, **options):
        firsts.append(first_chunk)
        return nsa.prefill(*arguments, first_chunk=first_chunk, **options)

    monkeypatch.setattr("nsa.hf.cache.prefill", recording)
    model, ids = sparse("llama", num_hidden_layers=1), tokens(1, 60)
    growing, fixed = DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=128)
    with torch.no_grad():
        for cache in (growing, fixed):
            for part in (ids[:, :20], ids[:, 20:], ids[:, :1]):
                model(part, cache=cache, use_cache=True)
            cache.reset()
            model(ids, cache=cache, use_cache=True)
    assert firsts == [True, False, True] * 2


@BOTH
def test_nothing_is_made_on_another_device(name):
    """Forwards and steps on a GPU, simulated without one: an operation on tensors of two devices would fail."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        with torch.device("cuda"):
            model, ids = sparse(name, head_dim=64), tokens(2, 60)
        assert model(ids, use_cache=False).logits.device.type == "cuda"
        for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=64)):
            for part in (ids, ids[:, :1]):
                assert model(part, cache=cache, use_cache=True).logits.device.type == "cuda"


def test_a_cache_of_fixed_size_that_is_full():
    model, cache = sparse("llama"), StaticCache(config=sparse("llama").config, max_cache_len=50)
    with torch.no_grad():
        model(tokens(2, 48), cache=cache, use_cache=True)
        before = [tensor.clone() for layer in cache.layers for tensor in layer.cache.tensors()]
        with pytest.raises(ValueError, match=r"^max_cache_len = 50: must be at least 51, the slots needed"):
            model(tokens(2, 3), cache=cache, use_cache=True)
        after = [tensor for layer in cache.layers for tensor in layer.cache.tensors()]
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True)) and cache.get_seq_length() == 48
        model(tokens(2, 2), cache=cache, use_cache=True)


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_a_compiled_step_on_a_cache_of_fixed_size(backend):
    model = sparse("llama", dense_layers=[1])
    rows = [tokens(n) for n in (40, 83)]
    ids, mask = padded(rows, "left")
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    static = model.generate(ids, attention_mask=mask, **GREEDY, cache_implementation="static", disable_compile=True)
    assert torch.equal(static, expected)
    cache = StaticCache(config=model.config, max_cache_len=128)
    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        last = model(ids, attention_mask=mask, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)
        text = [ids, last]
        for i in range(19):
            mask = torch.cat((mask, torch.ones(2, 1, dtype=mask.dtype)), 1)
            run = step if i < 2 else torch.compiler.set_stance("fail_on_recompile")(step)
            fixed = torch.nn.functional.pad(mask, (0, 128 - mask.shape[1]))
            last = run(last, attention_mask=fixed, cache=cache, use_cache=True).logits.argmax(-1)
            text.append(last)
    assert torch.equal(torch.cat(text, 1), expected)


@pytest.mark.parametrize("masked", (False, True))
def test_one_graph_for_all_lengths(masked):
    model = sparse("llama")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for i, length in enumerate((60, 61, 130, 300)):
        ids = tokens(2, length)
        given = {}
        if masked:  # the first one has no padding
            given["attention_mask"] = torch.ones_like(ids).index_put(
                (torch.tensor(0), torch.arange(i)), ids.new_zeros(1)
            )
        with torch.compiler.set_stance("default" if i < 2 else "fail_on_recompile"):
            found = compiled(ids, labels=ids, **given).loss
        loss = model(ids, labels=ids, **given).loss
        assert abs(found - loss) < 1e-5
        parameter = model.model.layers[0].self_attn.q_proj.weight
        assert error(*(torch.autograd.grad(one, parameter)[0] for one in (found, loss))) < 1e-4


def test_an_exported_model_takes_other_lengths_and_padding():
    model = sparse("llama")
    ids, mask = padded([tokens(n) for n in (40, 83)], "left")
    batch, length = torch.export.Dim("batch", min=2), torch.export.Dim("length", min=2, max=4096)
    with torch.no_grad():
        given = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        shapes = {"input_ids": {0: batch, 1: length}, "attention_mask": {0: batch, 1: length}, "use_cache": None}
        exported = torch.export.export(model, (), given, dynamic_shapes=shapes).module()
        for rows in ([100, 100, 100], [3, 150, 70]):
            ids, mask = padded([tokens(n) for n in rows], "right")
            found = exported(input_ids=ids, attention_mask=mask, use_cache=False).logits
            expected = model(ids, attention_mask=mask, use_cache=False).logits
            assert error(found[mask.bool()], expected[mask.bool()]) < 1e-5


def test_compiled_code_refuses_sequences_that_it_would_join():
    model = sparse("llama")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    ids = tokens(2, 40)
    ones, restarts = torch.ones_like(ids), torch.arange(20).repeat(2)[None]
    hole, left = ones.clone(), (ones.cumsum(1) - 6).clamp(min=0)
    hole[0, :5] = 0
    with torch.no_grad():
        compiled(ids, attention_mask=hole, position_ids=left, use_cache=False)
        for given in ({}, {"attention_mask": ones}):
            with pytest.raises(RuntimeError, match="position_ids restart: give cu_seq_lens_q"):
                compiled(ids, position_ids=restarts, use_cache=False, **given)
        offsets = torch.tensor([0, 20, 40, 80], dtype=torch.int32)
        packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 40, "use_cache": False}
        expected = model(ids, **packed).logits
        assert error(compiled(ids, attention_mask=ones, **packed).logits, expected) < 1e-5
        with pytest.raises(RuntimeError, match="cu_seq_lens_q: must be None with padding in attention_mask"):
            compiled(ids, attention_mask=hole, **packed)


# Training


@pytest.mark.bits
@BOTH
def test_checkpointed_gradients_are_the_same_bits(name):
    model = sparse(name, dense_layers=[1]).train()
    ids = tokens(2, 100)
    grads = []
    for _ in range(2):
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        grads.append(gradients(model))
        model.gradient_checkpointing_enable()
    assert all(torch.equal(g, grads[1][n]) for n, g in grads[0].items())
    assert grads[0].keys() == dict(model.named_parameters()).keys()


@BOTH
@pytest.mark.parametrize("offsets", [True, False])
def test_flattened_sequences_are_each_alone(name, offsets):
    model = sparse(name, dense_layers=[1])
    rows = [tokens(n) for n in LENGTHS]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=offsets)
    batch = collate([{"input_ids": row.tolist()} for row in rows])
    out = model(**batch)
    for row, logits in zip(rows, out.logits[0].split(LENGTHS), strict=True):
        assert error(logits, model(row[None]).logits[0]) < 1e-5
    out.loss.backward()
    together = gradients(model)
    model.zero_grad()
    count = sum(LENGTHS) - len(LENGTHS)
    for row in rows:
        loss = model(row[None], labels=row[None]).loss * (len(row) - 1) / count
        loss.backward()
    alone = gradients(model)
    largest = max(g.abs().max() for g in alone.values())
    assert max((together[n] - g).abs().max() for n, g in alone.items()) < 1e-5 * largest


def test_a_step_with_a_cache_has_no_gradient_and_says_so():
    model = sparse("llama")
    ids = tokens(1, 30)
    assert model(ids).cache is None
    out = model(ids, labels=ids, use_cache=True)
    with pytest.raises(RuntimeError, match=r"^cache: a step with a cache has no gradient"):
        out.loss.backward()


def test_low_rank_adapters_on_all_linear_layers():
    peft = pytest.importorskip("peft")
    model = sparse("llama", dense_layers=[1])
    ids = tokens(2, 100)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    with torch.no_grad():
        plain = model(ids).logits
    adapted = peft.get_peft_model(model, config)
    adapted(input_ids=ids, labels=ids).loss.backward()
    trained = {n for n, p in adapted.named_parameters() if p.requires_grad}
    assert all(p.grad is not None and p.grad.any() for n, p in adapted.named_parameters() if n in trained)
    layer = "base_model.model.model.layers.0.self_attn."
    for part in ("q_proj", "k_proj.cmp", "k_proj.slc", "v_proj.swa", "gate.0", "gate.2", "o_proj"):
        assert f"{layer}{part}.lora_A.default.weight" in trained
    with torch.no_grad():
        expected = adapted(ids).logits
        assert error(expected, plain) > 1e-3
        assert error(adapted.merge_and_unload()(ids).logits, expected) < 1e-4


def test_each_row_of_a_padded_or_packed_batch_has_its_adapter():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = peft.get_peft_model(sparse("llama"), config, adapter_name="a")
    adapted.add_adapter("b", config)
    adapted.eval()
    ids, mask = padded([tokens(1, n)[0] for n in (70, 100, 33)], "left")
    with torch.no_grad():
        found = adapted(input_ids=ids, attention_mask=mask, adapter_names=["a", "b", "a"], use_cache=False).logits
        positions = torch.arange(50).repeat(2)[None]
        packed = adapted(input_ids=ids[1:2], position_ids=positions, adapter_names=["b"], use_cache=False).logits
        for row, name in enumerate("aba"):
            adapted.set_adapter(name)
            alone = adapted(input_ids=ids[row : row + 1, mask[row].bool()], use_cache=False).logits
            assert error(found[row, mask[row].bool()], alone[0]) < 1e-4
        adapted.set_adapter("b")
        halves = torch.cat([adapted(input_ids=half, use_cache=False).logits for half in ids[1:2].chunk(2, 1)], 1)
        assert error(packed, halves) < 1e-4


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2, 2.0, -1, 0.5])
@pytest.mark.parametrize("name", ["llama", "images"])
def test_a_mask_holds_tokens_and_padding_only(name, value):
    model = nsa.hf.convert(vision_language(), nsa=SMALL) if name == "images" else sparse(name)
    ids = tokens(2, 20) % IMAGE
    mask = torch.ones(2, 20, dtype=torch.float64 if isinstance(value, float) else torch.int8)
    wrong = mask.index_put((torch.tensor(1), torch.tensor(3)), mask.new_tensor(value))
    message = rf"^attention_mask: {re.escape(str(value))}: must be 1 for a token or 0 for padding$"
    for given in (wrong, wrong.index_fill(1, torch.tensor(0), 0)):
        with pytest.raises(ValueError, match=message):
            model(ids, attention_mask=given)
    with torch.no_grad():
        for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=64)):
            cache = model(ids[:, :10], attention_mask=mask[:, :10], cache=cache, use_cache=True).cache
            with pytest.raises(ValueError, match=message):  # and in what the cache holds
                model(ids[:, 10:], attention_mask=wrong, cache=cache, use_cache=True)


def test_packed_sequences_and_a_mask():
    """A mask without padding changes nothing; with padding the offsets cannot be those of its tokens."""
    model, ids = sparse("llama", dense_layers=[1]), tokens(1, 60)
    offsets = torch.tensor([0, 0, 20, 20, 60, 60], dtype=torch.int32)  # three sequences without tokens
    packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 40, "max_length_k": 40}
    positions, mask = torch.cat((torch.arange(20), torch.arange(40)))[None], torch.ones_like(ids)
    expected = torch.cat([model(part, use_cache=False).logits for part in (ids[:, :20], ids[:, 20:])], 1)
    for given in (packed, packed | {"position_ids": positions}, {"position_ids": positions}):
        assert error(model(ids, use_cache=False, **given, attention_mask=mask).logits, expected) < 1e-5
    with pytest.raises(ValueError, match=r"^cu_seq_lens_q: must be None with padding in attention_mask$"):
        model(ids, use_cache=False, **packed, attention_mask=mask.index_fill(1, torch.arange(3), 0))


@pytest.mark.parametrize("attention", ["sparse", "dense"])
def test_offsets_and_positions_that_transformers_cannot_mean(attention):
    model, ids = sparse("llama") if attention == "sparse" else dense("llama"), tokens(1, 60)
    if attention == "dense":
        model.set_attn_implementation("nsa")
    offsets = torch.tensor([0, 20, 60])
    good = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 40, "max_length_k": 40}
    model(ids, use_cache=False, **good)
    wrong = [
        ({"cu_seq_lens_q": offsets + 0.5}, ValueError, "cu_seq_lens_q: float32: must be int32 or int64"),
        ({"cu_seq_lens_q": offsets > 0}, ValueError, "cu_seq_lens_q: bool: must be int32 or int64"),
        ({"cu_seq_lens_q": [0, 20, 60]}, TypeError, "cu_seq_lens_q: list: must be a dense tensor"),
        (
            {"cu_seq_lens_q": offsets + torch.tensor([0, 0, 2**32])} | {"cu_seq_lens_k": None},
            ValueError,
            ".*2147483647",
        ),
        ({"cu_seq_lens_q": None}, ValueError, "cu_seq_lens_[qk]: .*given with"),
        ({"max_length_q": 40.5}, TypeError, "max_length_q: float: must be an integer"),
    ]
    if attention == "sparse":
        positions = torch.arange(60)[None]
        wrong += [
            ({"cu_seq_lens_k": torch.tensor([0, 30, 60])}, ValueError, "cu_seq_lens_k: must be equal to cu_seq_lens_q"),
            ({"position_ids": positions > 5}, ValueError, "position_ids: bool: must be integers"),
            ({"position_ids": positions * math.nan}, ValueError, "position_ids: float32: must be integers"),
            ({"position_ids": positions.tolist()}, TypeError, "position_ids: list: must be a dense tensor"),
            ({"attention_mask": [1] * 60}, TypeError, "attention_mask: list: must be a dense tensor"),
            ({"use_cache": True}, ValueError, "use_cache: must be False with packed sequences"),
        ]
    for changed, kind, message in wrong:
        with pytest.raises(kind, match=rf"^{message}"):
            model(ids, **{"use_cache": False} | good | changed)


def test_masks_of_every_dtype_are_the_same():
    model, ids = sparse("llama"), tokens(2, 20)
    mask = torch.ones(2, 20, dtype=torch.bool).index_put((torch.tensor(1), torch.arange(5)), torch.tensor(False))
    expected = model(ids, attention_mask=mask).logits
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32):
        assert torch.equal(model(ids, attention_mask=mask.to(dtype)).logits, expected)


def test_calls_that_cannot_be_are_refused():
    model = sparse("llama")
    ids = tokens(1, 20)
    with pytest.raises(ValueError, match=r"^attention_mask: \(1, 1, 20, 20\): must be \(B, S\) or None"):
        model(ids, attention_mask=torch.zeros(1, 1, 20, 20))
    for shape in ((2, 20), (1, 21), (1, 19)):
        with pytest.raises(ValueError, match=rf"^attention_mask: {re.escape(str(shape))}: must be \(1, 20\): "):
            model(ids, attention_mask=torch.ones(shape))
        with pytest.raises(ValueError, match=rf"^attention_mask: {re.escape(str(shape))}: must be \(1, 20\): "):
            padded_rows = torch.ones(shape).index_fill(1, torch.tensor(0), 0)  # generate leaves out what is all ones
            model.generate(ids, attention_mask=padded_rows, max_new_tokens=2)
    with torch.no_grad():
        cache = model(ids, use_cache=True).cache
        with pytest.raises(ValueError, match=r"^attention_mask: \(1, 20\): must be \(1, 40\): rows, tokens seen and "):
            model(ids, attention_mask=torch.ones(1, 20), cache=cache)
        for row in (torch.ones(20), torch.arange(20) > 4):
            filled = model(ids, attention_mask=row[None], use_cache=True).cache
            with pytest.raises(ValueError, match=r"^attention_mask: must keep what it was for the tokens in the cache"):
                model(ids, attention_mask=(torch.arange(40) > 8)[None], cache=filled)
            model(ids, attention_mask=torch.cat((row.bool(), torch.ones(20, dtype=torch.bool)))[None], cache=filled)
        static = StaticCache(config=model.config, max_cache_len=64)
        for _ in range(2):  # before the first step it tells the tokens seen as a number, then as a tensor
            for shape in ((2, 40), (1, 19)):
                with pytest.raises(ValueError, match=r"^attention_mask: \(., ..\): must be \(1, 20 or more\): "):
                    model(ids, attention_mask=torch.ones(shape), cache=static)
            model(ids, attention_mask=torch.ones(1, 64), cache=static)
    with pytest.raises(ValueError, match=r"^output_attentions = True: must be False in a sparse model"):
        model(ids, output_attentions=True)
    with pytest.raises(ValueError, match=r"^cache: must be made for the model"):
        model(ids, cache=DynamicCache())
    with torch.no_grad(), pytest.raises(ValueError, match=r"^cache: of NSAConfig.*topk=4.*must be .*topk=6"):
        sparse("llama", {"topk": 6})(ids[:, :1], cache=model(ids, use_cache=True).cache)
    with pytest.raises(TypeError, match=r"^cache: tuple: must be transformers.Cache or None"):
        model(ids, cache=((ids, ids),))
    with pytest.raises(ValueError, match=r"^cache: must be made for the model"):
        model(ids, cache=DynamicCache(config=dense("llama").config), use_cache=True)
    with pytest.raises(ValueError, match=r"^use_cache: must be False with packed sequences"):
        model(ids, position_ids=torch.arange(20)[None] % 10, use_cache=True)
    assert int(model(ids).logits.shape[-1]) == VOCABULARY


def test_heads_that_tensor_parallelism_would_cut_are_refused():
    model = sparse("llama")
    attention = model.model.layers[0].self_attn
    attention.v_proj = torch.nn.Linear(SIZES["hidden_size"], 8, bias=False)  # a rank's share with tp_size = 4
    with pytest.raises(ValueError, match=r"^tp_size: 8 of 32 channels .*must divide the number of key/value heads, 2"):
        model(tokens(1, 20))


def test_a_layer_with_context_parallelism_is_refused():
    model = sparse("llama")
    model.model.layers[1].self_attn.context_parallel = nsa.parallel.ContextParallel()
    with pytest.raises(ValueError, match=r"^context_parallel: must be None in a model of nsa\.hf$"):
        model(tokens(1, 20))


def test_the_saved_configuration_names_what_other_readers_need(tmp_path):
    sparse("qwen3", dense_layers=[1]).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "nsa_qwen3" and saved["architectures"] == ["NsaQwen3ForCausalLM"]
    assert saved["nsa"]["window_size"] == 20 and saved["dense_layers"] == [1]


@BOTH
def test_a_saved_folder_names_the_classes_of_its_architecture(name, tmp_path):
    sparse(name).save_pretrained(tmp_path)
    for auto, path in json.loads((tmp_path / "config.json").read_text())["auto_map"].items():
        module, kind = path.split(".")
        assert (tmp_path / f"{module}.py").exists()
        loaded = getattr(transformers, auto).from_pretrained(tmp_path)
        assert type(loaded) is getattr(nsa.hf, kind) and type(loaded).__name__.startswith(SPARSE[name][0].__name__[:6])


def test_a_folder_loads_by_its_name_where_nsa_is_not_imported(tmp_path):
    model = sparse("qwen3", dense_layers=[1])
    model.save_pretrained(tmp_path / "model")
    ids = tokens(1, 50)
    with torch.no_grad():
        torch.save((ids, model(ids).logits), tmp_path / "expected.pt")
    nsa.hf.convert(vision_language(), nsa=SMALL).save_pretrained(tmp_path / "images")
    script = """
        import sys
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
        folder, again = "model", "again"
        assert "nsa" not in sys.modules
        try:
            AutoModelForCausalLM.from_pretrained(folder)
            raise SystemExit("loaded without trust")
        except ValueError as error:
            assert "trust_remote_code=True" in str(error), error
        sys.modules["nsa"] = None
        try:
            AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
            raise SystemExit("loaded without nsa")
        except ImportError as error:
            assert "import nsa.hf" in str(error), error
        del sys.modules["nsa"]
        images = AutoModelForImageTextToText.from_pretrained("images", trust_remote_code=True)
        assert type(images).__name__ == "NsaQwen3VLForConditionalGeneration"
        assert type(images.model.language_model).__name__ == "NsaQwen3VLTextModel"
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        ids, expected = torch.load("expected.pt")
        with torch.no_grad():
            assert torch.equal(model(ids).logits, expected)
        assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 53)
        model.save_pretrained(again)
    """
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for file in ("config.json", "import_nsa_hf.py"):
        assert (tmp_path / "again" / file).read_text() == (tmp_path / "model" / file).read_text()
    assert len(list((tmp_path / "again").glob("*.py"))) == 1
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "again")) is type(model)  # nsa.hf is imported here


@pytest.mark.bits
@BOTH
def test_caches_select_repeat_and_reset(name):
    model = sparse(name, dense_layers=[1])
    rows = [tokens(n) for n in LENGTHS]
    ids, mask = padded(rows, "left")
    options = {"max_new_tokens": 20, "do_sample": False, "num_beams": 3}
    expected = model.generate(ids, attention_mask=mask, **options)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(model.generate(ids, attention_mask=mask, **options, **static), expected)
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=160)):
        with torch.no_grad():
            first = model(ids, attention_mask=mask, cache=cache, use_cache=True).logits
            cache.reset()
            assert cache.get_seq_length() == 0
            again = model(ids, attention_mask=mask, cache=cache, use_cache=True).logits
            assert torch.equal(first[mask.bool()], again[mask.bool()])
    new, wider = tokens(3, 1), torch.nn.functional.pad(mask, (0, 1), value=1)
    with torch.no_grad():
        cache = model(ids, attention_mask=mask, use_cache=True).cache
        before = copy.deepcopy(cache)
        plain = model(new, attention_mask=wider, cache=copy.deepcopy(cache), use_cache=True).logits
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([5, 0, 2]))
        order = [2, 0, 1]
        # The operators' bits do not depend on a row's place; those of torch's elementwise functions and products may.
        q, k, v, gates = (torch.randn(3, 1, *shape) for shape in ((8, 16), (2, 16), (2, 16), (8, 3)))
        for kept, moved in zip(before.layers, copy.deepcopy(cache).layers, strict=True):
            if isinstance(moved, nsa.hf.cache.NsaDynamicLayer):
                expected = nsa.decode(q, k, v, gates, kept.cache)
                assert torch.equal(nsa.decode(*(x[order] for x in (q, k, v, gates)), moved.cache), expected[order])
        out = model(new[order], attention_mask=wider[order], cache=cache, use_cache=True).logits
        assert error(out, plain[order]) <= 1e-5
