"""Decode steps and generation: `tools/gpu.sh decode`."""

import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "python" / "nsa"))  # the report without the package's torch

from report.fields import cuda_decode_stages, steps_of_one_token

from tables.text import fill, gpu_of, noted, read, source, table

TIMES = {"median": "median", "mean": "mean", "worst": "worst", "completing": "completing a block", "warm": "warm"}
TIMES |= {"layer": "chained", "floor": "its bytes", "dense_floor": "dense attention's bytes"}


def decode():
    result = read("decode.json")
    stages = cuda_decode_stages(result)
    yield "## Decode steps"
    yield source(gpu_of(result), result, stages["decode"]["problem"], "Microseconds.")
    yield from decode_steps(result, stages)
    yield from other_steps(stages)
    yield "### Against dense attention and flash_nsa"
    yield from against_peers(result)
    yield "![time of a decode step over the context, NSA, flash_nsa, dense attention and bytes](images/decode_time.png)"
    yield "### Generation"
    yield from generate_speed(result)


def decode_steps(result, stages):
    yield fill(
        f"One step at {stages['decode']['context']} tokens of context. A CUDA graph is replayed "
        "while lengths grow, L2 flushed before each replay. Median, mean and worst are of 48 steps. Completing a "
        "block: median of the steps that complete a compression block. Warm: without flushing. Chained: one of 32 "
        "steps in a graph, each with its own cache. Bytes: time of a copy of the bytes that the step, or dense "
        "attention, has to read. Where the time goes: [findings](findings/decoding/two_kernels.md)."
    )
    rows = [["sequences", *TIMES.values()]]
    layers = {times["batch"]: times["layer"] for times in stages["decode_layers"]["steps"]}
    for times in stages["decode"]["steps"]:
        times = times | {"layer": layers.get(times["batch"])}
        cells = ("" if times.get(name) is None else f"{times[name]:.0f}" for name in TIMES)
        rows.append([str(times["batch"]), *cells])
    yield table(rows)
    yield from noted(result["stages"]["decode"])


def other_steps(stages):
    """Medians and bytes, a row for each case."""
    default = stages["decode"]
    rows = [["context", "sequences", "new tokens", "blocks", "cache", "median", "its bytes"]]
    for found in stages.values():
        if found["layers"] or found is default:
            continue
        if found["context"] != default["context"] and not found["ragged"]:  # in the next table
            continue
        context = f"1024 … {2 * found['context']}" if found["ragged"] else str(found["context"])
        dims = re.search(r" (D=\S+)", found["problem"])[1]
        other = "" if dims in default["problem"].split() else f", {dims}"
        for times in found["steps"]:
            if (times["batch"] == 1 and times["new"] in (2, 4)) or (other and times["batch"] < 32):
                continue  # between the others
            case = [context, str(times["batch"]), str(times["new"]), found["selection"], times["cache"] + other]
            rows.append([*case, *(f"{times[name]:.0f}" for name in ("median", "floor"))])
    yield "Other cases, medians; other lengths are in the next table:"
    yield table(rows)


def against_peers(result):
    stages = result["stages"]
    dense, peer = stages["decode_dense"], stages["peer_decode"]
    yield fill(
        f"Microseconds of one step of one token, from the same run (torch {peer['result']['torch']}). Dense attention "
        "is the fastest of cuDNN over all keys, cuDNN over 4, 16 or 64 splits of them, and FlashAttention-2 and 3. Its "
        "caches are contiguous, and no keys are copied for the heads of a group (`bench/peers/dense_decode.py`). "
        f"flash_nsa ({peer['result']['flash_nsa'][:7]}) has φ = mean and pages of 128 (`bench/peers/peer_decode.py`)."
    )
    times = {"NSA": {which: step["median"] for which, step in steps_of_one_token(result).items()}}
    times["dense"] = {(s["batch"], s["context"]): s["us"][s["best"]] for s in dense["result"]["steps"]}
    times["flash_nsa"] = {(s["batch"], s["context"]): s["us"] for s in peer["result"]["steps"]}
    times["NSA"] = {which: us for which, us in times["NSA"].items() if which in times["dense"]}
    ratios = {f"{name} / NSA": (name, "NSA") for name in times if name != "NSA"}
    yield compared(times, ratios, "sequences")
    for stage in (dense, peer):
        yield from noted(stage)


def generate_speed(result):
    stage = result["stages"]["generate_speed"]
    unit = (
        "Tokens/s of `nsa generate`, all sequences together, after prompts of these lengths. A step is one CUDA graph "
        "with either attention. Full attention is torch's FlashAttention-2."
    )
    about = {"date": stage["date"], "commit": stage.get("commit", result["commit"])}
    about |= {"command": stage["command"].replace("; ", "\n    ")}
    yield source(gpu_of(result), about, stage["result"]["problem"], unit)
    rates = {
        title: {
            (s["batch"], s["context"]): s["tokens_per_second"]
            for s in stage["result"]["steps"]
            if s["attention"] == name
        }
        for name, title in (("nsa", "NSA"), ("full", "full attention"))
    }
    yield compared(rates, {"NSA / full": ("NSA", "full attention")}, "sequences")
    yield from noted(stage)


def compared(values, ratios, head):
    """Values by (sequences, context), a row for each name, and rows of their ratios."""
    contexts = sorted({context for found in values.values() for _, context in found})
    rows = [[head, "", *map(str, contexts)]]
    for batch in sorted({batch for found in values.values() for batch, _ in found}, reverse=True):
        lines = []
        for name, found in values.items():
            lines.append([name, *(f"{found[batch, n]:.0f}" if (batch, n) in found else "" for n in contexts)])
        for name, (over, under) in ratios.items():
            pairs = [(values[over].get((batch, n)), values[under].get((batch, n))) for n in contexts]
            lines.append([name, *(f"{a / b:.1f}" if a and b else "" for a, b in pairs)])
        rows += [[str(batch) if i == 0 else "", *line] for i, line in enumerate(lines)]
    return table(rows)
