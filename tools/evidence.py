#!/usr/bin/env python3
"""Writes docs/evidence.md and its pictures from bench/results/evidence, which bench/evidence.py makes.

    tools/evidence.py [--check] [--results FOLDER] [--page FILE]

With --check it writes nothing; the exit code is 1 where the page is not what the results make.

A difference is of two models on the same held-out rows, nats per token, the mean over seeds that both have. Its 95 %
interval is the wider one of two by Student's t: over the rows (each the mean of its seeds; a ratio of sums, as rows
have different numbers of tokens), and over the seeds. One seed has the first alone.
"""

# ruff: noqa: RUF001 (minus signs as in print)
import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from tables.text import fill, table  # noqa: E402

# 97.5 % of Student's t with 1, 2, ... degrees of freedom.
STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
INTRODUCTION = """\
<!-- Written by tools/evidence.py from bench/results/evidence. Do not edit. -->
# As good as full attention?

"""
HOW = """\
`bench/evidence.sh` measures everything anew, `bench/evidence.py PLAN` one table, in pieces of any length. All models of
a table see the same rows
in the same order, and are evaluated on the same held-out rows. A difference is this model minus full attention, in nats
per token: below zero it is better. Behind it stands half of its 95 % interval, the wider one of those over held-out
rows and over seeds. A loss is the mean over a model's own seeds, a difference over those that both models have.
*Far repeats* are tokens that stood behind the same eight tokens (pieces: three) more than 4096 ago, *new* ones those
that did not within the context. R is the share kept of what attention beyond the window is worth, (window − this)
/ (window − full): of all positions, and of those beyond n · l' (`topk` · `block_size`, the tokens that the selected
branch reads). Recall of the choice: of the attention of the selected branch, were it to read all blocks, the share that
falls on the chosen ones; beside it that of the best blocks, and of random ones.
tokens/s are the median of a run's, by which its losses stand over time; where runs of a model were on different GPUs,
of those on the GPU that most of the recipe's were on. The recipe is the [default of nsa
train](guide/training.md#which-model); the other methods and chains of look-ups (hops) are told of in
[measuring](guide/measuring.md#other-sparse-methods). Those of NSA before b96b740 (2026-11-27)
[leave out what it noted of its choice](findings/training/run_overheads.md); they are 2 to 4 percent
above what the same runs give with it since. Runs of 15 minutes before 035abfc (2026-11-28) ended
[early](findings/training/run_overheads.md): with full attention after 836 s, with NSA after 866.
Until 2026-11-28 all channel pairs turned by default; options stand here as they would be given since.
Look-ups alone: sequences grow as a model learns, NSA's and full attention's each [at its own
pace](findings/recall/mqar_pace.md); full attention of seed 2 did not get to all of 65536 tokens
in its 2000 steps."""
GOALS = """\
What these comparisons are to show. A difference of losses, in nats per byte, counts with the upper end of its interval;
right answers in points, R and speed count as measured, with the least and the most of a seed in brackets. Missed by:
from the goal, not the aim."""
MISSED = """\
What the recipe has not met, by two other settings: all channel pairs turning, which was the default
[before](findings/training/partial_rope.md), and with that compression blocks every 4 tokens
([why these are options](guide/training.md#options-beyond-the-recipe))."""
METHODS = """\
The model of full attention asked by methods that read as many tokens as NSA and need no training, beside NSA, which is
trained so. Losses are nats per token, the rest right answers: means over a row's own seeds, and of hidden lines over
the depths at which all rows were asked (by a method fewer at each: the samples stand below)."""
BASE = "full"
PICTURED = (("8k", "32k"), (BASE, "full-gated", "recipe"))  # plans and models
OTHERS = ("whole-rotary", "blocks-8-4-32-32")  # settings that stand beside what the recipe misses
WITHOUT = "no-selector-loss"  # in the picture of a plan whose recipe has not run


def student(freedom):
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z = 1.959964  # Fisher's expansion
    first, second = z * (z * z + 1) / 4, z * ((5 * z * z + 16) * z * z + 3) / 96
    return z + first / freedom + second / freedom**2


def whole(evaluation):
    """(nats, tokens) of each row."""
    return [(row["loss"], row["tokens"]) for row in evaluation["rows"]]


def parts(name, chosen):
    """The same of those parts, `by_position` or `by_repeat`, whose bounds `chosen` takes."""

    def of(evaluation):
        places = [i for i, part in enumerate(evaluation[f"loss_{name}"]) if chosen(part["from"], part["to"])]
        return [
            (sum(row[name]["loss"][i] for i in places), sum(row[name]["tokens"][i] for i in places))
            for row in evaluation["rows"]
        ]

    return of


far_repeats = parts("by_repeat", lambda low, high: low > 4096)


def loss(evaluations, of=whole):
    """Nats per token, the mean over the seeds; None where there are no such tokens."""
    sums = [[sum(column) for column in zip(*of(evaluation), strict=True)] for evaluation in evaluations]
    return sum(nats / tokens for nats, tokens in sums) / len(sums) if all(tokens for _, tokens in sums) else None


def difference(ours, theirs, of=whole):
    """(mean, half of the 95 % interval or None) of two lists of evaluations, one for each seed; None without tokens."""
    seeds = []
    for mine, other in zip(ours, theirs, strict=True):
        pairs = list(zip(of(mine), of(other), strict=True))
        if any(a[1] != b[1] for a, b in pairs):
            raise ValueError("the rows of the two models have different numbers of tokens")
        seeds.append([(a[0] - b[0], a[1]) for a, b in pairs])
    tokens = [n for _, n in seeds[0] if n]
    if not tokens:
        return None
    rows = [sum(seed[i][0] for seed in seeds) / len(seeds) for i, (_, n) in enumerate(seeds[0]) if n]
    mean = sum(rows) / sum(tokens)
    widths = []
    if len(rows) >= 4:
        squares = sum((d - mean * n) ** 2 for d, n in zip(rows, tokens, strict=True))
        widths.append(student(len(rows) - 1) * math.sqrt(squares * len(rows) / (len(rows) - 1)) / sum(tokens))
    if len(seeds) > 1:
        means = [sum(d for d, _ in seed) / sum(n for _, n in seed) for seed in seeds]
        variance = sum((value - mean) ** 2 for value in means) / (len(means) - 1)
        widths.append(student(len(means) - 1) * math.sqrt(variance / len(means)))
    return mean, max(widths, default=None)


def share_kept(ours, full, window, of=whole):
    """R, or None where full attention is not ahead of the window."""
    here, best, least = (loss(evaluations, of) for evaluations in (ours, full, window))
    return None if None in (here, best, least) or least <= best else (least - here) / (least - best)


# ----------------------------------------------------------------------------------------------------------------- page


def share_text(share):
    return "–" if share is None else f"{share:.3f}".replace("-", "−")


def signed(value):
    if value is None:
        return ""
    mean, half = value
    text = f"{mean:+.4f}".replace("-", "−")
    return text if half is None else f"{text} ± {half:.4f}"


def number(value, spelling=".4f"):
    return "" if value is None else format(value, spelling)


class Results:
    """Of one plan: results[model][seed]."""

    def __init__(self, files):
        self.models = {}
        for file in files:
            result = json.loads(file.read_text())
            self.models.setdefault(result["model"], {})[result["seed"]] = result
        self.all = [result for seeds in self.models.values() for result in seeds.values()]
        first = self.all[0]
        by_time = "recall" not in first and ("eval" not in first or "--minutes" in first["train"])
        for field in ("text", "train", "recall", "fingerprint", *(["gpu"] if by_time else [])):
            found = {str(result.get(field)) for result in self.all}
            if len(found) > 1:
                raise SystemExit(f"{files[0].parent}: {field}: results of one plan differ: {sorted(found)}")
        gpus = [result["gpu"] for result in self.models.get("recipe", {}).values() or self.all]
        self.gpu = max(dict.fromkeys(gpus), key=gpus.count)
        for seed, result in list(self.models.get(BASE, {}).items()):
            for method, evaluation in result.get("eval_by_method", {}).items():
                self.models.setdefault(f"{BASE} by {method}", {})[seed] = {"eval": evaluation}
        self.trained = {model: seeds for model, seeds in self.models.items() if " by " not in model}

    def timed(self, seeds):
        """The results whose times stand beside each other: of the GPU of most of the recipe's, or of all without it."""
        return [result for result in seeds.values() if result["gpu"] == self.gpu]

    def tokens_per_second(self, seeds):
        speeds = [result["tokens_per_second"] for result in self.timed(seeds)]
        return statistics.median_high(speeds) if speeds else None

    def common(self, *models):
        """The seeds that all of the models have."""
        return sorted(set.intersection(*(set(self.models.get(name, {})) for name in models)))

    def evaluations(self, *models):
        """Of these seeds, a list for each model."""
        return [[self.models[name][seed]["eval"] for seed in self.common(*models)] for name in models]

    def difference(self, model, other, of=whole):
        ours, theirs = self.evaluations(model, other)
        return None if model == other or not ours else difference(ours, theirs, of)

    def kept(self, model):
        """R of all positions, and of those beyond the selected tokens; () where a model that it takes has not run."""
        seeds = self.common(model, BASE, "window")
        if not seeds or model in (BASE, "window"):
            return ()
        evaluations = self.evaluations(model, BASE, "window")
        selected = self.models["window"][min(seeds)]["selected_tokens"]
        beyond = parts("by_position", lambda low, high: low >= selected)
        return share_kept(*evaluations), share_kept(*evaluations, beyond)


def choice(seeds):
    """How much of what the selected branch would attend to lies in the blocks chosen, the best, random ones."""
    shares = [head for result in seeds.values() for layer in result.get("choice", []) for head in layer if head]
    if not shares:
        return ""
    return " / ".join(
        f"{sum(share[kind] for share in shares) / len(shares):.2f}" for kind in ("chosen", "best", "random")
    )


def provenance(name, results, command):
    made = sorted({(result["gpu"] or "no GPU", result["commit"] or "", result["date"]) for result in results.all})
    where = "; ".join(f"{gpu}, commit {commit}, {date}" for gpu, commit, date in made)
    return fill(f"`bench/evidence.py {name}`: `nsa {command}` and the options in the table. {where}.")


def losses_table(results, models, tail=lambda seeds: []):
    context = results.all[0]["context"]
    far_position = parts("by_position", lambda low, high: low >= context // 2)
    new = parts("by_repeat", lambda low, high: high == 0)
    for model, seeds in models.items():
        yield [
            model,
            number(loss([result["eval"] for result in seeds.values()])),
            signed(results.difference(model, BASE)),
            *(signed(results.difference(model, BASE, of)) for of in (far_position, far_repeats, new)),
            " / ".join(map(share_text, results.kept(model))),
            *tail(seeds),
        ]


def plan_section(name, results):
    any_result = results.all[0]
    head = [
        "",
        "held-out loss",
        "− full",
        f"beyond {any_result['context'] // 2}",
        "far repeats",
        "new",
        "R / beyond selected",
    ]

    def about(seeds):
        result = next(iter(seeds.values()))
        gated = signed(results.difference(result["model"], "full-gated"))
        size = f"{result['parameters']['total'] / 1e6:.1f} M"
        return [
            gated,
            choice(seeds),
            size,
            str(len(seeds)),
            number(results.tokens_per_second(seeds), ",.0f"),
            f"`{result['options']}`".replace("``", ""),
        ]

    more = ["− full, gated", "recall of the choice / best / random", "parameters", "seeds", "tokens/s", "options"]
    text = f"## {any_result['text']}\n\n{provenance(name, results, 'train ' + any_result['train'])}\n\n"
    text += table([[*head, *more], *losses_table(results, results.trained, about)]) + "\n"
    methods = {model: seeds for model, seeds in results.models.items() if model in (BASE, "recipe") or " by " in model}
    if len(methods) > 2:
        text += "\nThe same model of full attention by methods that read as many tokens as NSA:\n\n"
        text += table([head, *losses_table(results, methods)]) + "\n"
    return text


def recall_section(name, results):
    """Percent of the values recalled."""
    answers = [(result["model"], result["seed"], result["options"], result["answer"]) for result in results.all]
    kinds = ["nsa", "full", "window", *answers[0][3].get("methods", [])]
    head = ["", "seed", "options", *(kind if i < 3 else f"full by {kind}" for i, kind in enumerate(kinds))]
    cells = [
        [model, str(seed), f"`{options}`", *(number(answer.get(kind), ".1%") for kind in kinds)]
        for model, seed, options, answer in answers
    ]
    command = provenance(name, results, "recall " + results.all[0]["recall"])
    return f"## {results.all[0]['text']}\n\n{command}\n\n{table([head, *cells])}\n"


def needles(results):
    """(model, seed, what `nsa needle` said), the methods last."""
    for question in ("needle", "needle_by_method"):
        for model, seeds in results.trained.items():
            for seed, result in seeds.items():
                answers = result.get(question, {})
                for method, answer in {"": answers}.items() if question == "needle" else answers.items():
                    if answer:
                        yield f"{model} by {method}" if method else model, seed, answer


def needle_section(results):
    """Exact answers by length, at the worst depth with its interval, and the mean."""

    def cell(answer, length):
        if length not in answer["lengths"]:
            return ""
        row = answer["lengths"].index(length)
        exact = answer["exact"][row]
        low, high = answer["exact_interval"][row][exact.index(min(exact))]
        return f"{min(exact):.0%} ({low:.0%} to {high:.0%}) / {sum(exact) / len(exact):.0%}"

    rows = list(needles(results))
    if not rows:
        return ""
    lengths = sorted({length for _, _, answer in rows for length in answer["lengths"]})
    head = ["", "seed", "depths x samples", *(f"{length}: worst depth / mean" for length in lengths)]
    cells = [
        [name, str(seed), f"{len(answer['depths'])} x {answer['samples']}", *(cell(answer, n) for n in lengths)]
        for name, seed, answer in rows
    ]
    return "Values of hidden lines found, by length of the context:\n\n" + table([head, *cells]) + "\n"


def speed_section(name, results):
    rates = {model: results.tokens_per_second(seeds) for model, seeds in results.trained.items()}
    cells = [
        [model, f"{rate:,.0f}", f"{rate / rates[BASE]:.2f}" if BASE in rates else ""] for model, rate in rates.items()
    ]
    command = provenance(name, results, "train " + results.all[0]["train"])
    head = ["", "tokens/s", "over full attention"]
    return f"## {results.all[0]['text']}\n\n{command}\n\n{table([head, *cells])}\n"


def lines_found(plans, seeds=None):
    """The share of hidden lines found, by model and method of `lookups-8k`, over the depths at which all were asked;
    of these seeds, if they are given."""
    found = list(needles(plans["lookups-8k"])) if "lookups-8k" in plans else []
    found = [answered for answered in found if seeds is None or answered[1] in seeds]
    depths = set.intersection(*(set(answer["depths"]) for _, _, answer in found)) if found else set()
    shares = {}
    for name, _, answer in found:
        for line in answer["exact"]:
            asked = [share for depth, share in zip(answer["depths"], line, strict=True) if depth in depths]
            shares.setdefault(name, []).extend(asked)
    return {name: statistics.mean(values) for name, values in shares.items() if values}


def methods_section(plans):
    """NSA, full attention and the methods by which that was asked, in one table; nothing without methods."""
    rows = {}
    if "8k" in plans:
        for model, seeds in plans["8k"].models.items():
            evaluations = [result["eval"] for result in seeds.values()]
            rows[model] = [number(loss(evaluations)), number(loss(evaluations, far_repeats))]
    tasks = [task for task in ("2k", "16k", "hops-8k") if "recall" in plans and task in plans["recall"].models]
    found = lines_found(plans)
    methods = {name for name in (*rows, *found) if " by " in name}
    for task in tasks:
        for result in plans["recall"].models[task].values():
            methods |= {f"{BASE} by {method}" for method in result["answer"].get("methods", [])}
    if not methods:
        return ""
    cells = []
    for model in ["recipe", *OTHERS, BASE, "window", *sorted(methods)]:
        kind = "nsa" if model == "recipe" else model.removeprefix(f"{BASE} by ")
        row = [model, *rows.get(model, ["", ""])]
        for task in tasks:
            answers = [result["answer"] for result in plans["recall"].models[task].values()]
            values = [answer[kind] for answer in answers if kind in answer]
            row.append(number(sum(values) / len(values), ".1%") if values else "")
        cells.append([*row, number(found.get(model), ".0%")])
    head = ["", "held-out loss, 8k", "far repeats", *(f"recall {task}" for task in tasks), "needle, 8k"]
    return f"## Beside other sparse methods\n\n{fill(METHODS)}\n\n{table([head, *cells])}\n"


# ---------------------------------------------------------------------------------------------------------------- goals


def furthest_ahead(found):
    """(name, measured) of the method by which a model is furthest behind; None where none was measured."""
    measured = {name: value for name, value in found.items() if value}
    return max(measured.items(), key=lambda item: item[1][1], default=None)


class Measured:
    """What the goals ask of a model, from the results of all plans: (text, value, seeds), or None where some are
    missing."""

    def __init__(self, plans, model):
        self.plans, self.model = plans, model

    def difference(self, plan, other, of=whole, per_byte=False):
        """The model minus `other`, with the upper end of the interval."""
        results = self.plans.get(plan)
        found = results and results.difference(self.model, other, of)
        if not found:
            return None
        if per_byte:
            one = next(iter(results.models[self.model].values()))["eval"]
            scale = one["bits_per_byte"] * math.log(2) / one["loss"]  # tokens per byte, the same of all models
            found = tuple(None if number is None else number * scale for number in found)
        return signed(found), found[0] + (found[1] or 0), len(results.common(self.model, other))

    def kept(self, beyond):
        results = self.plans.get("8k")
        shares = results.kept(self.model) if results else ()
        if not shares or shares[beyond] is None:
            return None
        return share_text(shares[beyond]), shares[beyond], len(results.common(self.model, BASE, "window"))

    def recall(self, tasks, kind="full"):
        """Points that full attention is ahead of NSA, the most of the tasks, each the mean of its seeds."""
        if self.model != "recipe":  # the plan's models are tasks
            return None
        found = []
        for task in tasks:
            seeds = self.plans["recall"].models.get(task, {}) if "recall" in self.plans else {}
            answers = [result["answer"] for result in seeds.values() if kind in result["answer"]]
            if not answers:
                return None
            found.append([100 * (answer[kind] - answer["nsa"]) for answer in answers])
        worst = max(found, key=statistics.mean)
        mean = statistics.mean(worst)
        text = f"{mean:+.1f}" + (f" ({min(worst):+.1f} to {max(worst):+.1f})" if len(worst) > 1 else "")
        return text.replace("-", "−"), mean, min(map(len, found))

    def needle(self, plan, length):
        """Percent of the answers at the worst depth."""
        answers = needles(self.plans[plan]) if plan in self.plans else ()
        worst = [
            100 * min(answer["exact"][answer["lengths"].index(length)])
            for name, _, answer in answers
            if name == self.model and length in answer["lengths"]
        ]
        return (f"{min(worst):.1f}", min(worst), len(worst)) if worst else None

    def best_method(self, of):
        """The model minus the method that is best at some of the tokens."""
        methods = [model for model in self.plans["8k"].models if " by " in model] if "8k" in self.plans else []
        best = furthest_ahead({model: self.difference("8k", model, of) for model in methods})
        if best is None:
            return None
        name, (text, *rest) = best
        return f"{text} ({name.removeprefix('full by ')})", *rest

    def best_method_recall(self):
        tasks = ("16k", "hops-8k")
        methods = {
            method
            for task in tasks
            for result in (self.plans["recall"].models.get(task, {}) if "recall" in self.plans else {}).values()
            for method in result["answer"].get("methods", [])
        }
        best = furthest_ahead({method: self.recall(tasks, method) for method in sorted(methods)})
        if best is None:
            return None
        name, (text, *rest) = best
        return f"{text}, {name}", *rest

    def best_method_needle(self):
        seeds = self.plans["lookups-8k"].common(self.model, BASE) if "lookups-8k" in self.plans else []
        found = lines_found(self.plans, seeds)
        methods = [name for name in found if " by " in name]
        if self.model not in found or not methods:
            return None
        best = max(methods, key=found.get)
        behind = 100 * (found[best] - found[self.model])
        return f"{behind:+.1f}, {best.removeprefix('full by ')}".replace("-", "−"), behind, len(seeds)

    def speed(self):
        models = self.plans["speed"].trained if "speed" in self.plans else {}
        if not {self.model, BASE} <= models.keys():
            return None
        ours, theirs = (
            sum(result["tokens_per_second"] for result in models[name].values()) / len(models[name])
            for name in (self.model, BASE)
        )
        return f"{ours / theirs:.2f}", ours / theirs, len(self.plans["speed"].common(self.model, BASE))


class Goal(NamedTuple):
    what: str
    measured: tuple | None  # text, value, seeds
    goal: float  # an upper bound, or a lower one where the aim is above it
    aim: float

    def missed(self):
        """By how much; 0 or less: met."""
        value = self.measured[1]
        return self.goal - value if self.aim > self.goal else value - self.goal

    def cells(self, unknown=""):
        """What was measured, the seeds, by how much it is missed."""
        if self.measured is None:
            return [unknown, "", ""]
        text, _, seeds = self.measured
        return [text, str(seeds), f"{self.missed():.3g}" if self.missed() > 0 else "met"]


def goals_of(plans, model):
    found = Measured(plans, model)
    beyond = parts("by_position", lambda low, high: low >= 4096)
    return [
        Goal("8k, recipe − full", found.difference("8k", BASE), 0, -0.02),
        Goal("… − full with a gate", found.difference("8k", "full-gated"), 0.005, 0),
        Goal("… − full at equal parameters", found.difference("8k", "full-wide"), 0, -0.015),
        Goal("… − full, beyond 4096", found.difference("8k", BASE, beyond), 0.005, 0),
        Goal("pieces, 8k, − full", found.difference("pieces", BASE, per_byte=True), 0.002, -0.01),
        Goal("301 million bytes, 8k, − full", found.difference("8k-long", BASE), 0, -0.015),
        Goal("32k, 15 minutes each, − full", found.difference("32k-time", BASE), -0.05, -0.15),
        Goal("32k, equal tokens, − full", found.difference("32k", BASE), 0, -0.02),
        Goal("R, 8k", found.kept(0), 0.97, 1),
        Goal("R, 8k, beyond the selected tokens", found.kept(1), 0.95, 1),
        Goal("recall, 16k and 64k: full − NSA, points", found.recall(("16k", "64k")), 1, 0),
        Goal("needle, 64k, worst depth, percent", found.needle("lookups", 65536), 99, 100),
        Goal("hops 3, 8k: full − NSA, points", found.recall(("hops-8k",)), 1, 0),
        Goal("beyond 4096, 8k, − the best of the methods", found.best_method(beyond), 0, -0.02),
        Goal("far repeats, 8k, − the best of the methods", found.best_method(far_repeats), 0, -0.02),
        Goal("recall, 16k and hops: best method − NSA, points", found.best_method_recall(), 1, 0),
        Goal("needle, 8k: best method − NSA, points", found.best_method_needle(), 1, 0),
        Goal("300 million parameters, 32k: tokens/s over full", found.speed(), 4, 5),
    ]


def goals_section(plans):
    """Each goal with what was measured of it; below, those that the recipe misses, by other settings."""
    goals = goals_of(plans, "recipe")
    cells = [["", "measured", "seeds", "goal", "aim", "missed by"]]
    for each in goals:
        relation = "≥" if each.aim > each.goal else "≤"
        spelled = [f"{relation} {bound:g}".replace("-", "−") for bound in (each.goal, each.aim)]
        measured, seeds, missed = each.cells("not yet")
        cells.append([each.what, measured, seeds, *spelled, missed])
    text = f"## Goals\n\n{fill(GOALS)}\n\n{table(cells)}\n"
    goals_of_others = zip(*(goals_of(plans, model) for model in OTHERS), strict=True)
    missed = [
        (each.what, others)
        for each, others in zip(goals, goals_of_others, strict=True)
        if (not each.measured or each.missed() > 0) and any(other.measured for other in others)
    ]
    if not missed:
        return text
    head = ["", *(cell for model in OTHERS for cell in (f"`{model}`", "seeds", "missed by"))]
    rows = [[what, *(cell for other in others for cell in other.cells())] for what, others in missed]
    return f"{text}\n{fill(MISSED)}\n\n{table([head, *rows])}\n"


def curves(plans, image):
    """Held-out loss over tokens and over time, one row of pictures for each plan."""
    from report.style import colours, figure

    fig, axes = figure(columns=2, rows=len(plans))
    for (name, results), left, right in zip(plans.items(), axes[::2], axes[1::2], strict=True):
        models = {model: seeds for model, seeds in results.trained.items() if model in PICTURED[1]}
        if "recipe" not in models and WITHOUT in results.trained:
            models[WITHOUT] = results.trained[WITHOUT]
        kinds = {"recipe": "nsa", WITHOUT: "nsa"}
        palette = colours([kinds.get(model, model) for model in models])
        for (model, seeds), colour in zip(models.items(), palette, strict=True):
            for axis, unit, shown in (
                (left, lambda _: 1e6, seeds.values()),
                (right, lambda result: 60 * result["tokens_per_second"], results.timed(seeds)),
            ):
                for i, result in enumerate(shown):
                    axis.plot(
                        [point["tokens"] / unit(result) for point in result["curve"]],
                        [point["loss"] for point in result["curve"]],
                        color=colour,
                        label=None if i else model,
                    )
        left.set(title=name, xlabel="tokens (millions)", ylabel="held-out loss (nats per token)")
        right.set(title=name, xlabel="minutes of training, at the median speed")
        left.legend()
    image.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(image)


def read(folder):
    plans = {}
    for file in sorted(folder.glob("*.*.*.json")):
        plans.setdefault(file.name.split(".")[0], []).append(file)
    results = {name: Results(files) for name, files in plans.items()}
    return {name: found for name, found in results.items() if list(found.models) != [BASE]}  # nothing to set beside it


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results" / "evidence")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "evidence.md")
    given = parser.parse_args()
    plans = read(given.results)
    if not plans:
        if given.check and not given.page.exists():
            return 0
        raise SystemExit(f"{given.results}: no results: bench/evidence.py makes them")
    image = given.page.parent / "images" / "evidence.png"
    sections = list(filter(None, [goals_section(plans), methods_section(plans)]))
    for name, results in plans.items():
        if "recall" in results.all[0]:
            section = recall_section
        else:
            section = plan_section if "eval" in results.all[0] else speed_section
        sections.append("\n".join(filter(None, [section(name, results), needle_section(results)])))
    drawn = {name: plans[name] for name in PICTURED[0] if name in plans}
    picture = "![held-out loss](images/evidence.png)\n\n" if drawn else ""
    text = INTRODUCTION + fill(HOW) + "\n\n" + picture + "\n".join(sections)
    if given.check:
        if not given.page.exists() or given.page.read_text(encoding="utf-8") != text:
            print(f"{given.page}: is not what {given.results} makes: run tools/evidence.py")
            return 1
        return 0
    given.page.write_text(text, encoding="utf-8")
    if drawn:
        curves(drawn, image)
    return 0


if __name__ == "__main__":
    sys.exit(main())
