"""How far rollout and training are apart, with and without the recorded selections, and what recording costs.

    python bench/python/rollout_agreement.py [--device cpu] [--length 2048] [--dtype bfloat16] [--json FILE]
    python bench/python/rollout_agreement.py --model FOLDER --text FILE ...

A model samples with a KV cache: a random Llama with the recipe's blocks, or that of a folder. Then the training forward
computes the log-probabilities of the same tokens. By layer: the share of (token, KV head) whose selection differs
without the record, the difference of the hidden states over their norm, and the KL of what the output head makes of
them in float32; in the last layer that is the KL without the rounding of the logits.
"attention" compares the operators alone, on the same random inputs and blocks: how far decode and prefill are from the
training forward, and how long they take over its time for the same tokens. Times are medians of 64 decode steps and
of training steps, taking turns; all rows of a decode step have the same prompt. --decode-only: of decode steps alone,
for shapes that a training step has no memory for. --attention-only: of the operators alone.
"""

import argparse
import json
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import nsa
from nsa.hf import NsaLlamaConfig, NsaLlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from options import amount, integer

CHUNK = 8192  # tokens of a prompt in one call, so that long prompts have room
DTYPES = "bfloat16", "float16", "float32"
AT_ONCE = 64  # decode steps, after which a cache has written what it recorded
STEPS = (1, 16, 128, 2048)  # new tokens in a call that is compared with the training forward; also all


def make_config(options: argparse.Namespace) -> NsaLlamaConfig:
    return NsaLlamaConfig.recipe(
        vocab_size=512,
        hidden_size=options.hidden_size,
        intermediate_size=2 * options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        head_dim=options.head_dim,
        max_position_embeddings=2 * options.length,
        initializer_range=options.initializer_range,
        bos_token_id=None,
        eos_token_id=None,
    )


def make_model(options: argparse.Namespace) -> Any:
    dtype = getattr(torch, options.dtype)
    if options.model:  # not .to(dtype), which would round RoPE's inverse frequencies, too
        return AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, local_files_only=True).to(
            options.device
        )
    torch.manual_seed(0)
    return NsaLlamaForCausalLM(make_config(options)).to(options.device, dtype)


def make_prompt(options: argparse.Namespace, model: Any) -> Tensor:
    """Random tokens, or bytes of the text: a row begins every so many bytes."""
    if not options.text:
        return torch.randint(model.config.vocab_size, (options.batch, options.length), device=options.device)
    text = b"".join(file.read_bytes() for file in options.text)
    needed = options.batch * options.length
    if len(text) < needed:
        raise SystemExit(f"--text: {len(text)} bytes: must be at least {needed}, batch x length")
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // options.batch * options.batch]
    return rows.view(options.batch, -1)[:, : options.length].long().to(options.device)


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)


def synchronized() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def decode_times(model: Any, ids: Tensor, repeats: int) -> dict[str, float]:
    """Seconds of a decode step behind the prompt, without and with recording: medians of means over many steps."""
    caches: dict[str, Any] = {}
    times: dict[str, list[float]] = {"plain": [], "recorded": []}
    with torch.inference_mode():
        for name in times:
            with nsa.replay.record(model) if name == "recorded" else nullcontext():
                cache: Any = None
                for chunk in ids[:1].split(CHUNK, dim=1):
                    cache = model(chunk, cache=cache, use_cache=True, logits_to_keep=1).cache
            cache.batch_repeat_interleave(len(ids))
            caches[name] = cache
        for _ in range(repeats):
            for name, found in times.items():
                start = synchronized()
                for _ in range(AT_ONCE):
                    model(ids[:, -1:], cache=caches[name])
                    finished = synchronized()
                found.append((finished - start) / AT_ONCE)
    medians = {name: statistics.median(found) for name, found in times.items()}
    return medians | {"recorded_over_plain": medians["recorded"] / medians["plain"]}


def by_layer(model: Any, rollout: Tensor, training: Tensor) -> list[dict[str, float]]:
    """Of hidden states (layers, B, S, hidden_size), the last of them behind the model's last norm."""
    results = []
    norm, head = model.get_decoder().norm, model.get_output_embeddings().weight.float()
    for i, pair in enumerate(zip(rollout, training, strict=True)):
        found = [hidden.float() for hidden in pair]
        difference = (found[0] - found[1]).norm() / found[0].norm()
        if i + 1 < len(rollout):
            found = [norm(hidden.to(norm.weight.dtype)).float() for hidden in found]
        expected, other = ((hidden @ head.T).log_softmax(-1) for hidden in found)
        kl = (expected.exp() * (expected - other)).sum(-1).mean()
        results.append({"hidden_difference": difference.item(), "mean_kl": kl.item()})
    return results


def attention(options: argparse.Namespace) -> dict[str, Any]:
    """The operators alone: calls of so many new tokens, with a cache, against the training forward of all."""
    torch.manual_seed(0)
    cfg, dtype, length = make_config(options).nsa_config(), getattr(torch, options.dtype), options.length
    dims = (options.heads, options.kv_heads, options.head_dim)
    layer = nsa.NativeSparseAttention(64, *dims, cfg=cfg).to(options.device, dtype)

    def draw(*shape: int) -> Tensor:
        return torch.randn(options.batch, length, *shape, device=options.device).to(dtype)

    heads, kv_heads, dim = dims
    tensors = draw(heads, dim), draw(kv_heads, dim), draw(kv_heads, dim), draw(heads, 3).sigmoid()
    results: dict[str, Any] = {}
    with torch.inference_mode():
        rope = nsa.rotary_tables(torch.arange(2 * length, device=options.device), dim)
        inputs = {"weights_k": layer.phi_k(dtype), "weights_v": layer.phi_v(dtype), "rope": rope}
        blocks, times = None, []
        for _ in range(options.repeats + 1):  # the first one warms up, and selects
            start = synchronized()
            expected, selected = nsa.native_sparse_attention(
                *tensors, cfg=cfg, indices=blocks, return_indices=True, **inputs
            )
            times.append(synchronized() - start)
            blocks = selected if blocks is None else blocks
        forward = statistics.median(times[1:])
        for new in (*(new for new in STEPS if new < length), length):
            cache = layer.make_cache(options.batch, length)
            step: Any = nsa.decode if new <= 16 else nsa.prefill
            calls = zip(*(t.split(new, dim=1) for t in (*tensors, blocks)), strict=True)
            start = synchronized()
            found = [
                step(
                    *(t.contiguous() for t in given), cache, indices=chosen.contiguous(), return_indices=True, **inputs
                )
                for *given, chosen in calls
            ]
            seconds = synchronized() - start
            o, chosen = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
            results[str(new)] = {
                "equal": (o == expected).float().mean().item(),
                "largest_difference": (o - expected).float().abs().max().item(),
                "differing_selections": (chosen != selected).any(-1).float().mean().item(),
                "time_over_forward": seconds / forward,
            }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--length", type=integer, default=2048, help="tokens of a prompt")
    parser.add_argument("--batch", type=integer, default=2)
    parser.add_argument("--new", type=integer, default=64, help="tokens that are sampled")
    parser.add_argument("--model", help="folder of a trained model for nsa.hf, as python -m nsa.convert writes it")
    parser.add_argument("--text", type=Path, nargs="+", help="prompts for a model of bytes; default: random tokens")
    parser.add_argument("--hidden-size", type=integer, default=256)
    parser.add_argument("--layers", type=integer, default=4)
    parser.add_argument("--heads", type=integer, default=16)
    parser.add_argument("--kv-heads", type=integer, default=4)
    parser.add_argument("--head-dim", type=integer, default=64)
    parser.add_argument("--train-dtype", choices=DTYPES, help="of the trainer, default --dtype")
    parser.add_argument(
        "--initializer-range",
        type=amount,
        default=0.1,
        help="of the random weights: large, or the model says the same whatever it attends to; its square root of the "
        "hidden size times as much is the gain of a linear layer, which multiplies rounding",
    )
    parser.add_argument("--repeats", type=integer, default=5)
    parser.add_argument("--decode-only", action="store_true")
    parser.add_argument("--attention-only", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.attention_only:
        finish(options, {"arguments": vars(options), "attention": attention(options)})
        return
    rollout = make_model(options).eval()
    prompt = make_prompt(options, rollout)
    if options.decode_only:
        finish(options, {"arguments": vars(options), "decode": decode_times(rollout, prompt, options.repeats)})
        return
    trainer = rollout
    if options.train_dtype:
        trainer = make_model(options).to(getattr(torch, options.train_dtype)).eval()
    with nsa.replay.record(rollout):
        out = rollout.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=options.new,
            do_sample=True,
            output_logits=True,
            output_hidden_states=True,
            return_dict_in_generate=True,
        )
    answers = out.sequences[:, options.length :]
    sampled = torch.stack(out.logits, 1).float().log_softmax(-1)
    hidden = torch.stack(
        [torch.cat([step[:, -1:] for step in layer], 1) for layer in zip(*out.hidden_states, strict=True)][1:]
    )
    records = nsa.replay.collect(out.cache)
    ids = out.sequences[:, :-1]  # the last token was not fed back: no log-probability depends on it
    entropy = -(sampled.exp() * sampled).sum(-1).mean().item()
    results: dict[str, Any] = {"arguments": vars(options), "tokens": answers.numel(), "entropy": entropy}

    def context(name: str) -> Any:
        return nsa.replay.replay(trainer, records) if name == "replayed" else nullcontext()

    steps: dict[str, list[float]] = {"selected": [], "replayed": []}
    for name in steps:
        with torch.no_grad(), context(name):
            forward = trainer(ids, use_cache=False, output_hidden_states=True)
            found = forward.logits[:, options.length - 1 :].float().log_softmax(-1)
            training = torch.stack([layer[:, options.length - 1 :] for layer in forward.hidden_states[1:]])
        results[name] = {
            "equal": (found == sampled).all(-1).float().mean().item(),
            "largest_difference": (found - sampled).gather(-1, answers[..., None]).abs().max().item(),
            "mean_kl": (sampled.exp() * (sampled - found)).sum(-1).mean().item(),
            "by_layer": by_layer(trainer, hidden, training),
        }
    with torch.no_grad(), nsa.replay.replay(trainer, records, compare=True) as state:
        trainer(ids, use_cache=False)
    results["differing_selections_by_layer"] = [different / counted for different, counted in state.by_layer()]
    for _ in range(3):
        for name, times in steps.items():
            start = synchronized()
            with context(name):
                log_probabilities(trainer(ids, use_cache=False).logits, out.sequences[:, 1:]).sum().backward()
            times.append(synchronized() - start)
            trainer.zero_grad()
    results["decode"] = decode_times(rollout, prompt, options.repeats)
    medians = {name: statistics.median(times) for name, times in steps.items()}
    results["training_step"] = medians | {"replayed_over_selected": medians["replayed"] / medians["selected"]}
    packed = sum(len(record.to_bytes()) for record in records)
    tokens = sum(len(record) for record in records) * len(records[0].indices)
    memory = records[0].indices[0, 0].numel() * records[0].indices.element_size()
    results["bytes_per_token_and_layer"] = {"in memory": memory, "packed": packed / tokens}
    finish(options, results)


def finish(options: argparse.Namespace, results: dict[str, Any]) -> None:
    print(json.dumps(results, indent=1, default=str))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1, default=str)


if __name__ == "__main__":
    main()
