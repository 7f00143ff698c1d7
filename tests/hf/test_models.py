"""Sparse decoders: saving, attention, padded and packed batches, training modes."""

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
    sparse,
    tokens,
    vision_language,
)
from nsa.inspect import main as draw_inspected

BOTH = pytest.mark.parametrize("name", SPARSE)
LENGTHS = (5, 83, 150)  # below l = 8; about n * l' = 64; far above


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


# Batches


@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0, 0)])
def test_a_batch_without_tokens(shape):
    model = sparse("llama")
    assert model(torch.zeros(shape, dtype=torch.long), use_cache=False).logits.shape == (*shape, VOCABULARY)


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
def test_nothing_is_made_on_another_device(name):
    """Forwards and steps on a GPU, simulated without one: an operation on tensors of two devices would fail."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        with torch.device("cuda"):
            model, ids = sparse(name, head_dim=64), tokens(2, 60)
        assert model(ids, use_cache=False).logits.device.type == "cuda"
        for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=64)):
            for part in (ids, ids[:, :1]):
                assert model(part, cache=cache, use_cache=True).logits.device.type == "cuda"


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
    with torch.no_grad():
        assert error(model(**batch).logits, out.logits) < 1e-5  # without a cache
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


def test_offsets_may_lead_over_several_rows():
    model = sparse("llama", dense_layers=[1])
    ids, offsets = tokens(2, 40), torch.tensor([0, 30, 80], dtype=torch.int32)
    logits = model(ids, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets).logits.flatten(0, 1)
    for row, given in zip(ids.flatten().split([30, 50]), logits.split([30, 50]), strict=True):
        assert error(given, model(row[None]).logits[0]) < 1e-5


@pytest.mark.parametrize("after_a_forward", [False, True])
def test_a_cast_leaves_the_rotation_in_float32(after_a_forward):
    model = sparse("llama", dense_layers=[1])
    ids = tokens(1, 700)
    if after_a_forward:
        model(ids)
    rotation = model.model._rotate(700, ids.device)
    model = copy.deepcopy(model.to(torch.bfloat16))
    assert all(map(torch.equal, model.model._rotation(700, ids.device), model.model._rotation(1024, ids.device)))
    assert all(map(torch.equal, model.model._rotate(700, ids.device), rotation))
    assert model(ids).logits.dtype == torch.bfloat16


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
    with pytest.raises(ValueError, match=r"^output_attentions = True: must be False in a sparse model"):
        sparse("llama", output_attentions=True)(ids)
    with pytest.raises(ValueError, match=r"^is_causal = False: must be True in a sparse model"):
        model(ids, is_causal=False)
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
