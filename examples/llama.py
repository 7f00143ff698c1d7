"""A dense Llama of transformers made sparse by nsa.hf.convert, trained a few steps and generated from.

The dense model is tiny and random, made on the spot; `from_pretrained` would give one worth converting.

    python examples/llama.py
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import nsa
import nsa.hf

LENGTH, STEPS = 192, 40


def texts(count: int) -> torch.Tensor:
    """Rows in which one token follows from the last by a fixed rule, but for one in ten, which is random."""
    rows = [torch.randint(64, (count,))]
    for _ in range(LENGTH - 1):
        rows.append(torch.where(torch.rand(count) < 0.9, (5 * rows[-1] + 3) % 64, torch.randint(64, (count,))))
    return torch.stack(rows, 1)


def main() -> None:
    """Converts, compares, trains, generates."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    dense = AutoModelForCausalLM.from_config(config, attn_implementation="nsa")
    sizes = {"kernel_size": 8, "kernel_stride": 4, "block_size": 16, "topk": 6, "window_size": 32}
    model: Any = nsa.hf.convert(dense, nsa=sizes, phi="mlp")

    # As long as all of the text is selected, the converted model has almost the logits of the dense one.
    short = texts(2)[:, :80]
    with torch.no_grad():
        difference = (model(short).logits - dense(short).logits).abs().max().item()
    print(f"80 tokens: largest difference of logits {difference:.3f}")
    assert difference < 0.1

    # On longer texts it has to be trained.
    model.train()
    optimizer = torch.optim.AdamW(nsa.parameter_groups(model, 3e-3, 0.1))
    losses = []
    for step in range(1, STEPS + 1):
        rows = texts(8)
        loss = model(rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step:2}: {loss.item():.3f} nats per token")
    assert losses[-1] < 0.5 * losses[0], "the model has not learnt"

    # Generation runs on the caches of NSA and writes the tokens that a forward without a cache predicts.
    model.eval()
    prompt = texts(1)[:, :100]
    tokens = model.generate(prompt, max_new_tokens=8, do_sample=False)
    with torch.no_grad():
        chosen = model(tokens[:, :-1]).logits[:, 99:].argmax(-1)
    assert torch.equal(tokens[:, 100:], chosen)
    print(f"generated: {tokens[0, 100:].tolist()}")


if __name__ == "__main__":
    main()
