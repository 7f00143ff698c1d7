"""transformers' Trainer, and its parallelism over two processes."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import nsa
import nsa.hf
from models import IMAGE, VOCABULARY, padded, sparse, tokens, vision_language

HERE = Path(__file__).parent


def trainer(model, folder, steps=30, kind=Trainer, **options):
    draw = torch.Generator().manual_seed(3)
    text = torch.randint(1, VOCABULARY, (8, 100), generator=draw)
    rows = [{"input_ids": row, "labels": row} for row in text]
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    return kind(model=model, args=arguments, train_dataset=rows)


def losses(run):
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.mark.bits
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_thirty_steps_and_the_same_bits_when_resumed(name, tmp_path):
    def model():
        torch.manual_seed(0)
        return sparse(name, dense_layers=[1], initializer_range=0.02)

    whole = trainer(model(), tmp_path, save_steps=15)
    whole.train()
    assert losses(whole)[-1] < 0.8 * losses(whole)[0]
    torch.manual_seed(5)  # another state of the generator: the checkpoint brings its own
    again = trainer(sparse(name, dense_layers=[1]), tmp_path, save_strategy="no")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-15"))
    for (n, one), other in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other), n
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-30")
    assert all(torch.equal(*pair) for pair in zip(loaded.parameters(), whole.model.parameters(), strict=True))


def test_under_autocast(tmp_path):
    run = trainer(sparse("qwen3", dense_layers=[1], initializer_range=0.02), tmp_path, bf16=True, save_strategy="no")
    run.train()
    assert all(p.dtype == torch.float32 for p in run.model.parameters())
    assert losses(run)[-1] < 0.8 * losses(run)[0]


def with_selector_loss(model, queries):
    """The model in training, with the selector loss of its sparse layers."""
    for module in model.modules():
        if isinstance(module, nsa.NativeSparseAttention):
            module.selector_queries = queries
    return model.train()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_selector_loss_asks_tokens_only(name):
    model = with_selector_loss(sparse(name, nsa={"share_kv": True}), 1 << 20)
    rows = [tokens(20), tokens(180)]  # the first is too short for a choice, its padding would not be
    model(rows[1][None])
    alone = nsa.selector_loss(model)
    assert alone > 0.001
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    for _ in range(6):
        for side in ("left", "right"):
            ids, mask = padded(rows, side)
            model(ids, attention_mask=mask)
            torch.testing.assert_close(nsa.selector_loss(model), alone, rtol=1e-3, atol=0)
        model(torch.cat(rows)[None], position_ids=positions[None])
        torch.testing.assert_close(nsa.selector_loss(model), alone, rtol=1e-3, atol=0)
    with pytest.raises(ValueError, match=r"^model: model.layers.0.self_attn has no selector loss"):
        model(rows[1][None], use_cache=True)
        nsa.selector_loss(model)
    model.model.layers[1].self_attn.num_heads *= 2  # as where another rank has the other half
    with pytest.raises(ValueError, match=r"^selector_queries = 1048576: must be 0 with tensor parallelism"):
        model(rows[1][None])


class SparseTrainer(nsa.hf.NsaTrainerMixin, Trainer):
    pass


WIDE = {"kernel_size": 32, "kernel_stride": 16, "topk": 3, "share_kv": True}
"""w1 of phi has 32 * 16 inputs: it learns at a quarter of the common rate."""


def test_selector_loss_in_trainer(tmp_path):
    observed = []

    class SelectorTrainer(SparseTrainer):
        selector_loss_weight = 1e4  # next to which the gradient of the other loss is small
        selector_queries = 16

        def compute_loss(self, *arguments, **options):
            loss = super().compute_loss(*arguments, **options)
            observed.append(nsa.selector_loss(self.model))
            return loss

    model = sparse("llama", nsa={"share_kv": True}, dense_layers=[1])
    model.gradient_checkpointing_enable()
    trainer(model, tmp_path, 20, SelectorTrainer, save_strategy="no").train()
    assert model.model.layers[0].self_attn.selector_queries == 16
    assert sum(observed[-5:]) < 0.8 * sum(observed[:5])


def test_the_loop_of_accelerate():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = with_selector_loss(sparse("qwen3", nsa=WIDE), 16)
    phi, before = model.model.layers[0].self_attn.phi_k.w1, model.model.layers[0].self_attn.phi_k.w1.detach().clone()
    ids, seen = tokens(2, 100), []
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(nsa.parameter_groups(model, 3e-3, 0.1)))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="phi|model: ")
        for _ in range(10):
            with accelerator.accumulate(model):
                loss = model(ids, labels=ids).loss
                accelerator.backward(loss + 0.1 * nsa.selector_loss(model))
                optimizer.step()
                optimizer.zero_grad()
            seen.append(loss.item())
    assert seen[-1] < 0.9 * seen[0]
    assert 3e-3 / 4 < (phi - before).abs().max() < 1.05 * 5 * 3e-3 / 4  # five steps at a quarter of the rate


def test_outputs_that_cost_another_forward_are_not_requested(tmp_path):
    class WithFusedHead(Trainer):
        """As TRL's SFTTrainer, whose loss comes without logits."""

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, False, num_items_in_batch)
            with torch.no_grad():
                return (loss, model(**inputs)) if return_outputs else loss

    class SparseWithFusedHead(nsa.hf.NsaTrainerMixin, WithFusedHead):
        pass

    run = trainer(sparse("llama", nsa=WIDE), tmp_path, 2, SparseWithFusedHead, save_strategy="no")
    run.train()
    assert nsa.selector_loss(run.model) > 0 and torch.isfinite(torch.tensor(losses(run))).all()


def test_a_reference_forward_follows_the_one_that_is_trained(tmp_path):
    class WithReference(Trainer):
        """As TRL's DPOTrainer, whose reference is the model without its adapters."""

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            with torch.no_grad():
                model(**inputs)
            return result

    class SparseWithReference(nsa.hf.NsaTrainerMixin, WithReference):
        pass

    def trained(kind):
        torch.manual_seed(0)
        run = trainer(sparse("llama", nsa=WIDE), tmp_path, 2, kind, save_strategy="no")
        run.train()
        return run

    plain, referring = trained(SparseTrainer), trained(SparseWithReference)
    assert losses(referring) == losses(plain) and losses(plain)[1] != losses(plain)[0]
    with torch.no_grad(), pytest.raises(ValueError, match="has no selector loss"):
        referring.selector_loss_weight, inputs = 0.1, {"input_ids": tokens(1, 100)}
        referring.compute_loss(referring.model, {**inputs, "labels": inputs["input_ids"]})


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("accepts", [True, False])
def test_the_selector_loss_does_not_grow_with_accumulation(accepts, accumulate, tmp_path):
    options = {"gradient_accumulation_steps": accumulate, "max_grad_norm": 0, "save_strategy": "no"}
    run = trainer(sparse("llama", nsa=WIDE), tmp_path, 1, SparseTrainer, **options)
    run.model_accepts_loss_kwargs = accepts
    run.selector_queries, run.selector_loss_weight = 1 << 20, 1e6  # every query, and nearly all of the gradient
    run.train_dataset = run.train_dataset[:1] * 8
    weight, norms = run.model.model.layers[0].self_attn.phi_k.w1, []
    run.create_optimizer().register_step_pre_hook(lambda *_: norms.append(weight.grad.norm().item()))
    initial = copy.deepcopy(run.model).train()
    run.train()
    for module in initial.modules():
        if isinstance(module, nsa.NativeSparseAttention):
            module.selector_queries = 1 << 20
    initial(run.train_dataset[0]["input_ids"][None])
    (1e6 * nsa.selector_loss(initial)).backward()
    expected = initial.model.layers[0].self_attn.phi_k.w1.grad.norm().item()
    assert norms == [pytest.approx(expected, rel=0.01)]


def test_the_mixin_gives_phi_its_rates_and_no_decay(tmp_path):
    def model():
        torch.manual_seed(0)
        return sparse("llama", nsa=WIDE, initializer_range=0.02)

    whole = trainer(model(), tmp_path, 4, SparseTrainer, save_steps=2, weight_decay=0.1, warmup_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        whole.train()
    rates = {
        id(p): (group["initial_lr"], group["weight_decay"])
        for group in whole.optimizer.param_groups
        for p in group["params"]
    }
    attention = whole.model.model.layers[1].self_attn
    assert rates[id(attention.phi_k.w1)] == rates[id(attention.phi_v.pe)] == (3e-3 / 4, 0.0)
    assert rates[id(attention.phi_k.w2)] == (3e-3, 0.0)
    assert rates[id(attention.q_proj.weight)] == (3e-3, 0.1)
    assert len(rates) == len(list(whole.model.parameters()))
    again = trainer(model(), tmp_path, 4, SparseTrainer, save_strategy="no", weight_decay=0.1, warmup_steps=2)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for (n, one), other in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other), n


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_vl"])
@pytest.mark.parametrize("kind", [Trainer, SparseTrainer])
def test_label_smoothing_predicts_the_next_token(name, kind, tmp_path):
    model = nsa.hf.convert(vision_language()) if name == "qwen3_vl" else sparse(name)
    run = trainer(model, tmp_path, 1, kind, label_smoothing_factor=0.1)
    ids = tokens(2, 30) % IMAGE
    loss = run.compute_loss(model.eval(), {"input_ids": ids, "labels": ids})
    smooth = torch.nn.functional.cross_entropy(
        model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1
    )
    assert loss.item() == pytest.approx(smooth.item(), rel=1e-5)


def test_a_plain_trainer_warns_of_the_rate_of_phi(tmp_path):
    run = trainer(sparse("llama", nsa=WIDE), tmp_path, 2, save_strategy="no")
    with pytest.warns(
        UserWarning, match=r"^phi has lr = 0.003 and .*must be at most 0.00075 and 0.*NsaTrainerMixin$"
    ) as seen:
        run.train()
    assert sum("phi has lr" in str(one.message) for one in seen) == 1


def test_the_mixin_names_a_selector_without_weights(tmp_path):
    run = trainer(sparse("llama", nsa={**WIDE, "phi": "mean"}), tmp_path, 1, SparseTrainer, save_strategy="no")
    with pytest.warns(UserWarning, match=r"^model: no selector loss, as phi = 'mean' with share_kv"):
        run.train()


def test_frozen_phi_is_named(tmp_path):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(sparse("llama", nsa=WIDE), peft.LoraConfig(target_modules="all-linear"))
    run = trainer(adapted, tmp_path, 1, SparseTrainer, save_strategy="no")
    with pytest.warns(UserWarning, match=r"phi_k is frozen.*modules_to_save=\['phi_k', 'phi_v'\]$"):
        run.train()


@pytest.mark.parametrize("share_kv", [True, False])
def test_adapters_train_phi_at_its_rate(share_kv, tmp_path):
    peft = pytest.importorskip("peft")
    model = sparse("llama", nsa={**WIDE, "share_kv": share_kv}, dense_layers=[1])
    ids, initial = tokens(1, 100), model.model.layers[0].self_attn.phi_k.w1.detach().clone()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, **nsa.hf.lora_fields(model)))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="phi|model: ")
        trainer(adapted, tmp_path, 1, SparseTrainer, save_strategy="no", weight_decay=0.5).train()
    moved = (adapted.base_model.model.model.layers[0].self_attn.phi_k.w1 - initial).abs().max()
    assert 0.5 * 3e-3 / 4 < moved < 1.001 * 3e-3 / 4
    adapted.eval().save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = adapted(input_ids=ids).logits
        torch.testing.assert_close(adapted.merge_and_unload()(ids).logits, expected, rtol=1e-3, atol=1e-4)
    assert any("phi_k" in name for name in peft.utils.load_peft_weights(tmp_path / "adapter"))
    assert nsa.hf.lora_fields(sparse("llama", nsa={"phi": "mean"}))["modules_to_save"] is None


@pytest.fixture
def spawn(tmp_path):
    """Runs distributed.py on a saved model and returns what it wrote."""

    def run(model, kind=None, processes=2):
        folder, ids, out = tmp_path / "model", tmp_path / "ids.pt", tmp_path / f"{kind}.json"
        if not folder.exists():
            model.save_pretrained(folder)
            torch.save(tokens(3, 4, 100), ids)
        command = [sys.executable]
        if kind is not None:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command += [HERE / "distributed.py", folder, ids, out, *([] if kind is None else [kind])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(out.read_text()), done.stderr

    return run


@pytest.mark.parametrize(
    ("name", "options"),
    [("llama", {"phi_per_kv_head": True, "share_kv": True}), ("qwen3", {"phi_per_kv_head": False, "share_kv": False})],
)
def test_two_processes_train_as_one(name, options, spawn):
    model = sparse(name, nsa=options, dense_layers=[1])
    expected, _ = spawn(model)
    assert expected["losses"][-1] < expected["losses"][0]
    largest = max(expected["norms"].values())
    for kind in ("tp", "fsdp"):
        given, said = spawn(model, kind)
        assert given["losses"] == pytest.approx(expected["losses"], abs=1e-4), kind
        assert given["norms"].keys() == expected["norms"].keys()
        for n, norm in expected["norms"].items():
            assert given["norms"][n] == pytest.approx(norm, abs=1e-5 * largest), (kind, n)
        assert "TP rules were not applied" not in said
