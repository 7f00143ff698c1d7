#!/usr/bin/env python3
"""Writes docs/evidence.md, docs/evidence_tables.md, their picture, and the quality table of README.md.

    python -m evidence.page [--check] [--results FOLDER] [--docs FOLDER]

With --check it writes nothing; the exit code is 1 where a page is not what the results make. The README is written with
the default folders only.
"""

# ruff: noqa: RUF001 (minus signs as in print)
import argparse
import bisect
import json
import statistics
import sys
from pathlib import Path

from evidence.plans import BASE, BASELINES, BLOCKS, FULL_ROPE, RECIPE, RECIPE_BLOCKS
from evidence.results import RESULTS, ROOT, by_baseline, is_baseline, read_all
from evidence.statistics import beyond, far_recurrences, loss, non_recurring
from evidence.targets import OTHERS, printed, signed, targets_of

sys.path.insert(0, str(ROOT / "tools"))
sys.path.append(str(ROOT / "python" / "nsa"))  # the report without the package's torch

from tables.text import fill, table

DOCS = ROOT / "docs"
README = ROOT / "README.md"
TIMES = ROOT / "bench" / "results" / "attention_time.json"  # of `nsa bench`, with each setting of BLOCKS
MARKS = "<!-- quality: written by evidence/page.py -->", "<!-- end of quality -->"
NOTICE = "<!-- Written by evidence/page.py from evidence/results. Do not edit. -->"
HEAD = f"""\
{NOTICE}
# Evidence: NSA against full attention

Small models are trained twice, once with NSA and once with full attention. NSA uses the recipe, the [default of nsa
train](guide/training.md#recipe-or-paper): `{RECIPE}`, with partial RoPE. All tables, commands and commits:
[tables](evidence_tables.md).

- Loss models have 24 to 28 million parameters and learn from source code.
- Recall models have 2 layers and see synthetic sequences only. Each advances at its own pace.
- Needle models see key-value lines in a quarter (8k) or half (64k) of their training tokens. The 64k model has RoPE
  base 1,000,000.
- In loss and needle runs of equal length, both models see the same data in the same order.
"""
PICTURE = """\
![held-out loss of NSA minus full attention, over tokens and over time](images/evidence.png)

Held-out loss of the recipe minus full attention during training; below zero NSA is better. Thin lines are seeds, the
thick line is their mean."""
RECIPE_NAME = "-".join(map(str, RECIPE_BLOCKS))  # in the picture
FRONT = f"""\
![loss and far recurrences of six block settings over the time of attention](images/front.png)

The recipe ({RECIPE_NAME}, blue) with other blocks: kernel size, stride, block size, top-n. Vertical: loss minus full
attention at context 8192 after 1500 steps (plan `ablations`, one seed, bars: 95 % interval). Horizontal: time of
attention, forward and backward, at 65536 tokens with 64 heads on an H200. [Finding](findings/training/blocks.md)."""
TARGETS = """\
Losses are in nats per byte. A loss meets its target if the upper end of its interval does; all other values are
compared as measured. Brackets hold the lowest and highest seed. The gap is the distance to the target, not to the
stretch target. The baselines are [below](#training-free-sparse-attention)."""
MISSED = """\
Two other settings where the recipe misses a target: `recipe-1` (full RoPE), and `blocks-8-4-32-32` (recipe-1 with a
compression block every 4 tokens)."""
BASELINES_TEXT = """\
The [baselines](guide/measuring.md#training-free-sparse-attention-baselines) run the trained full-attention model and
read as many tokens per query as NSA. Losses are nats per byte; the rest is accuracy. Values are means over seeds.
Needle retrieval is over the depths that all rows share."""
METHOD = """\
- `evidence/run.sh` runs every plan and resumes where it stopped. `python -m evidence.run PLAN` runs one. `--missing`
  lists what has no result. `python -m evidence.page` writes these pages from `evidence/results`.
- Models of a plan share data and seed. Loss models are evaluated on the same held-out rows.
- A difference is the mean over the seeds that both models have. The figure after ± is half of the 95 % interval by
  Student's t, over rows or over seeds, whichever is wider.
- Far recurrences are tokens that followed the same eight tokens (BPE: three) more than 4096 tokens ago. Non-recurring
  tokens did not follow them before within the context.
- The retained long-range gain is (L_window − L) / (L_window − L_full): the share of the gain from attention beyond the
  window. One means as good as full attention.
- Associative recall (MQAR): 64 key-value pairs, each queried beyond the window. Multi-hop recall follows three pairs.
  These models are trained on the task only.
- Needle retrieval: a key-value line in held-out text, queried at the end. An answer is correct if every token is.
- Full attention has the settings with which it did best at 1500 steps (ablations, one seed). Other learning rates,
  warm-ups and RoPE bases, q/k norms and partial RoPE cost .007 to .12 nats.
- Selection recall: the share of the selected branch's attention mass that lies in the selected blocks."""
LIMITS = """\
- Models are small and the data is source code. Nothing is known here about larger models or other text.
- `8k-long`, `speed` and the ablations have one seed. Their intervals are over held-out rows only.
- `retrieval-64k` has no model with full attention, and 25 samples for each depth. The baselines of
  `retrieval-8k` have 5.
- Runs used H200 and H100 GPUs. Throughput is compared on one kind of GPU only.
- Throughput of NSA before commit b96b740 leaves out the selection statistics. It is 2 to 4 % too high.
- Runs of 15 minutes before commit 035abfc ended early: full attention after 836 s, NSA after 866 s.
- The tables show options by their current names and defaults. Stored results keep the original commands."""
TABLES = f"""\
{NOTICE}
# Evidence: all tables

One section for each plan. [Evidence](evidence.md) has the claims, the method and the limits.
"""
COLUMNS = f"""\
Losses are nats per token. "− full" is the difference to full attention on the same rows and seeds, with half of its
95 % interval. Gain is the retained long-range gain at all positions and beyond the selected tokens. Tokens/s is the
median over a run. Parameters of runs: the plan's options, then the model's. Ablations with `{FULL_ROPE}` are
`recipe-1` with one change. `recipe-2-A-B-C-D` has kernel size A, stride B, block size C, top-k D."""
LONG_FORM = (  # rows that the README does without
    "Loss, nats/byte: context 8192, 301 million bytes",
    "Associative recall, 64k tokens",
    "Needle retrieval, 64k tokens, all depths",
)
PICTURED = ("8k", "bpe", "32k")


def number(value, spelling=".4f"):
    return "" if value is None else format(value, spelling)


def gain_text(gain):
    return "–" if gain is None else printed(f"{gain:.3f}")


def percent(value, digits=1):
    return "" if value is None else f"{100 * value:.{digits}f} %"


# ---------------------------------------------------------------------------------------------------------- quality


def loss_row(plans, name, title, of=None):
    """Losses of NSA and full attention over the seeds that both have."""
    results = plans.get(name)
    found = results.evaluations(RECIPE, BASE) if results else ([], [])
    if not found[0]:
        return None
    of = [of] if of else []
    losses = [number(loss(evaluations, *of)) for evaluations in found]
    return [title, *losses, signed(results.difference(RECIPE, BASE, *of)), str(len(found[0]))]


def accuracy_row(title, ours, theirs):
    """Accuracies, a value for each seed."""
    if not ours:
        return None
    apart = printed(f"{100 * (statistics.mean(ours) - statistics.mean(theirs)):+.1f} points") if theirs else ""
    cells = [percent(statistics.mean(values)) if values else "" for values in (ours, theirs)]
    return [title, *cells, apart, str(len(ours))]


def retrieved(results, model, length, reduce):
    """Retrieval accuracy at a length, for each seed of a model."""
    return [
        reduce(answer["accuracy"][answer["lengths"].index(length)])
        for name, _, answer in (results.needles() if results else ())
        if name == model and length in answer["lengths"]
    ]


def quality(plans, short_form=False):
    """NSA and full attention, the recipe only; in short form for the README."""
    recall = plans.get("recall")
    short, long = plans.get("retrieval-8k"), plans.get("retrieval-64k")
    rows = [
        loss_row(plans, "8k", "Loss, nats/byte: context 8192, 164 million bytes"),
        loss_row(plans, "8k", "… recurrences beyond 4096 tokens", far_recurrences),
        loss_row(plans, "8k-long", LONG_FORM[0]),
        loss_row(plans, "bpe", "Loss, nats/token: BPE, context 8192, 164 million tokens"),
        loss_row(plans, "32k", "Loss, nats/byte: context 32768, 98 million bytes"),
        loss_row(plans, "32k-time", "Loss, nats/byte: context 32768, 15 minutes each"),
        *(
            accuracy_row(title, *(recall.scores(task, kind) if recall else [] for kind in ("nsa", BASE)))
            for task, title in (
                ("16k", "Associative recall, 16k tokens"),
                ("64k", LONG_FORM[1]),
                ("multi-hop-8k", "Multi-hop recall, 3 hops, 8k tokens"),
            )
        ),
        *(
            accuracy_row(title, *(retrieved(results, model, length, reduce) for model in (RECIPE, BASE)))
            for results, length, reduce, title in (
                (short, 8192, statistics.mean, "Needle retrieval, 8k tokens"),
                (long, 65536, statistics.mean, LONG_FORM[2]),
                (long, 65536, min, "Needle retrieval, 64k tokens, worst depth, mean of seeds"),
            )
        ),
    ]
    if "speed" in plans and not short_form:  # the README has it in its table of speed
        speed = plans["speed"]
        rates = [speed.tokens_per_second(model) for model in (RECIPE, BASE)]
        if all(rates):
            title = "Training, tokens/s: 300 million parameters, context 32768"
            ratio = f"{rates[0] / rates[1]:.2f}×"
            rows.append([title, *(f"{rate:,.0f}" for rate in rates), ratio, str(len(speed.common(RECIPE, BASE)))])
    rows = [row for row in rows if row and not (short_form and row[0] in LONG_FORM)]
    return table([["", f"NSA (`{RECIPE}`)", "full attention", "difference", "seeds"], *rows])


def converged(plans):
    """A sentence on runs with full attention that stayed far from the task."""
    recall = plans.get("recall")
    scores = recall.scores("64k", BASE) if recall else []
    learnt = [score for score in scores if score > 0.5]
    if not learnt or len(learnt) == len(scores):
        return ""
    return (
        f"At 64k, {len(scores) - len(learnt)} of {len(scores)} runs with full attention did not converge; "
        f"the others reach {percent(statistics.mean(learnt))}."
    )


def readme_block(plans):
    note = (
        "Losses are on held-out source code, of models with 24 to 28 million parameters. Needle models see key-value "
        "lines in training. ± is half of the 95 % interval. Targets, method and limits: [evidence](docs/evidence.md). "
        "Below: loss (context 8192) over time of attention (65536 tokens) by kernel size, stride, block size and "
        "top-n; blue is the recipe."
    )
    picture = "![differences to full attention over the time of attention, for six settings](docs/images/front.png)"
    return f"{quality(plans, short_form=True)}\n\n{fill(note)}" + (f"\n\n{picture}" if front(plans) else "")


def claims(plans):
    """Claims that the results support, a line each."""
    pairs = [
        results.difference_of_seed(RECIPE, BASE, seed, far_recurrences)
        for results in plans.values()
        for seed in results.common(RECIPE, BASE)
        if "eval" in results.models[RECIPE][seed]
    ]
    pairs = [pair for pair in pairs if pair is not None]
    if pairs:
        better = sum(pair < 0 for pair in pairs)
        yield (
            f"In {better} of {len(pairs)} pairs of runs (byte-level and BPE), NSA predicts far recurrences better than "
            "full attention."
        )
    targets = [each for each in targets_of(plans, RECIPE) if each.measured]
    met = sum(each.gap() <= 0 for each in targets)
    if targets:
        yield f"The recipe meets {met} of {len(targets)} [targets](#targets)."
    if told := converged(plans):
        yield told


# ------------------------------------------------------------------------------------------------------------- page


def targets_section(plans):
    """Each target with what the recipe reaches; below, those that it misses, by other settings."""
    targets = targets_of(plans, RECIPE)
    cells = [["", "measured", "seeds", "target", "stretch target", "gap"]]
    for each in targets:
        relation = "≥" if each.stretch > each.target else "≤"
        spelled = [printed(f"{relation} {bound:g}") for bound in (each.target, each.stretch)]
        measured, seeds, gap = each.cells("not measured")
        cells.append([each.what, measured, seeds, *spelled, gap])
    text = f"## Targets\n\n{fill(TARGETS)}\n\n{table(cells)}\n"
    targets_of_others = zip(*(targets_of(plans, model) for model in OTHERS), strict=True)
    missed = [
        (each.what, others)
        for each, others in zip(targets, targets_of_others, strict=True)
        if (not each.measured or each.gap() > 0) and any(other.measured for other in others)
    ]
    if not missed:
        return text
    head = ["", *(cell for model in OTHERS for cell in (f"`{model}`", "seeds", "gap"))]
    rows = [[what, *(cell for other in others for cell in other.cells())] for what, others in missed]
    return f"{text}\n{fill(MISSED)}\n\n{table([head, *rows])}\n"


def baselines_section(plans):
    """NSA, full attention and the training-free baselines in one table; nothing without baselines."""
    rows = {}
    if "8k" in plans:
        for model, seeds in plans["8k"].models.items():
            evaluations = [result["eval"] for result in seeds.values()]
            rows[model] = [number(loss(evaluations)), number(loss(evaluations, far_recurrences))]
    recall = plans.get("recall")
    tasks = [task for task in ("2k", "16k", "multi-hop-8k") if recall and task in recall.models]
    found = plans["retrieval-8k"].retrieval() if "retrieval-8k" in plans else {}
    kinds = {RECIPE: "nsa", BASE: BASE, "window": "window"} | {by_baseline(name): name for name in BASELINES}
    baselines = [
        model
        for model, kind in kinds.items()
        if is_baseline(model) and (model in rows or model in found or any(recall.scores(task, kind) for task in tasks))
    ]
    if not baselines:
        return ""
    cells = []
    for model in [RECIPE, *OTHERS, BASE, "window", *baselines]:
        row = [model, *rows.get(model, ["", ""])]
        for task in tasks:
            scores = recall.scores(task, kinds[model]) if model in kinds else []
            row.append(percent(statistics.mean(scores)) if scores else "")
        cells.append([*row, percent(found.get(model), 0)])
    head = ["", "loss, `8k`", "far recurrences", *(f"recall, {task}" for task in tasks), "needle, 8k"]
    return f"## Training-free sparse attention\n\n{fill(BASELINES_TEXT)}\n\n{table([head, *cells])}\n"


def main_page(plans):
    sections = [HEAD, f"## Results\n\n{quality(plans)}\n"]
    if told := list(claims(plans)):
        sections.append("\n".join(fill(f"- {line}").replace("\n", "\n  ") for line in told) + "\n")
    if drawn(plans):
        sections.append(PICTURE + "\n")
    if front(plans):
        sections.append(FRONT + "\n")
    sections += [targets_section(plans), baselines_section(plans)]
    sections += [f"## Method\n\n{METHOD}\n", f"## Limits\n\n{LIMITS}\n"]
    return "\n".join(filter(None, sections))


# ------------------------------------------------------------------------------------------------------------ tables


def provenance(results):
    places = {}
    for result in results.all:
        where = places.setdefault(result["gpu"] or "no GPU", {})
        where.setdefault(result["date"], set()).add(result["commit"] or "not recorded")
    told = (
        f"{gpu}: " + ", ".join(f"{date} ({', '.join(sorted(commits))})" for date, commits in sorted(days.items()))
        for gpu, days in sorted(places.items())
    )
    command = f"nsa {results.shared['command']} {results.shared['options']}"
    return f"    {command}\n\n" + fill(f"{'. '.join(told)}.")


def selection_recall(seeds):
    """Mean over layers and heads: of the blocks selected, of the best ones."""
    heads = [
        head for result in seeds.values() for layer in result.get("selection_recall", []) for head in layer if head
    ]
    return "/".join(f"{statistics.fmean(values):.2f}" for values in list(zip(*heads, strict=True))[:2]) if heads else ""


def losses_rows(results, models):
    far_half = beyond(results.shared["context"] // 2)
    for model, seeds in models.items():
        yield [
            model,
            number(loss([result["eval"] for result in seeds.values()])),
            signed(results.difference(model)),
            *(signed(results.difference(model, BASE, of)) for of in (far_half, far_recurrences, non_recurring)),
            "/".join(map(gain_text, results.retained(model))),
        ]


def losses_section(results):
    head = [
        "",
        "loss",
        "− full",
        f"beyond {results.shared['context'] // 2}",
        "far recurrences",
        "non-recurring",
        "gain",
    ]
    more = [
        "− full, gated",
        "selection recall: selected/oracle",
        "parameters",
        "seeds",
        "tokens/s",
        "options",
    ]
    rows = []
    for row in losses_rows(results, results.trained):
        model = row[0]
        seeds = results.trained[model]
        first = next(iter(seeds.values()))
        rows.append(
            [
                *row,
                signed(results.difference(model, "full-gated")),
                selection_recall(seeds),
                f"{first['parameters'] / 1e6:.1f} M",
                str(len(seeds)),
                number(results.tokens_per_second(model), ",.0f"),
                "" if model in BLOCKS else f"`{first['options']}`".replace("``", ""),
            ]
        )
    columns = [column for column in zip([*head, *more], *rows, strict=True) if any(column[1:])]
    yield table(list(zip(*columns, strict=True)))
    compared = {
        model: seeds for model, seeds in results.models.items() if model in (BASE, RECIPE) or is_baseline(model)
    }
    if any(map(is_baseline, compared)):
        yield "The model with full attention, evaluated with training-free sparse attention:"
        yield table([head, *losses_rows(results, compared)])


def recall_section(results):
    kinds = ["nsa", BASE, "window", *BASELINES]
    head = ["task", "options", *kinds[:3], *(f"{BASE} + {name}" for name in BASELINES.values())]
    rows = []
    for task, seeds in results.models.items():
        row = [task, f"`{next(iter(seeds.values()))['options']}`"]
        for kind in kinds:
            scores = [result["scores"].get(kind, {}).get("accuracy") for result in seeds.values()]
            cells = ["–" if score is None else f"{100 * score:.1f}" for score in scores]
            row.append(", ".join(cells) if any(score is not None for score in scores) else "")
        rows.append(row)
    yield fill(
        "Accuracy in percent, a value for each seed. Sequences grow as a model learns, those of NSA and of full "
        "attention each at its own pace."
    )
    yield table([head, *rows])


def needle_section(results):
    """Retrieval accuracy by length, at the worst depth with its interval, and the mean."""

    def cell(answer, length):
        if length not in answer["lengths"]:
            return ""
        row = answer["lengths"].index(length)
        accuracy = answer["accuracy"][row]
        low, high = answer["interval"][row][accuracy.index(min(accuracy))]
        return f"{min(accuracy):.0%} ({100 * low:.0f}–{high:.0%}) / {sum(accuracy) / len(accuracy):.0%}"

    rows = []
    for name, seed, answer in results.needles():
        rows.append((name, seed, answer))
        rows += ((f"{name}, {task}", seed, found) for task, found in answer.get("tasks", {}).items())
    if not rows:
        return
    lengths = sorted({length for _, _, answer in rows for length in answer["lengths"]})
    head = ["", "seed", "depths × samples", *(f"{length}: worst depth / mean" for length in lengths)]
    cells = [
        [name, str(seed), f"{len(answer['depths'])} × {answer['samples']}", *(cell(answer, n) for n in lengths)]
        for name, seed, answer in rows
    ]
    yield "Needle retrieval accuracy by context length; in brackets the 95 % interval (Wilson):"
    yield table([head, *cells])


def speed_section(results):
    rates = {model: results.tokens_per_second(model) for model in results.trained}
    cells = [
        [model, f"{rate:,.0f}", f"{rate / rates[BASE]:.2f}" if BASE in rates else ""] for model, rate in rates.items()
    ]
    yield table([["", "tokens/s", "over full attention"], *cells])


def tables_page(plans):
    sections = [TABLES, fill(COLUMNS) + "\n"]
    for name, results in plans.items():
        if results.plan.command == "recall":
            section = recall_section
        else:
            section = losses_section if results.plan.evaluations else speed_section
        blocks = [f"## {name}: {results.plan.title}", provenance(results), *section(results), *needle_section(results)]
        sections.append("\n\n".join(blocks) + "\n")
    return "\n".join(sections)


# ----------------------------------------------------------------------------------------------------------- picture


def interpolated(curve, place):
    """A curve's value between its points; None outside of them."""
    places = [x for x, _ in curve]
    if not curve or not places[0] <= place <= places[-1]:
        return None
    i = max(1, bisect.bisect_left(places, place))
    if i == len(curve):
        return curve[0][1]
    (x0, y0), (x1, y1) = curve[i - 1 : i + 1]
    return y0 + (place - x0) / (x1 - x0) * (y1 - y0)


def apart(curves, places):
    """The first curve minus the second one, where both have a value."""
    values = ((place, *(interpolated(curve, place) for curve in curves)) for place in places)
    return [(place, ours - theirs) for place, ours, theirs in values if None not in (ours, theirs)]


def differences_over(results):
    """The recipe minus full attention, a curve for each seed: over millions of tokens, and over minutes."""
    models = (RECIPE, BASE)
    seconds = [results.tokens_per_second(model) for model in models]
    seeds = [[results.models[model][seed]["curve"] for model in models] for seed in results.common(*models)]
    for units in ((1e6, 1e6), [60 * rate for rate in seconds] if all(seconds) else None):
        if units:
            scaled = [
                [[(tokens / unit, value) for tokens, value in curve] for curve, unit in zip(seed, units, strict=True)]
                for seed in seeds
            ]
            yield [apart(seed, [place for place, _ in seed[0]]) for seed in scaled]


def mean_curve(curves):
    """The mean where all of the curves have a value."""
    values = ((place, [interpolated(curve, place) for curve in curves]) for place, _ in curves[0])
    return [(place, statistics.fmean(found)) for place, found in values if None not in found]


def drawn(plans):
    return {name: plans[name] for name in PICTURED if name in plans and plans[name].common(RECIPE, BASE)}


def front(plans):
    """(Blocks, ms of attention, difference of all tokens, of far recurrences) of each setting; differences to full."""
    if "ablations" not in plans:
        return []
    results, times = plans["ablations"], json.loads(TIMES.read_text(encoding="utf-8"))["ms"]
    names = {RECIPE: RECIPE_NAME} | {model: model.removeprefix(f"{RECIPE}-") for model in BLOCKS}
    return [
        (
            name,
            times[name]["forward_backward"]["65536"],
            results.difference(model),
            results.difference(model, of=far_recurrences),
        )
        for model, name in names.items()
        if results.common(model, BASE)
    ]


def draw_front(points, image):
    from report.style import PALETTE, figure, save

    fig, axes = figure(columns=2, width=4.5, height=3.4)
    titles = "all tokens", "recurrences beyond 4096 tokens"
    for place, (axis, title) in enumerate(zip(axes, titles, strict=True)):
        for name, ms, *differences in points:
            mean, half = differences[place]
            colour = PALETTE[0] if name == points[0][0] else PALETTE[1]
            axis.errorbar(ms, mean, yerr=half, fmt="o", color=colour, elinewidth=0.8, markersize=5)
            axis.annotate(name, (ms, mean), xytext=(6, 5), textcoords="offset points", fontsize=8)
        axis.set(title=title, xlabel="attention, forward and backward, ms", xlim=(55, 130))
    axes[0].set(ylabel="NSA − full attention, nats per token")
    save(fig, image, dpi=160)


def draw(plans, image):
    from report.style import PALETTE, figure, save

    fig, axes = figure(columns=2, width=4.5, height=3.4)
    for (name, results), colour in zip(drawn(plans).items(), PALETTE, strict=False):
        for axis, curves in zip(axes, differences_over(results), strict=False):
            for curve in curves:
                axis.plot(*zip(*curve, strict=True) if curve else ((), ()), color=colour, linewidth=0.6, alpha=0.4)
            mean = mean_curve(curves)
            label = f"{name}, {len(curves)} seeds"
            axis.plot(*zip(*mean, strict=True) if mean else ((), ()), color=colour, linewidth=2, label=label)
    for axis, unit, lowest in zip(axes, ("tokens (millions)", "minutes of training"), (-0.4, -1.2), strict=True):
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set(xlabel=unit, ylim=(lowest, 0.2))
    axes[0].set(ylabel="NSA − full attention, nats per token")
    axes[0].legend(loc="lower right")
    image.parent.mkdir(parents=True, exist_ok=True)
    save(fig, image, dpi=160)


# -------------------------------------------------------------------------------------------------------------- main


def update(path, text, check):
    """Writes the file, or says that it is not up to date; whether it was."""
    current = path.exists() and path.read_text(encoding="utf-8") == text
    if check and not current:
        print(f"{path}: not what the results make: run python -m evidence.page", file=sys.stderr)
    elif not check:
        path.write_text(text, encoding="utf-8")
    return current


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    given = parser.parse_args()
    plans = read_all(given.results)
    if not plans:
        raise SystemExit(f"{given.results}: no results: python -m evidence.run makes them")
    files = {given.docs / "evidence.md": main_page(plans), given.docs / "evidence_tables.md": tables_page(plans)}
    if (given.results, given.docs) == (RESULTS, DOCS):
        before, rest = README.read_text(encoding="utf-8").split(MARKS[0])
        files[README] = f"{before}{MARKS[0]}\n{readme_block(plans)}\n{MARKS[1]}{rest.split(MARKS[1])[1]}"
    current = [update(path, text, given.check) for path, text in files.items()]
    if given.check:
        return 0 if all(current) else 1
    if drawn(plans):
        draw(plans, given.docs / "images" / "evidence.png")
    if points := front(plans):
        draw_front(points, given.docs / "images" / "front.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
