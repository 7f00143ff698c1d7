"""Reinforcement learning (GRPO) of a sparse model, with and without the rollout's block selections in training.

A rollout engine samples in bfloat16 and the trainer learns in float32, so they select different blocks here and there.
With `nsa.replay` the trainer attends to the blocks that the engine selected. The task is verifiable: answer with even
numbers.

    python examples/grpo.py
"""

import copy
import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import nsa
from nsa.hf import NsaLlamaConfig, NsaLlamaForCausalLM

TOKENS, PROMPT, ANSWER, PROMPTS, SAMPLES, STEPS = 16, 160, 6, 4, 6, 10
CLIP = 0.2


def make_model() -> Any:
    """A random model small enough for a CPU, and with few enough selected blocks that the selection matters."""
    configuration: Any = NsaLlamaConfig
    config = configuration(
        vocab_size=TOKENS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.3,  # else a random model says the same whatever it attends to
        nsa={"kernel_size": 8, "kernel_stride": 8, "block_size": 16, "topk": 6, "window_size": 16, "share_kv": True},
    )
    return NsaLlamaForCausalLM(config)


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)


def train(replayed: bool) -> dict[str, float]:
    """GRPO; returns the last reward, mean KL(rollout || trainer), and the fraction of clipped ratios."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(nsa.parameter_groups(model, 3e-3), betas=(0.9, 0.99))
    kls, clipped, rewards = [], [], []
    for _ in range(STEPS):
        prompts = torch.randint(TOKENS, (PROMPTS, PROMPT)).repeat_interleave(SAMPLES, 0)
        engine = copy.deepcopy(model).eval()
        for parameter in engine.parameters():  # not .to(), which would round RoPE's inverse frequencies, too
            parameter.data = parameter.data.to(torch.bfloat16)
        with nsa.replay.record(engine):
            out = engine.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=ANSWER,
                do_sample=True,
                output_logits=True,
                return_dict_in_generate=True,
            )
        answers = out.sequences[:, PROMPT:]
        sampled = log_probabilities(torch.stack(out.logits, 1), answers)
        reward = (answers % 2 == 0).float().mean(1)
        groups = reward.view(PROMPTS, SAMPLES)
        advantage = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)

        records = nsa.replay.collect(out.cache)
        lengths = [PROMPT + ANSWER] * len(records)
        with nsa.replay.replay(model, records, lengths) if replayed else nullcontext():
            logits = model(out.sequences, use_cache=False).logits[:, PROMPT - 1 : -1]
            found = log_probabilities(logits, answers)
        difference = found - sampled
        ratio = difference.exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kls.append((ratio - 1 - difference).mean().item())  # an estimate from the rollout's samples
        clipped.append(((ratio - 1).abs() > CLIP).float().mean().item())
        rewards.append(reward.mean().item())
    last = rewards[-4:]
    return {"reward": sum(last) / len(last), "kl": math.fsum(kls) / STEPS, "clip": math.fsum(clipped) / STEPS}


def main() -> None:
    print(f"{'':10} {'reward':>7} {'KL(rollout || train)':>21} {'clipped':>8}")
    found = {}
    for name, replayed in (("selected", False), ("replayed", True)):
        found[name] = train(replayed)
        print(f"{name:10} {found[name]['reward']:7.2f} {found[name]['kl']:21.1e} {found[name]['clip']:8.2%}")
    assert found["replayed"]["kl"] < found["selected"]["kl"]


if __name__ == "__main__":
    main()
