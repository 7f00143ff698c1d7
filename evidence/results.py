"""Results of a plan: PLAN.jsonl, a line of what its runs share, then a line for each model and seed.

Results of a run are stored as far as the pages and statistics use it. Shared are the plan's options, the data's
fingerprint, and the number of tokens in each held-out row, by part; a run that differs there is refused.
"""

import fcntl
import json
import os
import statistics
from contextlib import contextmanager
from pathlib import Path

from evidence.plans import BASE, BASELINES, PLANS, RECIPE, WINDOW
from evidence.statistics import all_tokens, beyond, difference, retained_gain

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "evidence" / "results"
PARTS = {  # of an evaluation, and where a kept part begins: octaves of positions, and near, far and no recurrences
    "by_position": lambda low: low & (low - 1) == 0,
    "by_recurrence": lambda low: low == 0 or low > 4096,
}


def grouped(bounds, begins):
    """Parts put together, a new one wherever `begins(low)`: (low, high, places) of each."""
    found = []
    for place, (low, high) in enumerate(bounds):
        if found and not begins(low):
            found[-1] = (found[-1][0], high, [*found[-1][2], place])
        else:
            found.append((low, high, [place]))
    return found


def compact_eval(answer):
    """(values that runs share, values of this run) of the JSON of `nsa eval`."""
    rows = answer["rows"]
    bounds = {name: [(part["from"], part["to"]) for part in answer[f"loss_{name}"]] for name in PARTS}
    groups = {name: grouped(bounds[name], begins) for name, begins in PARTS.items()}
    shared = {"tokens": [row["tokens"] for row in rows]}
    own = {"loss": answer["loss"], "bits_per_byte": answer["bits_per_byte"], "nats": [row["loss"] for row in rows]}
    for name, found in groups.items():
        shared[name] = {
            "bounds": [[low, high] for low, high, _ in found],
            "tokens": [[sum(row[name]["tokens"][i] for i in places) for _, _, places in found] for row in rows],
        }
        own[name] = [[sum(row[name]["loss"][i] for i in places) for _, _, places in found] for row in rows]
    return shared, own


def compact_selection(layers):
    """Selection recall by layer and KV head: of the selected blocks, of the oracle, of random ones."""
    kinds = ("selected", "oracle", "random")
    return [[[round(head[kind], 4) for kind in kinds] if head else [] for head in layer] for layer in layers]


def compact_needle(answer):
    """Retrieval accuracy by length and depth, with its interval, of the JSON of `nsa needle`."""
    kept = {name: answer[name] for name in ("lengths", "depths", "samples", "lines") if name in answer}
    return kept | {"accuracy": answer["exact"], "interval": answer["exact_interval"]}


def compact_recall(answer):
    """Scores and training settings in the JSON of `nsa recall`."""
    return {name: answer[name] for name in ("steps", "seconds", "chance", "distances", "lengths", "scores")}


def rounded(value):
    """Numbers to seven digits: losses are sums of float32."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def read(folder, plan):
    """({what the runs share}, {(model, seed): result}); evaluations know their rows."""
    file = folder / f"{plan}.jsonl"
    if not file.exists():
        return {}, {}
    shared, *results = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    for result in results:
        for evaluation in [result.get("eval"), *result.get("eval_by_baseline", {}).values()]:
            if evaluation:
                evaluation["rows"] = shared["rows"]
    return shared, {(result["model"], result["seed"]): result for result in results}


@contextmanager
def locked(folder):
    """One writer at a time."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def check_shared(folder, plan, shared):
    """Refuses a run that differs from those that are there in what they share."""
    for field, there in read(folder, plan)[0].items():
        here = shared.get(field, there)
        if here != there:
            told = "" if field == "rows" else f": {here!r}, there {there!r}"
            raise SystemExit(f"{folder / plan}.jsonl: {field} of this run differs from the results there{told}")


def write(folder, plan, shared, result):
    """Adds or replaces a result."""
    order = list(PLANS[plan].models)
    with locked(folder):
        shared = rounded(shared)
        check_shared(folder, plan, shared)
        there, results = read(folder, plan)
        results[result["model"], result["seed"]] = rounded(result)
        ordered = sorted(results.values(), key=lambda each: (order.index(each["model"]), each["seed"]))
        for each in ordered:
            for evaluation in [each.get("eval"), *each.get("eval_by_baseline", {}).values()]:
                if evaluation:
                    evaluation.pop("rows", None)
        temporary = folder / f"{plan}.tmp"
        with temporary.open("w", encoding="utf-8") as file:
            for line in ({"plan": plan} | there | shared, *ordered):
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
        temporary.replace(folder / f"{plan}.jsonl")


def complete(results, plan, model, seed):
    """Is the result there, with the evaluations by baseline?"""
    if (model, seed) not in results:
        return False
    if plan.command == "recall" or model != BASE:
        return True
    return all(f"{evaluation}_by_baseline" in results[model, seed] for evaluation in plan.by_baseline)


class Results:
    """Results of one plan: results[model][seed], models in the plan's order."""

    def __init__(self, name, shared, results):
        self.name, self.plan, self.shared = name, PLANS[name], shared
        self.all = list(results.values())
        self.models = {}
        for (model, seed), result in results.items():
            self.models.setdefault(model, {})[seed] = result
        self.trained = dict(self.models)
        for seed, result in self.models.get(BASE, {}).items():
            for baseline, evaluation in result.get("eval_by_baseline", {}).items():
                self.models.setdefault(by_baseline(baseline), {})[seed] = {"eval": evaluation}
        if self.plan.command == "train" and ("--minutes" in shared["options"] or not self.plan.evaluations):
            found = sorted({str(result["gpu"]) for result in self.all})
            if len(found) > 1:
                raise SystemExit(f"{name}.jsonl: gpu: results of a plan about time differ: {found}")
        gpus = [result["gpu"] for result in self.models.get(RECIPE, {}).values() or self.all]
        self.gpu = max(dict.fromkeys(gpus), key=gpus.count)

    def timed(self, model):
        """The results whose times are comparable: of the GPU of most of the recipe's, or of all without it.

        Without a rate: the machine did other work meanwhile.
        """
        results = self.trained.get(model, {}).values()
        return [result for result in results if result["gpu"] == self.gpu and result["tokens_per_second"]]

    def tokens_per_second(self, model):
        speeds = [result["tokens_per_second"] for result in self.timed(model)]
        return statistics.median_high(speeds) if speeds else None

    def common(self, *models):
        """The seeds that all of the models have."""
        return sorted(set.intersection(*(set(self.models.get(name, {})) for name in models)))

    def evaluations(self, *models):
        """Evaluations of the common seeds, a list for each model."""
        return [[self.models[name][seed]["eval"] for seed in self.common(*models)] for name in models]

    def difference(self, model, other=BASE, of=all_tokens):
        ours, theirs = self.evaluations(model, other)
        return None if model == other or not ours else difference(ours, theirs, of)

    def difference_of_seed(self, model, other, seed, of):
        """The mean alone, of one seed; None without such tokens."""
        found = difference([self.models[model][seed]["eval"]], [self.models[other][seed]["eval"]], of)
        return found and found[0]

    def retained(self, model):
        """The retained long-range gain at all positions, and beyond the selected tokens; () without its models."""
        seeds = self.common(model, BASE, WINDOW)
        if not seeds or model in (BASE, WINDOW):
            return ()
        evaluations = self.evaluations(model, BASE, WINDOW)
        selected = self.models[WINDOW][min(seeds)]["selected_tokens"]
        return retained_gain(*evaluations), retained_gain(*evaluations, beyond(selected))

    def scores(self, task, kind):
        """Accuracies of a model or baseline in a task of the plan `recall`, one for each seed that has it."""
        seeds = self.models.get(task, {}).values()
        return [result["scores"][kind]["accuracy"] for result in seeds if kind in result["scores"]]

    def needles(self):
        """(model, seed, its retrieval), the baselines last."""
        for model, seeds in self.trained.items():
            for seed, result in seeds.items():
                if "needle" in result:
                    yield model, seed, result["needle"]
        for seed, result in self.models.get(BASE, {}).items():
            for baseline, answer in result.get("needle_by_baseline", {}).items():
                yield by_baseline(baseline), seed, answer

    def retrieval(self, seeds=None):
        """Retrieval accuracy by model and baseline (of these seeds), over the depths at which all were evaluated."""
        found = [(model, answer) for model, seed, answer in self.needles() if seeds is None or seed in seeds]
        depths = set.intersection(*(set(answer["depths"]) for _, answer in found)) if found else set()
        values = {}
        for model, answer in found:
            for line in answer["accuracy"]:
                at_depths = zip(answer["depths"], line, strict=True)
                values.setdefault(model, []).extend(value for depth, value in at_depths if depth in depths)
        return {model: statistics.mean(value) for model, value in values.items() if value}


def by_baseline(baseline):
    return f"{BASE} + {BASELINES[baseline]}"


def is_baseline(model):
    return model.startswith(f"{BASE} + ")


def read_all(folder):
    """Results by plan; a plan that has full attention alone has nothing to compare it with, and is left out."""
    found = {name: read(folder, name) for name in PLANS}
    plans = {name: Results(name, shared, results) for name, (shared, results) in found.items() if results}
    return {name: results for name, results in plans.items() if list(results.models) != [BASE]}
