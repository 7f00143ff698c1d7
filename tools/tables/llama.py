"""A Llama of transformers: bench/models/llama.py."""

from tables.text import figure, fill, gpu_of, ratio, read, source, table

LLAMA_PARTS = {
    "prefill": "a prompt into a new cache",
    "train": "training step",
    "decode": "decode step",
    "graph": "decode step as a CUDA graph",
}


def llama():
    result = read("llama.json")
    shape, within = result["shape"], {True: "within", False: "NOT within"}
    yield "## A Llama of 1.2 billion parameters in Hugging Face transformers"
    layers, heads, kv_heads = (shape[f"num_{name}"] for name in ("hidden_layers", "attention_heads", "key_value_heads"))
    problem = (
        f"{layers} layers, H = {heads}, Hkv = {kv_heads}, D = {shape['head_dim']}, one sequence, {result['dtype']}"
    )
    unit = (
        f"Medians in ms; in brackets the GiB held at most beside the weights (torch {result['torch']}, transformers "
        f"{result['transformers']}). Dense is `LlamaForCausalLM` by `sdpa`; NSA what `nsa.hf.convert` makes of it, "
        "with the paper's parameters; layers alone the same without transformers, with the same bits."
    )
    yield source(gpu_of(result), result, problem, unit)
    yield fill(
        "Prefill gives the logits of the last token and a cache. A training step is forward, backward and fused AdamW, "
        "with checkpoints of every layer and the loss in chunks of 8192 tokens. A decode step is one of greedy "
        "generation with the cache that grows, with everything that the host does: dense attention's cache is copied "
        "whole at each step, as transformers' DynamicCache does it, NSA's where it has to become longer. The last rows "
        "are one sequence with a cache of fixed size, the step replayed as one graph; there dense attention reads a "
        "mask, too."
    )
    rows = [["", "tokens", "dense", "NSA", "layers alone", "dense / NSA", "NSA / layers alone"]]
    for part, title in LLAMA_PARTS.items():
        for key, found in sorted(result[part].items(), key=lambda item: [int(n) for n in item[0].split("x")[::-1]]):
            length, _, batch = key.partition("x")
            name = title + (f", {batch} sequences" if batch not in ("", "1") else "")
            times = {who: found[who]["ms"] if who in found else None for who in ("dense", "nsa", "layers")}
            cells = (f"{figure(times[who])} ({found[who]['peak_gib']:.1f})" if who in found else "" for who in times)
            rows.append(
                [name, length, *cells, ratio(times["dense"], times["nsa"]), ratio(times["nsa"], times["layers"])]
            )
    yield table(rows)
    sentences = []
    for dtype, found in result["equal"].items():
        for part, what in (("forward", "a text"), ("prefill_and_steps", "a prompt and 16 steps with a cache")):
            e = found[part]
            sentences.append(
                f"Logits of {what} in {dtype}: off by {e['device']:.1e} on the GPU and {e['cpu']:.1e} on the CPU, "
                f"{within[e['within']]} the bound, {e['bound']:.1e}."
            )
    yield fill(
        "A small model with the same weights on the GPU and on the CPU, each against float64 in plain torch, as "
        "[operations](operations.md#rules) bounds it. " + " ".join(sentences)
    )
