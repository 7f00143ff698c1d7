"""transformers' Trainer, and its parallelism over two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import nsa
from models import VOCABULARY, padded, sparse, tokens

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


def test_selector_loss_in_trainer(tmp_path):
    told = []

    class SelectorTrainer(Trainer):
        def compute_loss(self, *arguments, **options):
            loss = super().compute_loss(*arguments, **options)
            told.append(nsa.selector_loss(self.model))
            return 0 * loss + told[-1]

    model = with_selector_loss(sparse("llama", nsa={"share_kv": True}, dense_layers=[1]), 16)
    model.gradient_checkpointing_enable()
    trainer(model, tmp_path, 20, SelectorTrainer, save_strategy="no").train()
    assert sum(told[-5:]) < 0.8 * sum(told[:5])


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
