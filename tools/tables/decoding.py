"""Decode steps and generating: `tools/gpu.sh decode`."""

import re

from report.fields import cuda_decode_stages, steps_of_one_token
from tables.text import gpu_of, noted, read, source, table


def decode():
    results = [read(name) for name in ("decode.json", "decode_h100.json")]
    yield "## Decode steps"
    yield "What the time goes to, and what it was before: the [findings](findings/decoding/two_kernels.md)."
    for result in results:
        yield from decode_steps(result)
    for stage, title, compared_with in (
        ("decode_dense", "### Beside dense attention", decode_beside_dense),
        ("peer_decode", "### Beside flash_nsa", decode_beside_peer),
    ):
        if found := [result for result in results if stage in result["stages"]]:
            yield title
            for result in found:
                yield from compared_with(result)
    yield "![time of a decode step over the context, NSA, flash_nsa, dense attention and bytes](images/decode_time.png)"
    yield "### Generating"
    for result in results:
        if "generate_speed" in result["stages"]:
            yield from generate_speed(result)
    yield "![tokens per second of generating over the context](images/generate_speed.png)"


def decode_steps(result):
    stages = cuda_decode_stages(result)
    whole = stages["decode"]
    about = {"date": result["date"], "commit": result["commit"], "command": result["command"]}
    unit = (
        f"Microseconds of one step at {whole['context']} tokens of context, replays of a graph while lengths grow, the "
        "second-level cache flushed before each: median, mean and worst of 48, and the median of those in which a "
        "sequence completes a compression block; warm: without flushing; chained: one of 32 steps in a graph, each "
        "with a cache of its own. Beside them the time of a copy of the bytes that the step has to read, and of those "
        "that dense attention would have to read."
    )
    yield source(gpu_of(result), about, whole["problem"], unit)
    yield from noted(result["stages"]["decode"])
    names = {"median": "median", "mean": "mean", "worst": "worst", "folding": "completing a block"}
    names |= {"warm": "warm", "layer": "chained"}
    names |= {"floor": "its bytes", "dense_floor": "dense attention's bytes"}
    layers = {times["batch"]: times["layer"] for times in stages["decode_layers"]["steps"]}
    rows = [["sequences", *names.values(), "kernels", "workspace, MiB"]]
    for times in whole["steps"]:
        times |= {"layer": layers.get(times["batch"])}
        cells = ("" if times.get(name) is None else f"{times[name]:.0f}" for name in names)
        rows.append([str(times["batch"]), *cells, str(times["launches"]), f"{times['workspace_mib']:.1f}"])
    yield table(rows)
    names = {"median": "median", "mean": "mean", "floor": "its bytes", "dense_floor": "dense attention's bytes"}
    rows = [["context", "sequences", "new tokens", "blocks", "cache", *names.values()]]
    for found in stages.values():
        if found["layers"] or found is whole:
            continue
        context = f"1024 … {2 * found['context']}" if found["ragged"] else found["context"]
        dims = re.search(r" (D=\S+)", found["problem"])[1]
        other = "" if dims in whole["problem"].split() else f", {dims}"
        for times in found["steps"]:
            case = [str(times["batch"]), str(times["new"]), found["selection"], times["cache"] + other]
            rows.append([str(context), *case, *(f"{times[name]:.0f}" for name in names)])
    yield "Other lengths, several new tokens at once, sequences of different lengths, other caches:"
    yield table(rows)


def decode_beside_dense(result):
    dense = result["stages"]["decode_dense"]
    unit = (
        "Microseconds of one step of one token, NSA as above and dense attention: the fastest of cuDNN over all keys, "
        "cuDNN over 4, 16 or 64 splits of them, and FlashAttention-2 with lengths on the device "
        "(`bench/peers/dense_decode.py`). None copies keys for the heads of a group."
    )
    yield source(gpu_of(result), result, dense["result"]["problem"], unit)
    ours = {which: step["median"] for which, step in steps_of_one_token(result).items()}
    theirs = {(step["batch"], step["context"]): step["us"][step["best"]] for step in dense["result"]["steps"]}
    yield compared(ours, theirs, ("NSA", "dense", "dense / NSA"), lambda nsa, full: full / nsa)
    yield from noted(dense)


def decode_beside_peer(result):
    stage = result["stages"]["peer_decode"]
    found = stage["result"]
    unit = (
        "Microseconds of one step of one token, NSA as above, with an MLP φ, and flash_nsa "
        f"({found['flash_nsa'][:7]}), which takes means (`bench/peers/peer_decode.py`, torch {found['torch']})."
    )
    yield source(gpu_of(result), result, found["problem"], unit)
    theirs = {(step["batch"], step["context"]): step["us"] for step in found["steps"]}
    ours = {which: step["median"] for which, step in steps_of_one_token(result).items() if which in theirs}
    yield compared(ours, theirs, ("NSA", "flash_nsa", "flash_nsa / NSA"), lambda nsa, other: other / nsa)
    yield from noted(stage)


def generate_speed(result):
    stage = result["stages"]["generate_speed"]
    unit = (
        "Tokens/s of `nsa generate`, all sequences together, behind prompts of these lengths. A step is one CUDA graph "
        "with either attention; full attention is torch's FlashAttention-2."
    )
    about = {"date": stage["date"], "commit": stage.get("commit", result["commit"])}
    about |= {"command": stage["command"].replace("; ", "\n    ")}
    yield source(gpu_of(result), about, stage["result"]["problem"], unit)
    nsa, full = (
        {(s["batch"], s["context"]): s["tokens_per_second"] for s in stage["result"]["steps"] if s["attention"] == name}
        for name in ("nsa", "full")
    )
    yield compared(nsa, full, ("NSA", "full attention", "NSA / full"), lambda nsa, full: nsa / full)
    yield from noted(stage)


def compared(nsa, full, names, ratio_of):
    """Figures by (sequences, context), a row each and one of their ratio."""
    contexts = sorted({context for _, context in [*nsa, *full]})
    rows = [["sequences", "", *map(str, contexts)]]
    for batch in sorted({batch for batch, _ in full}, reverse=True):
        pairs = [(nsa.get((batch, n)), full.get((batch, n))) for n in contexts]
        rows.append([str(batch), names[0], *(f"{a:.0f}" if a else "" for a, _ in pairs)])
        rows.append(["", names[1], *(f"{b:.0f}" if b else "" for _, b in pairs)])
        rows.append(["", names[2], *(f"{ratio_of(a, b):.1f}" if a and b else "" for a, b in pairs)])
    return table(rows)
