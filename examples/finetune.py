"""A dense Qwen3 of transformers made sparse, fine-tuned with Trainer and LoRA, and evaluated in a process of its own.

The dense model is tiny and random, made on the spot; `from_pretrained` would give one worth converting. The text is
Python's standard library, a byte a token. Needs peft.

    python examples/finetune.py [FOLDER]
"""

import random
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Trainer, TrainerCallback, TrainingArguments

LENGTH, STEPS, RATE = 384, 30, 1e-2
TEXT = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
HELD_OUT, TRAINED = TEXT[:40_000], TEXT[40_000:4_000_000]


class Request(NamedTuple):
    """An Instance of lm-eval: a context and a continuation."""

    args: tuple[str, str]


class ByteLM:
    """The method of lm-eval's LM that tasks with choices call."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.no_grad()
    def loglikelihood(self, requests: list[Request]) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation behind its context, and whether it is the greedy one."""
        results = []
        for request in requests:
            context, continuation = (list(text.encode()) for text in request.args)
            target = torch.tensor(continuation)
            ids = torch.tensor([context + continuation])
            logits = self.model(ids).logits[0, len(context) - 1 : -1].log_softmax(-1)
            greedy = bool((logits.argmax(-1) == target).all())
            results.append((logits.gather(-1, target[:, None]).sum().item(), greedy))
        return results


def train(folder: Path) -> None:
    """Converts, fine-tunes, saves."""
    import peft

    import nsa.hf

    class SparseTrainer(nsa.hf.NsaTrainerMixin, Trainer):  # phi's learning rates, and the selector loss
        pass

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.1,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    )
    dense = AutoModelForCausalLM.from_config(config, attn_implementation="nsa")
    model: Any = nsa.hf.convert(dense, preset="recipe", nsa={"topk": 6, "window_size": 192})

    # As long as all of the text is selected, the converted model has almost the logits of the dense one.
    short = torch.tensor([list(HELD_OUT[:192])])
    with torch.no_grad():
        difference = (model(short).logits - dense(short).logits).abs().max().item()
    print(f"192 tokens: largest difference of logits {difference:.3f}")
    assert difference < 0.1

    rows = torch.frombuffer(bytearray(TRAINED), dtype=torch.uint8).long()
    starts = torch.randint(len(rows) - LENGTH, (4 * STEPS,)).tolist()
    data = [{"input_ids": rows[s : s + LENGTH], "labels": rows[s : s + LENGTH]} for s in starts]
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, **nsa.hf.lora_fields(model)))
    phi = model.model.layers[1].self_attn.phi_k.w1
    before = phi.detach().clone()

    class Watch(TrainerCallback):
        """Prints how far phi has moved."""

        def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if "loss" in more["logs"]:
                moved = (phi - before).abs().max().item()
                print(f"step {state.global_step}: {more['logs']['loss']:.3f} nats per byte, phi moved by {moved:.3f}")

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = SparseTrainer(model=adapted, args=arguments, train_dataset=data, callbacks=[Watch()])
    trainer.train()
    optimizer: Any = trainer.optimizer
    rates = {parameter: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    print(f"learning rate of the adapters {RATE}, of phi's first layer {rates[phi]}")
    assert rates[phi] < RATE and 0 < (phi - before).abs().max().item() < 1.01 * STEPS * rates[phi]
    adapted.merge_and_unload().save_pretrained(folder)


def evaluate(folder: Path) -> None:
    """Loads the folder by its name in a program that never heard of nsa; generates, and chooses continuations."""
    assert "nsa" not in sys.modules
    model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()

    # Generation runs on the caches of NSA and writes the tokens that a forward without a cache predicts.
    prompt = torch.tensor([list(HELD_OUT[:300])])
    tokens = model.generate(prompt, max_new_tokens=8, do_sample=False)
    with torch.no_grad():
        chosen = model(tokens[:, :-1]).logits[:, 299:].argmax(-1)
    assert torch.equal(tokens[:, 300:], chosen)
    print(f"generated: {bytes(tokens[0, 300:].tolist())!r}")

    # Which one comes next, the text's own 40 characters or the same ones shuffled?
    text, shuffle, requests = HELD_OUT.decode(errors="replace"), random.Random(0), []
    for at in range(300, len(text) - 40, 2000):
        right = text[at : at + 40]
        wrong = "".join(shuffle.sample(right, len(right)))
        requests += [Request((text[at - 300 : at], choice)) for choice in (right, wrong)]
    scores = [score for score, _ in ByteLM(model).loglikelihood(requests)]
    right_answers = sum(right > wrong for right, wrong in zip(scores[::2], scores[1::2], strict=True))
    print(f"right continuations: {right_answers} of {len(requests) // 2}, by chance half")


def main() -> None:
    """Trains, then evaluates in another process."""
    if sys.argv[1:2] == ["--evaluate"]:
        return evaluate(Path(sys.argv[2]))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else made)
        train(folder)
        subprocess.run([sys.executable, __file__, "--evaluate", str(folder)], check=True)


if __name__ == "__main__":
    main()
