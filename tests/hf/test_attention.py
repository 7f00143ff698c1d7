"""attn_implementation="nsa" against eager attention, and each row or sequence against itself alone."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DataCollatorWithFlattening, StaticCache

import nsa.hf
from models import dense, error, gradients, padded, tokens

CAUSAL = ("llama", "qwen3", "mistral")
LENGTHS = (41, 7, 30)


@pytest.mark.parametrize("name", (*CAUSAL, "minimax"))
def test_logits_gradients_and_greedy_tokens_are_those_of_eager(name):
    model = dense(name)
    ids = tokens(2, 400 if name == "minimax" else 50)  # more blocks of 128 than are selected
    results = {}
    for implementation in ("eager", "nsa"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        out = model(ids, labels=ids, use_cache=False)
        out.loss.backward()
        generated = model.generate(ids, max_new_tokens=20, do_sample=False)
        results[implementation] = out.logits.detach(), gradients(model), generated
    (logits, grads, text), (expected_logits, expected_grads, expected_text) = results["nsa"], results["eager"]
    assert error(logits, expected_logits) < 1e-4
    assert grads.keys() == expected_grads.keys()
    # By layer norms and biases alone a gradient may be zero: relative to the largest of all.
    largest = max(g.abs().max() for g in expected_grads.values())
    assert max((grads[n] - g).abs().max() for n, g in expected_grads.items()) < 1e-3 * largest
    assert torch.equal(text, expected_text)


def summed_loss(logits, ids):
    return cross_entropy(logits[:-1], ids[1:], reduction="sum")


def alone(model, rows):
    """Logits of each row by itself, and the gradients of the sum of the rows' losses."""
    model.zero_grad()
    logits = [model(row[None], use_cache=False).logits[0] for row in rows]
    sum(map(summed_loss, logits, rows)).backward()
    return [one.detach() for one in logits], gradients(model)


def check_rows(model, rows, logits):
    """Compares the rows' logits out of a batch, and their gradients, with those of the rows alone."""
    model.zero_grad()
    sum(map(summed_loss, logits, rows)).backward()
    grads = gradients(model)
    expected, expected_grads = alone(model, rows)
    for one, other in zip(logits, expected, strict=True):
        assert error(one.detach(), other) < 1e-4
    largest = max(g.abs().max() for g in expected_grads.values())
    assert max((grads[n] - g).abs().max() for n, g in expected_grads.items()) < 1e-3 * largest


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_padded_row_is_the_row_alone(name, side):
    model = dense(name)
    model.set_attn_implementation("nsa")
    rows = [tokens(n) for n in LENGTHS]
    ids, mask = padded(rows, side)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    check_rows(model, rows, [logits[i][mask[i].bool()] for i in range(len(rows))])


@pytest.mark.parametrize("offsets", [True, False])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_packed_sequence_is_the_sequence_alone(name, offsets):
    model = dense(name)
    model.set_attn_implementation("nsa")
    rows = [tokens(n) for n in LENGTHS]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=offsets)
    batch = collate([{"input_ids": row.tolist()} for row in rows])
    batch.pop("labels")
    for use_cache in (False, True):  # a cache, the default, hides from transformers' own masks that this is packed
        logits = model(**batch, use_cache=use_cache).logits[0]
        check_rows(model, rows, logits.split(LENGTHS))


HIDDEN = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
QWEN2_MOE = {"num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
WIDE = {**HIDDEN, "intermediate_size": 96}
GPT = {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gpt_bigcode", {**GPT, "bos_token_id": 1, "eos_token_id": 2}),
        ("persimmon", WIDE),
        ("ctrl", {**GPT, "dff": 96}),
        ("recurrent_gemma", {**WIDE, "num_hidden_layers": 3, "num_key_value_heads": 2, "attention_window_size": 8}),
    ],
)
def test_documents_by_the_mask_alone(name, sizes, batch):
    """Models that do not hand position_ids to the attention function."""
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**sizes), attn_implementation="nsa").eval()
    ids, one, two = tokens(batch, 60), torch.arange(60), torch.cat((torch.arange(40), torch.arange(20)))
    given = {"position_ids": torch.stack((two, one)[:batch]), "use_cache": False}
    with torch.no_grad():
        logits = model(ids, **given).logits
        if name != "recurrent_gemma":  # whose convolutions go over the edges of documents
            assert error(logits[:1, 40:], model(ids[:1, 40:], use_cache=False).logits) < 1e-5
        model.set_attn_implementation("eager")
        assert error(logits, model(ids, **given).logits) < 1e-5


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("bloom", {"vocab_size": 97, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
        ("xglm", {"vocab_size": 97, "d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4}),
        ("big_bird", {**WIDE, "is_decoder": True, "attention_type": "original_full"}),
        ("rembert", {**WIDE, "is_decoder": True, "input_embedding_size": 32, "output_embedding_size": 32}),
        ("gpt_neox_japanese", HIDDEN),
    ],
)
def test_models_that_do_not_ask_for_the_attention_function_are_refused(name, sizes):
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**sizes), attn_implementation="nsa").eval()
    with pytest.raises(ValueError, match=f"^attn_implementation = 'nsa': must be 'eager' for '{name}', whose"):
        model(tokens(1, 20))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gpt2", {**GPT, "n_layer": 1}),
        ("gemma3_text", {**WIDE, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8}),
        ("stablelm", {**WIDE, "num_key_value_heads": 4}),  # says nothing of attention backends
        # A window that only the mask has:
        ("phimoe", {**WIDE, "num_key_value_heads": 2, "num_local_experts": 2, "sliding_window": 8}),
        ("qwen2_moe", {**WIDE, **QWEN2_MOE, "sliding_window": 8, "use_sliding_window": True}),
        ("qwen2_moe", {**WIDE, **QWEN2_MOE}),
        ("moshi", {**WIDE, "ffn_dim": 96, "sliding_window": 8}),  # has a window and does not use it
    ],
)
def test_models_that_ask_for_it_are_not_refused(name, sizes):
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**sizes), attn_implementation="nsa").eval()
    with torch.no_grad():
        ids, logits = tokens(2, 30), []
        for implementation in ("eager", "nsa"):
            model.set_attn_implementation(implementation)
            logits.append(model(ids).logits)
    assert error(logits[1], logits[0]) < 1e-5


@pytest.mark.parametrize("name", CAUSAL)
def test_padded_prompts_continue_as_each_alone(name):
    model = dense(name)
    model.set_attn_implementation("nsa")
    rows = [tokens(n) for n in LENGTHS]
    ids, mask = padded(rows, "left")
    options = {"max_new_tokens": 20, "do_sample": False}
    together = model.generate(ids, attention_mask=mask, **options)
    for row, out in zip(rows, together, strict=True):
        assert torch.equal(out[ids.shape[1] :], model.generate(row[None], **options)[0, len(row) :])


def test_a_cache_of_fixed_size_and_a_prompt_in_chunks():
    model = dense("llama")
    model.set_attn_implementation("nsa")
    rows = [tokens(n) for n in LENGTHS]
    ids, mask = padded(rows, "right")
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        for cache in (None, StaticCache(model.config, max_cache_len=64)):
            first = model(ids[:, :15], attention_mask=mask[:, :15], cache=cache, use_cache=True)
            # Nothing but padding at the end of a chunk: queries are found by the cache, not by the mask.
            second = model(ids[:, 15:], attention_mask=mask, cache=first.cache)
            logits = torch.cat((first.logits, second.logits), 1)
            for i in range(len(rows)):
                real = mask[i].bool()
                assert error(logits[i][real], expected[i][real]) < 1e-5


def test_chunks_that_end_in_padding_for_every_row():
    model = dense("llama")
    model.set_attn_implementation("nsa")
    ids, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[:, 35:] = 0
    with torch.no_grad():
        expected = model(ids[:, :35]).logits
        for cache in (None, StaticCache(model.config, max_cache_len=64)):
            first = model(ids[:, :20], cache=cache, use_cache=True)
            second = model(ids[:, 20:], attention_mask=mask, cache=first.cache)
            assert error(second.logits[:, :15], expected[:, 20:]) < 1e-5


@pytest.mark.parametrize("value", [math.nan, 2, -1])
def test_a_mask_holds_tokens_and_padding_only(value):
    mask = torch.ones(2, 20, dtype=torch.float32 if math.isnan(value) else torch.int64)
    mask[1, 3] = value
    for queries in (20, 15):  # of a cache of fixed size the last slots are empty
        with pytest.raises(ValueError, match=rf"^attention_mask: {value}: must be 1 for a token or 0 for padding$"):
            nsa.hf.nsa_attention_mask(2, queries, 20, attention_mask=mask, config=dense("llama").config)


def test_block_indices_of_padded_batches():
    model = dense("minimax").eval()
    model.set_attn_implementation("nsa")
    rows = [tokens(300), tokens(400)]
    with torch.no_grad():
        ids, mask = padded(rows, "right")
        logits = model(ids, attention_mask=mask).logits
        for i, row in enumerate(rows):
            assert error(logits[i, : len(row)], model(row[None]).logits[0]) < 1e-4
        ids, mask = padded(rows, "left")
        with pytest.raises(ValueError, match=r"^attention_mask: block_indices goes with right padding only"):
            model(ids, attention_mask=mask)


@pytest.mark.bits
def test_block_indices_in_any_order_and_repeated_calls_give_the_same_bits():
    model = dense("minimax")
    model.set_attn_implementation("nsa")
    ids = tokens(1, 400)
    attention = model.model.layers[1].self_attn.indexer
    plain = attention.forward
    grads = []
    for order in (plain, plain, lambda *a, **k: plain(*a, **k).flip(-1)):
        attention.forward = order
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        grads.append(gradients(model))
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]) and torch.equal(grad, grads[2][name])


def test_what_the_operators_do_not_have_is_refused():
    ids = tokens(1, 20)
    model = dense("llama", attention_dropout=0.1)
    model.set_attn_implementation("nsa")
    model(ids)
    with pytest.raises(ValueError, match=r"^attention_dropout = 0.1: must be 0 in training with"):
        model.train()(ids)
    model = dense("llama")
    model.set_attn_implementation("nsa")
    with pytest.raises(ValueError, match=r"^attention_mask: \(1, 1, 20, 20\): must be \(B, S\) or None with"):
        model(ids, attention_mask=torch.zeros(1, 1, 20, 20))
    with pytest.raises(ValueError, match=r"^output_attentions = True: must be False with"):
        model(ids, output_attentions=True)
    with pytest.raises(ValueError, match=r"^softcap = 30.0: must be None with"):
        model(ids, softcap=30.0)
    with pytest.raises(ValueError, match=r"^s_aux \(attention sinks\) = a tensor: must be None with"):
        model(ids, s_aux=torch.zeros(8))
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ValueError, match=r"^is_causal = False: must be True with"):
        model(ids)
    model.config.is_causal = False
    with pytest.raises(ValueError, match=r"^is_causal = False: attn_implementation='nsa' has causal attention only"):
        model(ids)


def test_other_patterns_are_refused():
    from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask

    model = dense("llama")
    model.set_attn_implementation("nsa")
    given = {"inputs_embeds": torch.zeros(1, 20, 64), "attention_mask": None, "cache": None}
    model.config.attention_chunk_size = 8
    with pytest.raises(ValueError, match=r"^attention_chunk_size = 8: must be None with"):
        create_chunked_causal_mask(model.config, **given)
    with pytest.raises(ValueError, match=r"^or_mask_function, and_mask_function: must be None with"):
        create_causal_mask(model.config, **given, or_mask_function=lambda b, h, q, k: q == k)
    images = torch.tensor([[-1] * 5 + [0] * 5 + [-1] * 10])
    with pytest.raises(ValueError, match=r"^is_causal = False: attn_implementation='nsa' has causal attention only"):
        create_causal_mask(model.config, **given, block_sequence_ids=images)


def test_under_autocast():
    model = dense("qwen3")
    ids = tokens(2, 50)
    results = []
    for implementation in ("eager", "nsa"):
        model.set_attn_implementation(implementation)
        with torch.autocast("cpu", torch.bfloat16):
            results.append(model(ids).logits.float())
    assert error(results[1], results[0]) < 0.05


@pytest.mark.parametrize("module", ["nsa.hf", "nsa.convert", "nsa.inspect"])
def test_without_transformers_one_line_says_what_to_install(module):
    program = f"import sys; sys.modules['transformers'] = None; import {module}"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = run.stderr.strip().splitlines()[-1]
    assert last == "ImportError: nsa.hf needs transformers 5.24 or newer: pip install 'transformers>=5.24'"


def test_an_older_transformers_has_the_configurations_alone():
    program = (
        "import transformers; transformers.__version__ = '5.19.0'; import nsa.hf; print(*nsa.hf.__all__);"
        "from nsa.hf import NsaLlamaModel"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert {"NsaLlamaConfig", "NsaQwen3Config"} <= {*run.stdout.split()}
    assert all(name.endswith("Config") for name in run.stdout.split())
    message = "nsa.hf.NsaLlamaModel needs transformers 5.24 or newer: 5.19.0 has configurations alone"
    assert run.stderr.strip().splitlines()[-1] == f"ImportError: {message}"
