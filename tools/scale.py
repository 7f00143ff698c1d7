#!/usr/bin/env python3
"""Writes the end of docs/guide/scale.md, and its picture, from bench/results: what several GPUs were measured at, what
more of them are predicted to take, and what has not run.

    tools/scale.py [--check] [--results FOLDER] [--page FILE]

Reads bench_random.json and simulated_ranks.json (one GPU) and scale_xN.json of `tools/gpu.sh scale` (N GPUs), as many
as there are. With --check it writes nothing; the exit code is 1 where the page is not what the results make.
"""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "bench/scale")]

from scale_model import RESULTS, Fabric, Measured, Model, error_table  # noqa: E402
from tables.text import fill, gpu_of, table  # noqa: E402

MARK = "<!-- From here on written by tools/scale.py from bench/results. -->\n"
TOKENS, GPUS = 2**20, [2**i for i in range(1, 11)]
SHOWN = (65536, TOKENS)  # lengths whose errors have lines of their own
# Latency and bandwidth where nothing was measured.
WITHIN, BEYOND = "NVLink:4:350:8", "network:10:45"
PROBLEM = "batch 1, 64 query heads, 4 KV heads of 128, bfloat16, φ mean, one set of keys and values"
HOW = f"""\
Attention of one layer: {PROBLEM}.
A row is the median of five calls on the slowest rank, or of as many as three seconds allow.

- Exposed: share of forward and backward beyond the rank's attention calls alone, which are timed in the same run with
  all keys in place. It includes collectives, compression, copies and sums.
- Waited: time that the device waits in collectives, the slower rank included.
- Efficiency: time of one GPU of the same run over P times that of P GPUs.
- Peak: memory that torch allocated on a rank, inputs, dO and results included.
- Exposed and efficiency use the rank whose forward plus backward takes longest. Where only separate times exist,
  they add the slowest forward and the slowest backward, which counts some waiting twice. Brackets add the two passes of
  each rank first.

"""

TESTS = {
    "parallel": "context parallelism",
    "parallel_training": "DDP, FSDP2, tensor parallelism",
    "train_bits": "`nsa train` against one process",
}


def shown(value, digits=1):
    return "" if value is None else f"{value:.{digits}f}"


def percent(value):
    return "" if value is None else f"{100 * value:.1f} %"


def both(times):
    """Milliseconds of forward and backward: of one rank, where that was recorded."""
    return times.get("both_ms", times["forward_ms"] + times["backward_ms"])


def rank_by_rank(times):
    """Time of the slowest rank, if the times of each rank were recorded."""
    passes = [times.get(f"{name}_ms_of_ranks") for name in ("forward", "backward")]
    return max(map(sum, zip(*passes, strict=True))) if all(passes) else both(times)


def attention_table(run):
    """Rows of context parallelism."""
    found = run.of("context_parallel")
    head = ["tokens", "layout", "KV heads at once", "forward, ms", "backward, ms", "backward, forward again, ms"]
    head += ["efficiency", "exposed", "waited, ms", "peak, GiB"]
    rows = [head]
    for row in found["rows"]:
        exposed, efficiency = [], []
        by_rank = "both_ms" not in row and "forward_ms_of_ranks" in row
        for time in (both, rank_by_rank) if by_rank else (both,):
            whole = time(row)
            if "attention_alone" in row:
                exposed.append(percent((whole - both(row["attention_alone"])) / whole))
            if "alone" in row:
                efficiency.append(shown(time(row["alone"]) / run.gpus / whole, 3))
        cells = [str(row["tokens"]), row["layout"], str(row["kv_heads_at_once"])]
        cells += [shown(row[name]) for name in ("forward_ms", "backward_ms")]
        cells += [shown(row.get("recomputed_backward_ms")), " (".join(efficiency) + ")" * (len(efficiency) > 1)]
        cells += [" (".join(exposed) + ")" * (len(exposed) > 1)]
        rows.append([*cells, shown(row.get("waited_ms")), shown(row.get("peak_gib"))])
    return table(rows)


def attention_checks(run):
    """Sentences on whether the results are right."""
    found, bits = run.of("context_parallel"), run.of("bits")
    said = []
    sampled = [row["sampled"] for row in found["rows"] if "sampled" in row]
    if sampled:
        worst = max(max(one["difference"].values()) for one in sampled)
        rows, differ = sum(one["rows"] for one in sampled), sum(one["blocks_differ"] for one in sampled)
        said.append(
            f"{rows} sampled queries, and the gradients of keys and values that they cause, differ from float64 by at "
            f"most {worst:.1e} of their norm. Of their blocks {differ} differ, by at most "
            f"{max(one['largest_gap'] for one in sampled):.1e} in importance."
        )
    differences = [max(row["vs_one_gpu"]["difference"].values()) for row in found["rows"] if "vs_one_gpu" in row]
    if differences:
        said.append(f"All results differ from one GPU's call by at most {max(differences):.1e} of their norm.")
    cases = {}
    for one in bits["rows"] if bits else ():
        equal = [name for name, same in one["as_one_rank"].items() if same]
        other = [name for name, same in one["as_one_rank"].items() if not same]
        outcome = (
            f"{'The same bits' if one['same_in_all_runs'] else 'Other bits'} in {one['runs']} runs of {one['tokens']} "
            f"tokens in {one['chunks']} chunks; as on one rank: {', '.join(equal) or 'nothing'}"
            f"{'; not ' + ', '.join(other) if other else ''}"
        )
        cases.setdefault(outcome, []).append(f"{one['layout']} {one['dtype']}")
    said += [f"{outcome} ({', '.join(found)})." for outcome, found in cases.items()]
    said += [f"{one['what']}: not run, {one['why']}." for one in found["not_run"]]
    return fill(" ".join(said))


def collectives_table(run):
    """GB/s by size."""
    found = run.of("collectives")["collectives"]
    names = list(dict.fromkeys(row["collective"] for row in found))
    rows = [["ranks", "MB received", *(f"{name}, GB/s" for name in names)]]
    for ranks, size in dict.fromkeys((row["ranks"], row["bytes"]) for row in found):
        speeds = {
            r["collective"]: size / r["seconds"] / 1e9 for r in found if (r["ranks"], r["bytes"]) == (ranks, size)
        }
        rows.append([str(ranks), f"{size / 1e6:.1f}", *(shown(speeds.get(name)) for name in names)])
    return table(rows)


def vs_one_gpu(one, all_of_them):
    """Compares a training on several GPUs with one GPU."""
    if one["steps"] != all_of_them["steps"]:
        return f"medians over {one['steps']} and {all_of_them['steps']} steps"
    if one["weights_sha256"] == all_of_them["weights_sha256"]:
        return f"equal weights after {one['steps']} steps"
    apart = max(abs(b / a - 1) for a, b in zip(one["losses"], all_of_them["losses"], strict=True))
    return f"different weights after {one['steps']} steps, losses within {apart:.1e}"


def training_lines(run):
    """Lines of `nsa train` and examples/train_long.py."""
    lines = []
    one, all_of_them = run.of("train_one"), run.of("train_all")
    if one and all_of_them:
        ratio = all_of_them["tokens_per_second"] / one["tokens_per_second"]
        lines.append(
            f"`nsa train`, {one['parameters'] / 1e6:.0f} million parameters, {one['context']} tokens a row, "
            f"{one['grad_accum']} rows a step on both. On one GPU {one['tokens_per_second']:,.0f} tokens/s, "
            f"{all_of_them['tokens_per_second']:,.0f} on {run.gpus}: efficiency {ratio / run.gpus:.3f}, "
            f"{vs_one_gpu(one, all_of_them)}."
        )
    for name in ("train_long_one", "train_long_all"):
        found = run.of(name)
        if found and found["tokens_per_second"]:
            losses = found["losses"]
            lines.append(
                f"`{run.stages[name]['command'].partition('examples/')[2].partition(' --out')[0]}` on "
                f"{1 if name.endswith('one') else run.gpus}: {found['tokens_per_second']:,.0f} tokens/s. "
                f"Nats per byte: {losses[0]:.3f} in step 1, {losses[-1]:.3f} in step {len(losses)}."
            )
    killed = run.of("killed")
    for one in killed["runs"] if killed else ():
        said = one["seconds_until_said"]
        told = "reported nothing" if said is None else f"reported it after {said:.1f} s"
        on = "completed the run" if one["resumed"] == 0 else "failed"
        lines.append(
            f"Rank {one['victim']} of {killed['ranks']} killed: another rank {told}, torchrun ended after "
            f"{one['seconds_until_torchrun_ended']:.1f} s; `--resume` {on}."
        )
    for name, what in TESTS.items():
        if tests := run.stages.get(name, {}).get("tests"):
            lines.append(
                f"Tests of {what} over NCCL: {tests['passed']} passed, {tests['failed']} failed, "
                f"{tests['skipped']} skipped."
            )
    lines += [f"{name}: {one['outcome']}." for name, one in run.stages.items() if one["outcome"] != "passed"]
    return "\n".join(fill(f"- {line}").replace("\n", "\n  ") for line in lines)


def measured_section(run):
    about = run.result
    title = f"### {run.name}\n\n"
    commit = f"commit {about['commit']}" if about["commit"] else "commit not recorded"
    text = title + fill(f"{gpu_of(about)}, {about['date']}, {commit}, `{about['command']}`.") + "\n\n"
    if run.of("context_parallel"):
        text += f"{attention_table(run)}\n\n{attention_checks(run)}\n\n"
    if run.of("collectives"):
        text += "Collectives, by bytes that a rank receives:\n\n" + collectives_table(run) + "\n\n"
    if lines := training_lines(run):
        text += lines + "\n\n"
    return text


def predicted_section(model, runs):
    fabrics = [run.fabric() for run in runs if run.fabric()]
    for fabric, run in zip(fabrics, (run for run in runs if run.fabric()), strict=True):
        fabric.name, fabric.most = f"{run.gpus} measured", 8
    assumed = [Fabric.given(BEYOND)] if fabrics else [Fabric.given(WITHIN), Fabric.given(BEYOND)]
    if fabrics:
        names = " and ".join(run.name for run in runs if run.fabric())
        about = (
            "Collectives within a machine of eight are those measured on "
            f"{names}, as a latency per other rank and a bandwidth. Beyond, 10 µs and 45 GB/s a GPU are assumptions."
        )
    else:
        about = (
            "Nothing in this table was run on several GPUs, and no collective has been measured: the latencies (4 and "
            "10 µs a rank) and bandwidths (350 GB/s a GPU within a machine of eight, 45 GB/s beyond) are assumptions."
        )
    compared = list(model.errors(runs))
    others = [round(one.percent) for one in compared if one.length not in SHOWN]
    model_of_time = (
        "Time is (a·S + b·S²) / P, with a and b of the least relative error. Measured collectives are added where "
        "several GPUs ran. The files are of different commits, so speedups between them appear as errors. At other "
        f"lengths they are {min(others):+d} to {max(others):+d} %. **Measured** and modelled:"
    )
    errors = "\n".join(error_table(one for one in compared if one.length in SHOWN))
    done = {run.gpus for run in runs for row in run.rows() if row["tokens"] == TOKENS}
    predicted = "\n".join(model.table(TOKENS, [n for n in GPUS if n not in done], [*fabrics, *assumed], "all_to_all"))
    return (
        assumed,
        fabrics,
        f"""\
## What to expect of more GPUs

    python bench/scale/scale_model.py --fabric {WITHIN} --fabric {BEYOND}

predicts the attention of one layer (64 query heads, 4 KV heads of 128, bfloat16, batch 1). It uses measurements on one
H200. `bench/results/bench_random.json` has both passes end to end with random blocks.
`bench/results/simulated_ranks.json` has the slowest of eight simulated ranks at a million tokens, whose calls one GPU
runs one after the other.

{fill(model_of_time)}

{errors}

{fill(f"**Predicted** for {TOKENS} tokens. {about}")}

`--fabric NAME:LATENCY_us:GB/s[:most GPUs]` describes your fabric. `--collectives FILE` takes the results of `torchrun
--nproc-per-node 8 bench/scale/collectives.py --json FILE`. Forward and backward are without collectives; "all" is both
with them, without overlap. The model ignores that short calls do not fill a GPU. It is less accurate where a rank has
few thousand tokens.

{predicted}

![predicted time and efficiency over the number of GPUs](../images/scale.png)

At a fixed length a rank receives the same number of bytes while its work shrinks with P. Use context parallelism within
a fast fabric, and data parallelism beyond.
""",
    )


def page_end(model, runs):
    """The text after MARK, and the fabrics of the picture."""
    text = "## Measured on several GPUs\n\n"
    if runs:
        text += HOW + "".join(measured_section(run) for run in runs)
    else:
        text += fill(
            "Nothing has run on several GPUs or over NCCL yet, and no collective between GPUs was timed. `tools/gpu.sh "
            "scale` measures all of it on the GPUs of a machine. It has run with two CPU processes and tiny sizes."
        )
        text += "\n\n"
    assumed, fabrics, predicted = predicted_section(model, runs)
    text += predicted + "\n## Tests without several GPUs\n\n"
    text += """\
In `tests/python/parallel`, `test_parallel.py` compares 8 chunks on one process with 2 and 4 CPU processes (torchrun,
gloo). The bits are equal, batched and packed, in float32, bfloat16 and float16 (by the oracle). `test_train_long.py`
trains with dp, cp, tp and two of them at once on 1, 2 and 4 processes, and resumes with another number. On one GPU the
calls of eight ranks ran one after the other:

    python bench/scale/context_parallel.py --simulated-ranks 8 --tokens 1048576 --json simulated.json
"""
    ran = {run.gpus for run in runs}
    missing = [str(count) for count in (2, 4, 8) if count not in ran]
    if missing:
        text += (
            "\n" + fill(f"Not run: {', '.join(missing)} GPUs, several machines, and anything inside Megatron.") + "\n"
        )
    return text, [*fabrics, *assumed]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "guide" / "scale.md")
    given = parser.parse_args()
    files = sorted(given.results.glob("scale_x*.json"), key=lambda file: int(file.stem.removeprefix("scale_x")))
    runs = [Measured(json.loads(file.read_text())) for file in files]
    model = Model(
        *(json.loads((given.results / name).read_text()) for name in ("bench_random.json",)),
        [json.loads((given.results / "simulated_ranks.json").read_text())],
        16384,
    )
    try:
        for run in runs:
            model.check_problem(run)
    except ValueError as error:
        raise SystemExit(f"{given.results}: {error}") from None
    before = given.page.read_text(encoding="utf-8")
    if before.count(MARK) != 1:
        raise SystemExit(f"{given.page}: must have the line {MARK.strip()} once")
    end, fabrics = page_end(model, runs)
    text = before[: before.index(MARK)] + MARK + end
    if given.check:
        if before != text:
            print(f"{given.page}: is not what {given.results} makes: run tools/scale.py")
        return int(before != text)
    given.page.write_text(text, encoding="utf-8")
    from scale_model import draw

    picture = given.page.parent.parent / "images" / "scale.png"
    options = SimpleNamespace(tokens=[TOKENS], gpus=GPUS, reduction="all_to_all", picture=picture)
    draw(model, options, fabrics, runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
