"""Single operations on a GPU: bench/gpu/cuda_stages.cu, and calls through Python."""

import re

from tables.bench import Bench, limits
from tables.peers import peers_about, peers_table, whole_or_dense
from tables.text import RESULTS, figure, fill, gpu_of, read, source, table

PROBLEM = "B=1, H=64, Hkv=4, bfloat16, φ = mlp, defaults"


def stage_runs(kind):
    """(heading, {length: {stage: (ms, MiB)}}) of bench/gpu/cuda_stages.cu, for each run of a kind in its results.

    `kind`: "portable" kernels, "groups" of heads (one operation, with --kv-heads), or "" for the others.
    """
    runs = []
    for line in (RESULTS / "cuda_stages.txt").read_text(encoding="utf-8").splitlines():
        if re.match(r"(\w+=\S+ )*cuda_stages ", line):
            runs.append((line, {}))
        elif found := re.match(r"S = (\d+)", line):
            now = runs[-1][1].setdefault(int(found[1]), {})
        elif found := re.match(r"  (.+?) +([0-9.]+) ms +workspace +([0-9.]+) MiB", line):
            now[found[1]] = float(found[2]), float(found[3])
    kinds = {"NSA_CUDA_KERNELS=portable": "portable", "--kv-heads": "groups"}
    return [run for run in runs if next((k for mark, k in kinds.items() if mark in run[0]), "") == kind]


def operations_alone(kind):
    for heading, lengths in stage_runs(kind):
        command, about = heading.split(": ", 1)
        yield fill(f"{about}: {PROBLEM}. Medians in ms, in brackets the workspace in MiB.") + f"\n\n    {command}"
        stages = list(next(iter(lengths.values())))
        stages = [stage for stage in stages if "backward, clust" not in stage]  # the random ones take about as long
        if "--key-dim" in command:  # end to end alone; the file has the rest
            stages = [stage for stage in stages if stage.startswith("nsa_attention")]
        rows = [["ms (MiB)", *map(str, lengths)]]
        for stage in stages:
            found = [lengths[length].get(stage) for length in lengths]
            rows.append([stage, *(f"{figure(f[0])} ({f[1]:.0f})" if f else "" for f in found)])
        yield table(rows)


def operations():
    yield "## Single operations on a GPU"
    yield from operations_alone("")
    yield "### Groups of query heads"
    yield from groups()
    yield "### Blocks of 128 tokens"
    yield from minimax()


def groups():
    """`nsa_attention` by number of KV heads, a row for each run."""
    runs = stage_runs("groups")
    commands = "\n".join(f"    {heading.split(': ', 1)[0]}" for heading, _ in runs)
    about = runs[0][0].split(": ", 1)[1]
    stages = {stage for _, found in runs for rows in found.values() for stage in rows}
    patterns = [p for p in ("random", "clustered", "model-like") if f"nsa_attention, {p}" in stages]
    problem = (
        "B=1, H=64, D=128, bfloat16, defaults, `nsa_attention` without compression. Medians in ms with given "
        f"blocks, {' / '.join(patterns)}. G query heads share a KV head. In brackets the workspace in MiB."
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
                both = [found.get(length, {}).get(f"{name}, {blocks}") for blocks in patterns]
                row.append(f"{' / '.join(figure(b[0]) for b in both)} ({both[0][1]:.0f})" if all(both) else "")
        rows.append(row)
    yield table(rows)


def minimax():
    bench = Bench("bench_minimax_m3.json")
    s = bench.settings
    unit = (
        "`selected_attention` with the shapes of MiniMax-M3. Medians in ms, in brackets the share of the limit: "
        f"{limits(bench.all['rates'])}."
    )
    yield source(
        gpu_of(bench.machine),
        {key: bench.all[key] for key in ("date", "commit", "command")},
        f"{bench.problem()}, {s['topk']} of {s['block_size']} tokens",
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
    yield "## Python against C++"
    unit = (
        f"`nsa.nsa_attention` and its gradients (torch {result['torch']}) and the same in C++ (`cuda_stages`), forward "
        "/ backward / both in ms. Busy: the device has other work at the call, so no host time counts. Idle: the "
        "host's time until the first launch counts. In C++ the backward is a call of its own. Medians of alternating "
        "calls, L2 flushed."
    )
    yield source(gpu_of(result), result, result["problem"], unit)
    rows = [["length", "device", "C++", "Python", "Python / C++, both"]]
    for length, ways in result["lengths"].items():
        for way, found in ways.items():
            cells = (" / ".join(figure(ms) for ms in found[who]) for who in ("cpp", "python"))
            rows.append([length, way, *cells, f"{found['ratio']:.3f}"])
    yield table(rows)


def portable():
    yield "## Portable CUDA kernels"
    yield "GPUs other than Hopper run these. Measured on an H200 with `NSA_CUDA_KERNELS=portable`."
    yield from operations_alone("portable")
    result = read("peers_portable.json")
    yield peers_about(result)
    yield peers_table(result, lambda length, name: length == "65536" or whole_or_dense(length, name))
