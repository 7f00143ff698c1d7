"""Sparse models whose weights are sharded, on other devices, offloaded, quantized or adapted."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import DynamicCache, StaticCache

from models import SPARSE, dense, error, padded, sparse, tokens
from nsa.hf import convert

BOTH = pytest.mark.parametrize("name", SPARSE)
GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.bits
@BOTH
def test_fully_sharded_in_mixed_precision_rotates_in_float32(name, one_process):
    model = sparse(name, dense_layers=[1])
    rows = [tokens(40), tokens(300)]  # bfloat16 has no number for every position
    ids, mask = padded(rows, "left")
    whole = sparse(name, dtype=torch.bfloat16, dense_layers=[1])
    whole.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = whole(ids, attention_mask=mask).logits
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in (*model.model.layers, model):
        fully_shard(layer, mp_policy=policy)
    out = model.train()(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    out.loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert torch.equal(out.logits[mask.bool()], expected[mask.bool()])


@BOTH
def test_layers_on_two_devices(name):
    """As accelerate dispatches a model, simulated without GPUs: an operation on tensors of two devices would fail."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        with torch.device("cuda:0"):
            model = sparse(name, head_dim=64, num_hidden_layers=3)
            ids, mask = tokens(2, 60), torch.ones(2, 64)
        with torch.device("cuda:1"):
            other = sparse(name, head_dim=64, num_hidden_layers=3)
        for i, layer in enumerate(other.model.layers[1:], 1):
            model.model.layers[i] = layer
            add_hook_to_module(layer, AlignDevicesHook("cuda:1"))
        for part in (model.model.norm, model.lm_head):
            add_hook_to_module(part, AlignDevicesHook("cuda:0"))
        caches = DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=64)
        for cache in (None, *caches):
            logits = model(ids, cache=cache, use_cache=cache is not None).logits
            assert logits.device == torch.device("cuda:0")
        model(ids[:, :4], attention_mask=mask, cache=caches[1], use_cache=True)
        for cache in caches:
            assert [cache.layers[i].device.index for i in (0, 2)] == [0, 1]


@pytest.mark.bits
@BOTH
def test_offloaded_weights_give_the_same_bits(name, tmp_path):
    model, ids = sparse(name, dense_layers=[1]), tokens(1, 50)
    with torch.no_grad():
        expected = model(ids).logits
        text = model.generate(ids, **GREEDY)
        places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
        places |= {"model.layers.0": "disk", "model.layers.1": "disk"}
        dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path)
        assert model.model.layers[0].self_attn.q_proj.weight.is_meta
        assert torch.equal(model(ids).logits, expected) and torch.equal(model.generate(ids, **GREEDY), text)


def test_a_dense_model_with_offloaded_weights_is_not_converted(tmp_path):
    model = dense("llama")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    dispatch_model(model, places | {"model.layers": "disk"}, main_device="cpu", offload_dir=tmp_path)
    with pytest.raises(ValueError, match=r"^model: model.layers.0.\S+: on meta, as offloaded: must be a plain"):
        convert(model)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
@pytest.mark.parametrize("share_kv", [False, True])
def test_quantized_models_run_and_decode(share_kv):
    model, ids = sparse("llama", {"share_kv": share_kv}, dense_layers=[1], initializer_range=0.05), tokens(1, 80)
    quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {torch.nn.Linear}, torch.qint8)
    with torch.no_grad():
        assert error(quantized(ids).logits, model(ids).logits) < 0.1
        first = quantized(ids[:, :60], use_cache=True)
        second = quantized(ids[:, 60:], cache=first.cache, use_cache=True)  # the range of int8 is that of a call
        assert error(torch.cat((first.logits, second.logits), 1), model(ids).logits) < 0.1


def test_adapters_of_one_projection_of_three():
    peft = pytest.importorskip("peft")
    model = sparse("llama", dense_layers=[1])
    with pytest.raises(ValueError, match=r"adapters take them by name: k_proj.cmp, ..., v_proj.swa, or 'all-linear'"):
        peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    with pytest.raises(ValueError, match=r"specify `target_modules`"):  # PEFT has no default for these models
        peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(task_type="CAUSAL_LM"))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj.slc"]))
    names = {
        name.split(".lora_A")[0].split("layers.")[1] for name, _ in adapted.named_parameters() if ".lora_A" in name
    }
    assert names == {"0.self_attn.q_proj", "0.self_attn.v_proj.slc", "1.self_attn.q_proj"}
