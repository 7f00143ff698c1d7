#!/usr/bin/env python3
"""Writes docs/performance.md, and the table of ratios in README.md, from the files in bench/results.

With --check it writes nothing; the exit code is 1 where a text is not what the files make. Every file there is read by
this script, and names what was measured, where, when and by which command.
"""

import argparse
import json
import re
import sys
import textwrap
from pathlib import Path

from report.fields import cuda_decode_stages, steps_of_one_token

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
MARKS = "<!-- speed: written by tools/performance.py -->", "<!-- end of speed -->"
INTRODUCTION = """\
<!-- Written by tools/performance.py from bench/results. Do not edit. -->
# Performance

Every table names its GPU or CPU, its day, its commit and its command. What is counted and how it is timed stands in
[measuring](guide/measuring.md), how to renew the tables too. Single experiments are in the [log](log/README.md).
"""
PASSES = {"forward": "forward", "forward_backward": "forward and backward"}
DENSE = {"cudnn": "cuDNN", "flash2": "FlashAttention-2"}


def read(name):
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


# ------------------------------------------------------------------------------------------------------------- Markdown


def fill(text):
    return textwrap.fill(text, width=120, break_on_hyphens=False)


def table(rows):
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def figure(value):
    """A time in whatever unit the table has: three digits, more only before the point."""
    return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def seconds(value):
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def pair(stage):
    """Forward / backward of one implementation."""
    return f"{figure(stage['forward'])} / {figure(stage['backward'])}" if stage else ""


def ratio(other, ours):
    return f"{other / ours:.2f}" if other and ours else ""


def source(where, about, problem, unit):
    """The lines above a table; `about` has date, commit and command."""
    commit = f"commit {about['commit']}" if about.get("commit") else "commit not recorded"
    text = fill(f"{where}, {about['date']}, {commit}: {problem}. {unit}")
    return f"{text}\n\n    {about['command']}"


def gpu_of(about):
    return f"{about['gpu'].split(',')[0]}, driver {about['driver']}"


# ------------------------------------------------------------------------------------------------------------ nsa bench


class Bench:
    """A result of `nsa bench`, by operation, variant and length."""

    def __init__(self, name):
        self.all = read(name)
        self.settings, self.machine = self.all["settings"], self.all["machine"]
        self.phi = self.settings["phi"]

    def results(self, op, variant, part_of=""):
        key = (op, variant, part_of)
        return {
            r["length"]: r
            for r in self.all["results"]
            if (r["op"], r["variant"], r.get("part_of", "")) == key and not r["extrapolated"]
        }

    def times(self, op, variant):
        """Milliseconds by length."""
        return {length: 1e3 * r["seconds"] for length, r in self.results(op, variant).items()}

    def problem(self):
        s = self.settings
        dims = f"D = {s['head_dim']}" if s["head_dim"] == s["v_head_dim"] else f"{s['head_dim']}/{s['v_head_dim']}"
        return f"B = 1, H = {s['num_heads']}, Hkv = {s['num_kv_heads']}, {dims}, {s['dtype']}"


RIVALS = {"dense": "torch's dense attention", "plain": "causal attention on our own kernels"}


def crossovers(bench, rivals=("dense",)):
    sentences = []
    for rival in rivals:
        for pass_name, title in PASSES.items():
            lengths = sorted(bench.times(pass_name, bench.phi))
            found = (bench.all["crossover"].get(pass_name) or {}).get(rival)
            if found is None:
                where = "at no measured length"
            elif found <= lengths[0]:
                where = f"at every measured length, from {lengths[0]} tokens on"
            else:
                where = f"from {round(found, -2):.0f} tokens on (interpolated)"
            sentences.append(f"{title.capitalize()}, NSA is faster than {RIVALS[rival]} {where}.")
    return fill(" ".join(sentences))


def gpu_times(bench):
    """The whole by length, beside dense attention and the fastest other implementation."""
    phis = [bench.phi] + [phi for phi in ("mlp", "linear", "mean") if phi != bench.phi and bench.times("forward", phi)]
    peers = any(r.get("peer") for pass_name in PASSES for r in bench.results(pass_name, bench.phi).values())
    rows = [
        ["", "length", *(f"NSA, φ = {phi}" for phi in phis), *DENSE.values(), "other NSA", "cuDNN / NSA", "other / NSA"]
    ]
    for pass_name, title in PASSES.items():
        dense = {form: bench.times(f"dense_{pass_name}", form) for form in DENSE}
        for length, r in bench.results(pass_name, bench.phi).items():
            nsa, peer = 1e3 * r["seconds"], 1e3 * r["peer_s"] if r.get("peer") else None
            row = [title, str(length), *(figure(bench.times(pass_name, phi).get(length)) for phi in phis)]
            row += [figure(dense[form].get(length)) for form in DENSE]
            row += [f"{figure(peer)} ({r['peer']})" if peer else ""]
            rows.append([*row, ratio(dense["cudnn"].get(length), nsa), ratio(peer, nsa)])
    return table(rows if peers else [[*row[:-3], row[-2]] for row in rows])


def gpu_whole():
    bench = Bench("bench_cuda.json")
    given, rates = bench.settings["selection"], bench.all["rates"]
    attends = (
        "the blocks that it chooses" if given == "own" else f"given {given} blocks, while its own choice still runs"
    )
    yield "## The whole on a GPU, beside dense attention"
    yield "![attention time over context length on a GPU, with the stages of NSA](images/cuda_time.png)"
    unit = (
        "Medians in ms, the second-level cache flushed before each call. NSA is everything, compression included, and "
        f"attends to {attends}. Dense attention is torch's; the other NSA is the fastest public implementation of "
        f"`bench/peers.py`. Limits, both measured: {limits(rates)}."
    )
    about = {key: bench.all[key] for key in ("date", "commit", "command")}
    yield source(gpu_of(bench.machine), about, f"{bench.problem()}, defaults", unit)
    yield gpu_times(bench)
    yield crossovers(bench)
    yield "### Its stages"
    for pass_name, title in PASSES.items():
        length = 65536
        rows = [[f"{title}, {length} tokens", "ms", "TFLOP", "GB", "share of the limit", "other NSA"]]
        whole = bench.results(pass_name, bench.phi)[length]
        stages = [r for r in bench.all["results"] if r.get("part_of") == pass_name and r["length"] == length]
        stages = [r for r in stages if r["variant"] == bench.phi]
        for r in [*stages, whole]:
            peer = f"{figure(1e3 * r['peer_s'])} ({r['peer']})" if r.get("peer") else ""
            name = "**whole**" if r is whole else r["op"].replace("_", " ")
            work = [f"{r['gflop'] / 1e3:.2f}", f"{r['bytes'] / 1e9:.2f}", f"{r['share']:.0%}"]
            rows.append([name, figure(1e3 * r["seconds"]), *work, peer])
        yield table(rows)


def limits(rates):
    products, copies = rates["gflops"] / 1e3, rates["bytes_per_s"] / 1e12
    return f"{products:.0f} TFLOP/s (product of large matrices), {copies:.2f} TB/s (copy)"


def gpu_h100():
    bench = Bench("bench_h100.json")
    yield "### On an H100"
    about = {key: bench.all[key] for key in ("date", "commit", "command")}
    unit = f"The same on another GPU; its limits: {limits(bench.all['rates'])}."
    yield source(gpu_of(bench.machine), about, f"{bench.problem()}, defaults", unit)
    yield gpu_times(bench)
    yield crossovers(bench)


def beside_earlier():
    """An earlier build and today's in turn: the passes, what one pass is more than the other, and the stages."""
    found = read("beside_64ed625.json")
    before, runs = found["before"], found["runs"]
    yield "## Beside an earlier build"
    yield fill(
        f"{gpu_of(found)}, {found['date']}: B = 1, H = 64, D = 128, bfloat16, defaults, φ = mean; {before} and the "
        "commit named above each table in turn in one run. Milliseconds of both, and the ratio: medians over the turns "
        "of medians, the second-level cache flushed before each call. What was wanted, what limits and what did not "
        "help: the [log](log/sm90.md#beside-64ed625-again)."
    )

    def cell(pair):
        return f"{figure(1e3 * pair[0])} → {figure(1e3 * pair[1])} ({pair[1] / pair[0]:.3f})" if pair else ""

    def times(run, part_of):
        return {
            (r["op"], r["length"]): (r["before_s"], r["after_s"]) for r in run["results"] if r["part_of"] == part_of
        }

    def passes(columns):
        """Rows of columns, each a run's passes and a length."""
        rows = [[title, *(cell(whole.get((op, n))) for whole, n in columns)] for op, title in PASSES.items()]
        both = [(whole.get(("forward", n)), whole.get(("forward_backward", n))) for whole, n in columns]
        differences = [cell([b - f for f, b in zip(*pair, strict=True)]) if pair[1] else "" for pair in both]
        return [*rows, ["backward: the difference", *differences]]

    whole = [run for run in runs if "--no-parts" in run["command"]]
    yield f"Commit {whole[0]['after']}, random blocks, {whole[0]['turns']} turns ({whole[-1]['turns']} beyond 65536):"
    yield "\n".join(f"    {run['command']}" for run in whole)
    columns = [(times(run, ""), n) for run in whole for n in sorted({r["length"] for r in run["results"]})]
    yield table([["", *(str(n) for _, n in columns)], *passes(columns)])

    staged = [run for run in runs if run not in whole]
    yield f"Commit {staged[0]['after']}, {staged[0]['turns']} turns (one with G = 4); stages of forward and backward:"
    yield "\n".join(f"    {run['command']}" for run in staged)
    columns = [(run, n) for n in (8192, 65536) for run in staged if any(r["length"] == n for r in run["results"])]
    heads = {4: "", 16: ", G = 4"}
    rows = [["", *(f"{n}, {run['selection']}{heads[run['kv_heads']]}" for run, n in columns)]]
    rows += passes([(times(run, ""), n) for run, n in columns])
    stages = [(times(run, "forward_backward"), n) for run, n in columns]
    for op in dict.fromkeys(op for op, _ in stages[0][0]):
        rows.append([op.replace("_", " "), *(cell(found.get((op, n))) for found, n in stages)])
    yield table(rows)


def cpu_whole():
    yield "## The whole on a CPU, beside dense attention"
    yield "![attention time over context length on a CPU](images/attention_time.png)"
    yield fill(
        "Seconds, the best of several; everything included, compression by the mean. Dense is torch's "
        "`scaled_dot_product_attention` with the same threads, the faster of expanded K/V and `enable_gqa`. Plain is "
        "causal attention on our own kernels, so its ratio is the gain of the method alone. \\* extrapolated as the "
        "square of the length."
    )
    for name in ("bench_bfloat16.json", "bench_float32.json"):
        bench = Bench(name)
        machine = bench.machine
        where = f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}"
        yield source(where, bench.all, f"{bench.problem()}, defaults", "")
        rows = [["", "length", "NSA", "dense", "dense / NSA", "plain", "plain / NSA"]]
        for r in sorted(bench.all["ratios"], key=lambda r: r["pass"] != "forward"):
            mark = " *" if r["extrapolated"] else ""
            row = [PASSES[r["pass"]], str(r["length"]), seconds(r["seconds"])]
            for kind in ("dense", "plain"):
                row += [seconds(r[f"{kind}_seconds"]) + mark, f"{r[f'over_{kind}']:.1f}"]
            rows.append(row)
        yield table(rows)
        yield crossovers(bench, RIVALS)


def cpu_operations():
    yield "### Operations alone on a CPU"
    benches = [Bench("bench_bfloat16.json"), Bench("bench_float32.json")]
    length = 16384
    yield fill(
        f"From the same runs, at {length} tokens. GF/s counts the products of the operation (see "
        "[measuring](guide/measuring.md#what-is-counted)); peak is the share of what the registers can do, measured "
        "right after each result."
    )
    rows = [["", *(f"{b.settings['dtype']}, {what}" for b in benches for what in ("ms", "GF/s", "peak"))]]
    for r in benches[0].all["results"]:
        if r["length"] != length or r["op"].startswith("dense") or r["extrapolated"]:
            continue
        row = [" ".join(filter(None, (r["op"].replace("_", " "), r["variant"])))]
        for bench in benches:
            same = bench.results(r["op"], r["variant"]).get(length)
            if same:
                share = f"{same['gflops'] / same['peak_gflops']:.0%}"
                row += [figure(1e3 * same["seconds"]), f"{same['gflops']:.0f}", share]
            else:
                row += ["", "", ""]
        rows.append(row)
    yield table(rows)


# ---------------------------------------------------------------------------------------------------- bench/peers.py

NAMES = {"nsa": "this", "xunhaolai": "XunhaoLai", "flash_nsa": "flash_nsa"}
NAMES |= {"cudnn": "dense: cuDNN", "flash2": "dense: FlashAttention-2"}


def peers_about(result):
    commits = ", ".join(f"{NAMES.get(name, name)} {commit}" for name, commit in result["commits"].items())
    versions = f"torch {result['torch']}, triton {result['triton']}, {commits}"
    unit = f"Forward / backward in ms, medians, taking turns ({versions})."
    about = {"date": result["date"], "commit": result["commits"]["nsa"], "command": result["command"]}
    return source(gpu_of(result), about, result["problem"], unit)


def peers_table(result, wanted):
    """A row per length and stage whose name `wanted` accepts."""
    stages = [(length, name, found) for length, of in result["lengths"].items() for name, found in of["stages"].items()]
    stages = [(length, name, found) for length, name, found in stages if wanted(length, name)]
    shown = [name for name in NAMES if any(name in found for _, _, found in stages)]
    rows = [["length", "stage", *(NAMES[name] for name in shown)]]
    rows += [[length, name, *(pair(found.get(one)) for one in shown)] for length, name, found in stages]
    return table(rows)


def whole_or_dense(_, name):
    return name.startswith(("whole", "dense"))


def peers():
    result = read("peers.json")
    yield "## Beside other implementations of NSA"
    yield peers_about(result)
    yield table_with_dense(result)
    yield fill(
        "Stage by stage, each as a call of its own. In our whole the choice of blocks is part of the compressed "
        "attention and the gated sum part of the window's, so the whole takes less than the sum of these."
    )
    yield peers_table(result, lambda length, name: length == "65536" and not whole_or_dense(length, name))
    wide = read("peers_192.json")
    yield "Keys of 192 channels, values of 128:"
    yield peers_about(wide)
    yield table_with_dense(wide)


def table_with_dense(result):
    return peers_table(result, whole_or_dense)


# ---------------------------------------------------------------------------------------------------------- cuda_stages


PROBLEM = "B = 1, H = 64, Hkv = 4, bfloat16, φ = mlp, defaults"


def stage_runs(name):
    """A text of bench/cuda_stages.cu: (heading, {length: {stage: (ms, MiB)}}) for each run in it."""
    runs = []
    for line in (RESULTS / name).read_text(encoding="utf-8").splitlines():
        if re.match(r"(\w+=\S+ )*cuda_stages ", line):
            runs.append((line, {}))
        elif found := re.match(r"S = (\d+)", line):
            now = runs[-1][1].setdefault(int(found[1]), {})
        elif found := re.match(r"  (.+?) +([0-9.]+) ms +workspace +([0-9.]+) MiB", line):
            now[found[1]] = float(found[2]), float(found[3])
    return runs


def operations_alone(name):
    for heading, lengths in stage_runs(name):
        command, about = heading.split(": ", 1)
        yield f"{about}: {PROBLEM}. Medians in ms, in brackets the workspace in MiB.\n\n    {command}"
        stages = list(next(iter(lengths.values())))
        rows = [["ms (MiB)", *map(str, lengths)]]
        for stage in stages:
            found = [lengths[length].get(stage) for length in lengths]
            rows.append([stage, *(f"{figure(f[0])} ({f[1]:.0f})" if f else "" for f in found)])
        yield table(rows)


def operations():
    yield "## Operations alone on a GPU"
    yield from operations_alone("cuda_stages.txt")
    yield "### Groups of query heads"
    yield from groups()
    yield "### Blocks of 128 tokens"
    yield from minimax()


def groups():
    """The whole by number of KV heads, a row for each run of cuda_stages_groups.txt."""
    runs = stage_runs("cuda_stages_groups.txt")
    commands = "\n".join(f"    {heading.split(': ', 1)[0]}" for heading, _ in runs)
    about = runs[0][0].split(": ", 1)[1]
    problem = (
        "B = 1, H = 64, values of 128, bfloat16, defaults, `nsa_attention` without compression. Medians in ms with "
        "given blocks, random / clustered; G query heads share a KV head. In brackets the workspace in MiB."
    )
    yield fill(f"{about}: {problem}") + f"\n\n{commands}"
    lengths = sorted({length for _, found in runs for length in found})
    names = {"forward": "nsa_attention", "backward": "nsa_attention backward"}
    rows = [["", *(f"{title}, {length}" for title in names for length in lengths)]]
    for heading, found in runs:
        kv_heads = re.search(r"--kv-heads (\d+)", heading)
        row = [f"G = {64 // int(kv_heads[1] if kv_heads else 4)}"]
        if wide := re.search(r"--key-dim (\d+)", heading):
            row[0] += f", keys of {wide[1]}"
        for name in names.values():
            for length in lengths:
                both = [found.get(length, {}).get(f"{name}, {blocks}") for blocks in ("random", "clustered")]
                row.append(f"{' / '.join(figure(b[0]) for b in both)} ({both[0][1]:.0f})" if all(both) else "")
        rows.append(row)
    yield table(rows)


def minimax():
    bench = Bench("bench_minimax_m3.json")
    s = bench.settings
    unit = (
        "`selected_attention` as MiniMax-M3 calls it. Medians in ms, in brackets the share of the limit: "
        f"{limits(bench.all['rates'])}."
    )
    yield source(
        gpu_of(bench.machine),
        {key: bench.all[key] for key in ("date", "commit", "command")},
        f"{bench.problem()}, {s['topk']} {s['selection']} blocks of {s['block_size']}",
        unit,
    )
    passes = {
        title: bench.results(f"selected_attention{end}", "")
        for title, end in (("forward", ""), ("backward", "_backward"))
    }
    lengths = list(passes["forward"])
    rows = [["", *map(str, lengths)]]
    for title, found in passes.items():
        rows.append([title, *(f"{figure(1e3 * found[n]['seconds'])} ({found[n]['share']:.0%})" for n in lengths)])
    yield table(rows)


def through_python():
    result = read("through_python.json")
    yield "## Through Python beside C++"
    unit = (
        f"`nsa.nsa_attention` and its gradients (torch {result['torch']}) beside the same in C++ (`cuda_stages`), "
        "forward / backward / both in ms. Busy: the device has other work when the call is made, so that no time of "
        "the host counts. Idle: it has none, and the host's time until the first launch counts; in C++ that of the "
        "backward, too, which is a call of its own there. Medians, taking turns, the second-level cache flushed."
    )
    yield source(gpu_of(result), result, result["problem"], unit)
    rows = [["length", "the device is", "C++", "Python", "Python / C++, both"]]
    for length, ways in result["lengths"].items():
        for way, found in ways.items():
            cells = (" / ".join(figure(ms) for ms in found[who]) for who in ("cpp", "python"))
            rows.append([length, way, *cells, f"{found['ratio']:.3f}"])
    yield table(rows)


def portable():
    yield "## The portable CUDA kernels"
    yield "What GPUs other than Hopper run, measured on an H200 with `NSA_CUDA_KERNELS=portable`."
    yield from operations_alone("cuda_stages_portable.txt")
    result = read("peers_portable.json")
    yield peers_about(result)
    yield peers_table(result, lambda _, name: True)


# ----------------------------------------------------------------------------------------------------- decode, training


def decode():
    result = read("decode.json")
    stages = cuda_decode_stages(result)
    whole = stages["decode"]
    about = {"date": result["date"], "commit": result["commit"], "command": result["command"]}
    yield "## Decode steps"
    unit = (
        f"Microseconds of one step at {whole['context']} tokens of context, replays of a graph while lengths grow, the "
        "second-level cache flushed before each: median, mean and worst of 48, of which some complete compression "
        "blocks; warm: without flushing; chained: one of 32 steps in a graph, each with a cache of its own. Beside "
        "them the time of a copy of the bytes that the step has to read, and of those that dense attention would have "
        "to read."
    )
    yield source(gpu_of(result), about, whole["problem"], unit)
    yield "What the time goes to, and what it was before: the [log](log/decoding.md)."
    names = {"median": "median", "mean": "mean", "worst": "worst", "warm": "warm", "layer": "chained"}
    names |= {"floor": "its bytes", "dense_floor": "dense attention's bytes"}
    layers = {times["batch"]: times["layer"] for times in stages["decode_layers"]["steps"]}
    rows = [["sequences", *names.values(), "kernels", "workspace, MiB"]]
    for times in whole["steps"]:
        times |= {"layer": layers.get(times["batch"])}
        cells = ("" if times[name] is None else f"{times[name]:.0f}" for name in names)
        rows.append([str(times["batch"]), *cells, str(times["launches"]), f"{times['workspace_mib']:.1f}"])
    yield table(rows)
    names = {"median": "median", "mean": "mean", "floor": "its bytes", "dense_floor": "dense attention's bytes"}
    rows = [["context", "sequences", "new tokens", "blocks", *names.values()]]
    for found in stages.values():
        if found["layers"] or found is whole:
            continue
        context = f"1024 … {2 * found['context']}" if found["ragged"] else found["context"]
        for times in found["steps"]:
            cells = (f"{times[name]:.0f}" for name in names)
            rows.append([str(context), str(times["batch"]), str(times["new"]), found["selection"], *cells])
    yield "Other lengths, several new tokens at once, and sequences of different lengths:"
    yield table(rows)
    results = [read(name) for name in ("decode.json", "decode_h100.json")]
    for stage, text in (("decode_dense", decode_beside_dense), ("generate_speed", generate_speed)):
        if found := [result for result in results if stage in result["stages"]]:
            yield from text(found[0])


def decode_beside_dense(result):
    dense = result["stages"]["decode_dense"]
    yield "### Beside dense attention"
    unit = (
        "Microseconds of one step of one token, NSA as above and dense attention: the fastest of cuDNN over all keys, "
        "cuDNN over 4, 16 or 64 splits of them, and FlashAttention-2 with lengths on the device "
        "(`bench/dense_decode.py`). None copies keys for the heads of a group."
    )
    yield source(gpu_of(result), result, dense["result"]["problem"], unit)
    ours = {which: step["median"] for which, step in steps_of_one_token(result).items()}
    theirs = {(step["batch"], step["context"]): step["us"][step["best"]] for step in dense["result"]["steps"]}
    yield compared(ours, theirs, ("NSA", "dense", "dense / NSA"), lambda nsa, full: full / nsa)
    yield from noted(dense)
    yield "![time of a decode step over the context, NSA, dense attention and their bytes](images/decode_time.png)"


def generate_speed(result):
    stage = result["stages"]["generate_speed"]
    yield "### Generating"
    unit = (
        "Tokens/s of `nsa generate`, all sequences together, behind prompts of these lengths. A step is one CUDA graph "
        "with either attention; full attention is torch's FlashAttention-2."
    )
    yield source(
        gpu_of(result),
        {**result, "command": stage["command"].replace("; ", "\n    ")},
        stage["result"]["problem"],
        unit,
    )
    nsa, full = (
        {(s["batch"], s["context"]): s["tokens_per_second"] for s in stage["result"]["steps"] if s["attention"] == name}
        for name in ("nsa", "full")
    )
    yield compared(nsa, full, ("NSA", "full attention", "NSA / full"), lambda nsa, full: nsa / full)
    yield from noted(stage)
    yield "![tokens per second of generating over the context](images/generate_speed.png)"


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


def noted(stage):
    """What is odd about a stage's figures."""
    if "note" in stage:
        yield fill(stage["note"])


def training():
    yield "## Training"
    for name, model in (
        ("training_speed.json", "A model of 300 million parameters"),
        ("loss_curves.json", "The default model of a GPU with `--preset paper`"),
    ):
        result = read(name)
        unit = "Thousand tokens/s by tokens of context; in brackets the TFLOP/s that the model needs (`model_tflops`)."
        yield source(gpu_of(result), result, model, unit)
        speed = result["speed"]
        models = sorted({model for rates in speed.values() for model in rates}, key=lambda m: (m != "nsa", m))
        rows = [["", *speed]]
        for model in models:
            rates = [speed[context].get(model) for context in speed]
            cells = (f"{r['tokens_per_second'] / 1e3:.3g} ({r['model_tflops']:.0f})" if r else "" for r in rates)
            rows.append([model.replace("-", " "), *cells])
        yield table(rows)
    rows = [["", "parameters", "tokens", "held-out loss, nats per byte"]]
    for model, run in result["runs"].items():
        cells = [f"{run['parameters'] / 1e6:.1f} million", f"{run['tokens'] / 1e6:.0f} million", f"{run['loss']:.3f}"]
        rows.append([model, *cells])
    yield f"After {result['minutes']:.0f} minutes of training at {result['context']} bytes of context:"
    yield table(rows)
    yield "![held-out loss over tokens and over time](images/loss_curves.png)"
    yield "![tokens per second over the context, 300 million parameters](images/training_speed.png)"


# ------------------------------------------------------------------------------------------------------ bench/llama.py

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


SECTIONS = [
    gpu_whole,
    gpu_h100,
    beside_earlier,
    peers,
    operations,
    through_python,
    decode,
    training,
    llama,
    portable,
    cpu_whole,
    cpu_operations,
]


def ratios():
    """How many times as long as NSA the others take, at a few lengths."""
    lengths = (4096, 8192, 16384, 32768, 65536, 131072)
    bench = Bench("bench_cuda.json")
    rows = [["time of the others over ours, by tokens", *map(str, lengths)]]
    for pass_name, title in PASSES.items():
        whole, dense = bench.results(pass_name, bench.phi), bench.times(f"dense_{pass_name}", "cudnn")
        ours = {length: 1e3 * r["seconds"] for length, r in whole.items()}
        peer = {length: 1e3 * r["peer_s"] for length, r in whole.items() if r.get("peer")}
        for name, other in (("dense attention, cuDNN", dense), ("fastest other NSA", peer)):
            cells = (f"{other[n] / ours[n]:.1f}" if n in other and n in ours else "" for n in lengths)
            rows.append([f"H200, {title}: {name}", *cells])
    cpu = Bench("bench_bfloat16.json")
    for pass_name, title in PASSES.items():
        found = {r["length"]: r for r in cpu.all["ratios"] if r["pass"] == pass_name}
        cells = (
            f"{found[n]['over_dense']:.1f}" + "*" * found[n]["extrapolated"] if n in found else "" for n in lengths
        )
        rows.append([f"CPU, 2 threads, {title}: dense attention, torch", *cells])
    note = "GPU: 64 query heads, 4 KV heads. CPU: 16 and 1. All: 128 channels, bfloat16, the paper's parameters."
    return f"{table(rows)}\n\n{note} \\* extrapolated."


def update(path, text, check):
    """Writes the file, or says that it is not up to date; whether it was."""
    current = path.exists() and path.read_text(encoding="utf-8") == text
    if check and not current:
        print(
            f"{path.relative_to(ROOT)}: not what tools/performance.py makes of bench/results: run it", file=sys.stderr
        )
    elif not check:
        path.write_text(text, encoding="utf-8")
    return current


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check
    page = "\n\n".join([INTRODUCTION.strip(), *(block for section in SECTIONS for block in section())]) + "\n"
    before, rest = README.read_text(encoding="utf-8").split(MARKS[0])
    readme = f"{before}{MARKS[0]}\n{ratios()}\n{MARKS[1]}{rest.split(MARKS[1])[1]}"
    current = [update(PAGE, page, check), update(README, readme, check)]
    return 0 if all(current) or not check else 1


if __name__ == "__main__":
    sys.exit(main())
