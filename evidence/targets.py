"""Targets of the comparisons: a target and a stretch target for each, and the gap if it is not met."""

# ruff: noqa: RUF001 (minus signs as in print)
import math
import statistics
from typing import NamedTuple

from evidence.plans import BASE, BASELINES, RECIPE
from evidence.results import is_baseline
from evidence.statistics import all_tokens, beyond, far_recurrences

OTHERS = ("recipe-1", "blocks-8-4-32-32")  # settings shown where the recipe misses a target


def printed(text):
    return text.replace("-", "−")


def signed(value, digits=4):
    """A difference with half of its interval."""
    if value is None:
        return ""
    mean, half = value
    text = printed(f"{mean:+.{digits}f}")
    return text if half is None else f"{text}±{half:.{digits}f}"


def name_of(baseline):
    return baseline.removeprefix(f"{BASE} + ")


def furthest_ahead(found):
    """(name, measured) of the baseline by which a model is furthest behind; None where none was measured."""
    measured = {name: value for name, value in found.items() if value}
    return max(measured.items(), key=lambda item: item[1][1], default=None)


class Measured:
    """Values of a model from the results of all plans: (text, value, seeds), or None if some are missing."""

    def __init__(self, plans, model):
        self.plans, self.model = plans, model

    def difference(self, plan, other, of=all_tokens, per_byte=False):
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

    def retained(self, beyond_selected):
        results = self.plans.get("8k")
        gains = results.retained(self.model) if results else ()
        if not gains or gains[beyond_selected] is None:
            return None
        gain = gains[beyond_selected]
        return printed(f"{gain:.3f}"), gain, len(results.common(self.model, BASE, "window"))

    def recall(self, tasks, kind=BASE):
        """Points that `kind` is ahead of NSA, the most of the tasks, each the mean of its seeds."""
        if self.model != RECIPE:  # the plan's models are tasks
            return None
        results, found = self.plans.get("recall"), []
        for task in tasks:
            pairs = zip(results.scores(task, kind), results.scores(task, "nsa"), strict=True) if results else ()
            found.append([100 * (theirs - ours) for theirs, ours in pairs])
        if not all(found):
            return None
        worst = max(found, key=statistics.mean)
        mean = statistics.mean(worst)
        text = f"{mean:+.1f}" + (f" ({min(worst):+.1f} to {max(worst):+.1f})" if len(worst) > 1 else "")
        return printed(text), mean, min(map(len, found))

    def needle(self, plan, length):
        """Percent of correct answers at the worst depth."""
        answers = self.plans[plan].needles() if plan in self.plans else ()
        worst = [
            100 * min(answer["accuracy"][answer["lengths"].index(length)])
            for name, _, answer in answers
            if name == self.model and length in answer["lengths"]
        ]
        return (f"{min(worst):.1f}", min(worst), len(worst)) if worst else None

    def best_baseline(self, of):
        """The model minus the baseline that is best at some of the tokens."""
        baselines = filter(is_baseline, self.plans["8k"].models if "8k" in self.plans else ())
        best = furthest_ahead({model: self.difference("8k", model, of) for model in baselines})
        if best is None:
            return None
        name, (text, *rest) = best
        return f"{text} ({name_of(name)})", *rest

    def best_baseline_recall(self):
        best = furthest_ahead({name: self.recall(("16k", "multi-hop-8k"), key) for key, name in BASELINES.items()})
        if best is None:
            return None
        name, (text, *rest) = best
        return f"{text}, {name}", *rest

    def best_baseline_needle(self):
        seeds = self.plans["retrieval-8k"].common(self.model, BASE) if "retrieval-8k" in self.plans else []
        found = self.plans["retrieval-8k"].retrieval(seeds) if seeds else {}
        baselines = list(filter(is_baseline, found))
        if self.model not in found or not baselines:
            return None
        best = max(baselines, key=found.get)
        behind = 100 * (found[best] - found[self.model])
        return f"{printed(f'{behind:+.1f}')}, {name_of(best)}", behind, len(seeds)

    def speedup(self):
        models = self.plans["speed"].trained if "speed" in self.plans else {}
        if not {self.model, BASE} <= models.keys():
            return None
        ours, theirs = (
            sum(result["tokens_per_second"] for result in models[name].values()) / len(models[name])
            for name in (self.model, BASE)
        )
        return f"{ours / theirs:.2f}", ours / theirs, len(self.plans["speed"].common(self.model, BASE))


class Target(NamedTuple):
    what: str
    measured: tuple | None  # text, value, seeds
    target: float  # an upper bound, or a lower one where the stretch target is above it
    stretch: float

    def gap(self):
        """To the target; 0 or less where it is met."""
        value = self.measured[1]
        return self.target - value if self.stretch > self.target else value - self.target

    def cells(self, unknown=""):
        """Measured value, seeds and gap."""
        if self.measured is None:
            return [unknown, "", ""]
        text, _, seeds = self.measured
        return [text, str(seeds), f"{self.gap():.3g}" if self.gap() > 0 else "met"]


def targets_of(plans, model):
    found = Measured(plans, model)
    far = beyond(4096)
    return [
        Target("Loss, `8k`: NSA − full attention", found.difference("8k", BASE), 0, -0.02),
        Target("… NSA − gated full attention", found.difference("8k", "full-gated"), 0.005, 0),
        Target("… NSA − full attention, equal parameters", found.difference("8k", "full-equal-parameters"), 0, -0.015),
        Target("… NSA − full attention, beyond position 4096", found.difference("8k", BASE, far), 0.005, 0),
        Target(
            "Loss per byte, `bpe`: NSA − full attention", found.difference("bpe", BASE, per_byte=True), 0.002, -0.01
        ),
        Target("Loss, `8k-long`: NSA − full attention", found.difference("8k-long", BASE), 0, -0.015),
        Target("Loss, `32k-time`: NSA − full attention", found.difference("32k-time", BASE), -0.05, -0.15),
        Target("Loss, `32k`: NSA − full attention", found.difference("32k", BASE), 0, -0.02),
        Target("Retained long-range gain, `8k`", found.retained(0), 0.97, 1),
        Target("… beyond the selected tokens", found.retained(1), 0.95, 1),
        Target("Associative recall, 16k and 64k: full attention − NSA, points", found.recall(("16k", "64k")), 1, 0),
        Target(
            "Needle retrieval, 64k: worst depth, lowest seed, percent", found.needle("retrieval-64k", 65536), 99, 100
        ),
        Target("Multi-hop recall, 3 hops, 8k: full attention − NSA, points", found.recall(("multi-hop-8k",)), 1, 0),
        Target("Loss beyond position 4096, `8k`: NSA − best baseline", found.best_baseline(far), 0, -0.02),
        Target("Loss on far recurrences, `8k`: NSA − best baseline", found.best_baseline(far_recurrences), 0, -0.02),
        Target("Recall, 16k and 3 hops: best baseline − NSA, points", found.best_baseline_recall(), 1, 0),
        Target("Needle retrieval, 8k: best baseline − NSA, points", found.best_baseline_needle(), 1, 0),
        Target("Training speedup, 300 million parameters, 32k", found.speedup(), 4, 5),
    ]
