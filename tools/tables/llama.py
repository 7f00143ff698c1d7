"""A Llama of transformers: bench/models/llama.py."""

from tables.text import figure, fill, gpu_of, ratio, read, source, table

LLAMA_PARTS = {
    "prefill": "prefill",
    "train": "training step",
    "decode": "decode step",
    "graph": "decode step as a CUDA graph",
}


def llama():
    result = read("llama.json")
    shape = result["shape"]
    yield "## A 1.2-billion-parameter Llama in Hugging Face transformers"
    layers, heads, kv_heads = (shape[f"num_{name}"] for name in ("hidden_layers", "attention_heads", "key_value_heads"))
    problem = f"{layers} layers, H={heads}, Hkv={kv_heads}, D={shape['head_dim']}, one sequence, {result['dtype']}"
    unit = (
        f"Medians in ms, in brackets the peak GiB without the weights (torch {result['torch']}, transformers "
        f"{result['transformers']}). Dense is `LlamaForCausalLM` with `sdpa`. NSA is the same model after "
        "`nsa.hf.convert`. The last column has the converted layers without transformers; results have the same bits."
    )
    yield source(gpu_of(result), result, problem, unit)
    yield fill(
        "Prefill fills a new cache. A training step includes fused AdamW, activation checkpointing and the loss in "
        "chunks of 8192 tokens. A decode step is greedy and includes host time. DynamicCache copies dense attention's "
        "cache at each step, NSA's when it grows. The last rows replay the step as one CUDA graph, with a cache of "
        "fixed size and, for dense attention, a mask."
    )
    rows = [["", "tokens", "dense", "NSA", "dense / NSA", "NSA / layers alone"]]
    for part, title in LLAMA_PARTS.items():
        for key, found in sorted(result[part].items(), key=lambda item: [int(n) for n in item[0].split("x")[::-1]]):
            length, _, batch = key.partition("x")
            name = title + (f", {batch} sequences" if batch not in ("", "1") else "")
            times = {who: found[who]["ms"] if who in found else None for who in ("dense", "nsa", "layers")}
            models = ("dense", "nsa")
            cells = (f"{figure(times[who])} ({found[who]['peak_gib']:.1f})" if who in found else "" for who in models)
            ratios = ratio(times["dense"], times["nsa"]), ratio(times["nsa"], times["layers"])
            rows.append([name, length, *cells, *ratios])
    yield table(rows)
    rows = [["largest error of logits", "GPU", "CPU", "bound"]]
    for dtype, found in result["equal"].items():
        for part, what in (("forward", "forward"), ("prefill_and_steps", "prefill and 16 steps")):
            e = found[part]
            figures = (f"{e[name]:.1e}" for name in ("device", "cpu", "bound"))
            rows.append([f"{what}, {dtype}{'' if e['within'] else ' (NOT within the bound)'}", *figures])
    yield fill(
        "A small model with the same weights on both devices, against float64 in plain torch; the bound is that of "
        "[operations](operations.md#rules):"
    )
    yield table(rows)
