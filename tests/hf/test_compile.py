"""Compiled and exported sparse decoders: one graph for all lengths, with and without a mask or a cache."""

from __future__ import annotations

import pytest
import torch
from transformers import StaticCache

from models import dense, error, padded, sparse, tokens


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_a_compiled_step_on_a_cache_of_fixed_size(backend):
    model = sparse("llama", dense_layers=[1])
    rows = [tokens(n) for n in (40, 83)]
    ids, mask = padded(rows, "left")
    greedy = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    expected = model.generate(ids, **greedy)
    static = model.generate(ids, **greedy, cache_implementation="static", disable_compile=True)
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


def test_one_graph_of_dense_layers():
    model = dense("llama")
    model.set_attn_implementation("nsa")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    ids, offsets = tokens(1, 80), torch.tensor([0, 30, 80], dtype=torch.int32)
    restarts = torch.cat((torch.arange(30), torch.arange(50)))[None]
    packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 50, "max_length_k": 50}
    expected = model(ids, position_ids=restarts, use_cache=False).logits
    assert error(compiled(ids, position_ids=restarts, use_cache=False, **packed).logits, expected) < 1e-5
    assert error(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits) < 1e-5
    with pytest.raises(RuntimeError, match="position_ids restart: give cu_seq_lens_q"):
        compiled(ids, position_ids=restarts, use_cache=False)


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
