#!/usr/bin/env python3
"""Writes docs/performance.md, and the speed table of README.md, from the files in bench/results.

With --check it writes nothing; the exit code is 1 where a text is not what the files make. Every file there is read by
tools/tables, and names what was measured, where, when and by which command.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evidence.plans import RECIPE

from tables.bench import PASSES, Bench
from tables.decoding import decode
from tables.end_to_end import cpu_end_to_end, cpu_operations, gpu_end_to_end, gpu_h100, gpu_recipe
from tables.llama import llama
from tables.llama_cpp import llama_cpp
from tables.operations import operations, portable, through_python
from tables.peers import dense_backward, peers
from tables.text import ROOT, fill, table

PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
SPEED = ROOT / "evidence" / "results" / "speed.jsonl"
MARKS = "<!-- speed: written by tools/performance.py -->", "<!-- end of speed -->"
INTRODUCTION = """\
<!-- Written by tools/performance.py from bench/results. Do not edit. -->
# Performance

Every table names its hardware, date, commit and command. [Measuring](guide/measuring.md) describes what is counted, how
it is timed, and how to update the tables. It also defines [model-like, random and clustered
blocks](guide/measuring.md#selections). Unless a table says otherwise, NSA has the paper's hyperparameters. Speed and
quality of trained models: [evidence](evidence.md). Single experiments: [findings](findings/README.md).
"""

SECTIONS = [
    gpu_end_to_end,
    gpu_recipe,
    gpu_h100,
    peers,
    dense_backward,
    operations,
    through_python,
    decode,
    llama,
    portable,
    cpu_end_to_end,
    cpu_operations,
    llama_cpp,
]


def ratios():
    """Speedup of NSA at a few lengths: the recipe's training step, then attention with the paper's hyperparameters."""
    lengths = (4096, 8192, 16384, 32768, 65536, 131072)
    rows = [["speedup, by sequence length", "setting", *map(str, lengths)]]
    rows.append(["H200, training step, over full attention", *training(lengths)])
    bench = Bench("bench_cuda.json")
    for runs in ([Bench("bench_recipe.json"), Bench("bench_recipe_stride_16.json")], [bench]):
        for pass_name, title in PASSES.items():
            cells = (" / ".join(run.over_dense(pass_name, n, 1) for run in runs) for n in lengths)
            settings = " / ".join(run.setting() for run in runs)
            rows.append([f"H200, {title}, over the fastest dense attention", settings, *cells])
            found = runs[-1].results(pass_name, runs[-1].phi)
            over_peer = {n: r["peer_s"] / r["seconds"] for n, r in found.items() if r.get("peer")}
            if over_peer:
                cells = (f"{over_peer[n]:.1f}" if n in over_peer else "" for n in lengths)
                rows.append([f"H200, {title}, over the fastest other NSA implementation", settings, *cells])
    cpus = [Bench(f"bench_bfloat16{kind}.json") for kind in ("", "_zen4", "_xeon", "_xeon_no_amx")]
    processors = " / ".join(cpu.machine["processor"] for cpu in cpus)
    for pass_name, title in PASSES.items():
        cells = [" / ".join(filter(None, (over_torch(cpu, pass_name, n) for cpu in cpus))) for n in lengths]
        rows.append([f"CPU (2 threads, {processors}), {title}, over dense attention (torch)", "paper", *cells])
    note = (
        "Recipe, stride 16: of [nsa train](docs/guide/training.md#recipe-or-paper). Below the first row: attention "
        f"alone, bfloat16, {bench.blocks().split(' (')[0]} on the GPU. \\* Extrapolated. "
        "[Details](docs/performance.md)."
    )
    return f"{table(rows)}\n\n{fill(note)}"


def over_torch(bench, pass_name, length):
    """Speedup on a CPU, with a star where the time of dense attention is extrapolated."""
    for r in bench.all["ratios"]:
        if (r["pass"], r["length"]) == (pass_name, length):
            return f"{r['over_dense']:.1f}" + "*" * r["extrapolated"]
    return ""


def training(lengths):
    """The newest recipe that has one, and the speedup of its training step at the context it was measured at."""
    shared, *runs = map(json.loads, SPEED.read_text(encoding="utf-8").splitlines())
    speed = {run["model"]: run["tokens_per_second"] for run in runs}
    model = max(name for name in speed if name.startswith("recipe-") and name.count("-") == 1)
    ratio = speed[model] / speed["full"]
    cells = [f"{ratio:.1f}" if length == shared["context"] else "" for length in lengths]
    return ["recipe" if model == RECIPE else model, *cells]


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


def has_the_recipe():
    """Whether the file for the recipe has its blocks; else a message."""
    if (setting := Bench("bench_recipe.json").setting()) == "recipe":
        return True
    print(f"bench_recipe.json: blocks of {setting}: must be the recipe's: run tools/gpu.sh bench", file=sys.stderr)
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check
    page = "\n\n".join([INTRODUCTION.strip(), *(block for section in SECTIONS for block in section())]) + "\n"
    before, rest = README.read_text(encoding="utf-8").split(MARKS[0])
    readme = f"{before}{MARKS[0]}\n{ratios()}\n{MARKS[1]}{rest.split(MARKS[1])[1]}"
    current = [update(PAGE, page, check), update(README, readme, check)]
    current.append(has_the_recipe())
    return 0 if all(current) or not check else 1


if __name__ == "__main__":
    sys.exit(main())
