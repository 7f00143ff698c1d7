"""Sparse decoders generate, on caches that grow and on caches of fixed size."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

import nsa
import nsa.hf
from models import SPARSE, error, padded, sparse, tokens

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


def test_a_step_with_a_cache_has_no_gradient_and_says_so():
    model = sparse("llama")
    ids = tokens(1, 30)
    assert model(ids).cache is None
    out = model(ids, labels=ids, use_cache=True)
    with pytest.raises(RuntimeError, match=r"^cache: a step with a cache has no gradient"):
        out.loss.backward()
