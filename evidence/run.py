#!/usr/bin/env python3
"""Trains and evaluates the models of a plan, and writes their results.

    evidence/run.sh                                         every plan, on every GPU
    python -m evidence.run 8k                               what the plan 8k is missing
    python -m evidence.run 8k full recipe-2 --limit 540     two models, for 540 s; the same command continues
    python -m evidence.run --list                           plans, models and the results that exist
    python -m evidence.run --missing                        PLAN MODEL SEED of each result that does not
    python -m evidence.page                                 the pages and pictures from the results

All models of a plan (plans.py) share the length of training, the data, their order and the seed. `nsa eval`, `inspect`
and, where the plan has it, `needle` evaluate what was trained. A result is a line of PLAN.jsonl in --results, written
when its run has ended and has been evaluated. --out has the runs. When all models are evaluated, full attention is
evaluated with the training-free sparse baselines too, if its runs exist.

What follows `--` goes to every `nsa train` (or `recall`); later options override the plan's. Results that differ in it
are not comparable and are refused: choose another --results, and another --out, too.
"""

import argparse
import io
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from evidence import results as stored
from evidence.plans import BASELINES, PLANS, Needle, Plan

ROOT = stored.ROOT


def make_tokenizer(folder: Path) -> Path:
    """A BPE model of 4000 tokens from the Python sources that `nsa train` has as its default data."""
    import sentencepiece

    model = folder / "bpe.model"
    if model.exists():
        return model
    trained = io.BytesIO()  # a model that the library writes to a file has the file's name in it
    files = sorted({file for name in ("stdlib", "purelib") for file in Path(sysconfig.get_path(name)).rglob("*.py")})
    random.Random(1).shuffle(files)
    lines = (line for file in files[:3000] for line in file.read_text(errors="ignore").splitlines(keepends=True))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=trained,
        vocab_size=4000,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        input_sentence_size=1000000,
        user_defined_symbols=["\n"],
        minloglevel=1,
    )
    own = folder / f"bpe-{os.getpid()}.model"  # of two processes at once
    own.write_bytes(trained.getvalue())
    own.replace(model)
    return model


def merged(*parts: list[str]) -> list[str]:
    """Options of which later ones take the place of earlier ones."""
    options: dict[str, list[str]] = {}
    for word in (word for part in parts for word in part):
        if word.startswith("--"):
            options.pop(word, None)
            options[word] = []
        else:
            options[list(options)[-1]].append(word)
    return [word for name, values in options.items() for word in (name, *values)]


class Stopped(Exception):
    """--limit has passed, or Ctrl-C."""


class Runs:
    def __init__(self, given: argparse.Namespace):
        self.given = given
        self.end = time.monotonic() + given.limit if given.limit else None
        self.about = {"command": shlex.join(["evidence.run", *sys.argv[1:]]), "commit": commit(), **machine()}

    def nsa(self, *arguments: object, spare: float = 0) -> None:
        """Runs the program; ends it `spare` seconds before the limit."""
        left = None if self.end is None else self.end - spare - time.monotonic()
        if left is not None and left <= 0:
            raise Stopped
        process = subprocess.Popen([self.given.nsa, *map(str, arguments)])
        try:
            code = process.wait(timeout=left)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as stop:
            process.terminate()
            process.wait()  # it saves a checkpoint
            raise Stopped from stop
        if code:
            raise SystemExit(f"nsa {shlex.join(map(str, arguments))}: exit code {code}")

    def train(self, plan: Plan, model: str, seed: int, folder: Path) -> None:
        options = merged(plan.options.split(), plan.models[model].split(), self.given.options)
        wanted = shlex.join(options) + "\n"
        trained_with = folder.with_name(f"{folder.name}.options")
        found = trained_with.read_text() if trained_with.exists() else "unknown\n"
        begun = (folder / "model.safetensors").exists()
        if begun and found != wanted:
            raise SystemExit(
                f"{folder} was trained with other options: delete it, or choose another --out\n"
                f"  it has: {found}  wanted: {wanted.rstrip()}"
            )
        if finished(folder):
            return
        spare = self.given.spare
        if begun:
            self.nsa("train", "--resume", "--out", folder, spare=spare)
        else:
            trained_with.write_text(wanted)
            if "{tokenizer}" in options:
                options[options.index("{tokenizer}")] = str(make_tokenizer(self.given.out))
            self.nsa("train", "--out", folder, "--overwrite", "--seed", seed, *options, spare=spare)
        if not finished(folder):
            raise Stopped

    def evaluate(self, folder: Path, *command: str) -> dict:
        """The JSON of one of the program's evaluations of a run that has ended; evaluated once."""
        answer = folder / f"{'_'.join(command).replace('-', '')}.json"
        if not answer.exists():
            temporary = folder / "answer.json"
            self.nsa(command[0], folder, *command[1:], "--json", temporary)
            temporary.replace(answer)
        return json.loads(answer.read_text())

    def needle(self, folder: Path, needle: Needle, *more: str) -> dict:
        """Results of `nsa needle`, one call for each length, and of its tasks."""
        needle = needle._replace(
            lengths=self.given.lengths or needle.lengths, samples=self.given.samples or needle.samples
        )
        dtype = ["--dtype", "bfloat16"] if self.about["gpu"] else []
        options = ["--depths", needle.depths, "--samples", str(needle.samples), *dtype, *more]
        parts = [self.evaluate(folder, "needle", "--lengths", str(length), *options) for length in needle.lengths]
        found = [stored.compact_needle(part) for part in parts]
        lists = ("lengths", "accuracy", "interval")
        own = found[0] | {name: [row for part in found for row in part[name]] for name in lists}
        tasks = {task: self.needle(folder, needle._replace(tasks=()), *more, "--task", task) for task in needle.tasks}
        return own | ({"tasks": tasks} if tasks else {})

    def shared(self, plan: Plan) -> dict:
        """Settings that all results of a plan share."""
        return {"command": plan.command, "options": shlex.join(merged(plan.options.split(), self.given.options))}

    def measure(self, name: str, plan: Plan, model: str, seed: int) -> tuple[dict, dict]:
        """(What the result shares with the plan's others, the result)."""
        folder = self.given.out / f"{name}.{model}.{seed}"
        shared: dict[str, Any] = self.shared(plan)
        stored.check_shared(self.given.results, name, shared)
        result: dict[str, Any] = {"model": model, "seed": seed, "options": plan.models[model], **self.about}
        if plan.command == "recall":
            folder.mkdir(parents=True, exist_ok=True)
            options = merged(plan.options.split(), plan.models[model].split(), self.given.options)
            baselines = ["--baseline", ",".join(BASELINES)] if model in plan.by_baseline else []
            self.nsa("recall", "--seed", seed, *options, *baselines, "--json", folder / "recall.json")
            return shared, result | stored.compact_recall(json.loads((folder / "recall.json").read_text()))
        self.train(plan, model, seed, folder)
        config = json.loads((folder / "config.json").read_text())
        lines = metrics(folder)
        steps = [line for line in lines if line["kind"] == "train"]
        if not steps:
            raise SystemExit(
                f"{folder}: no step was logged: --log-every must be at most the steps, and metrics.jsonl whole"
            )
        shared["context"] = config["train"]["context"]
        if "--tokenizer" not in plan.options:  # that of a tokenizer is of its file; equal rows have equal tokens
            shared["fingerprint"] = config["fingerprint"]
        result |= {
            "parameters": config["parameters"]["total"],
            "selected_tokens": config["model"]["topk"] * config["model"]["block_size"],
            "tokens_per_second": statistics.median(line["tokens_per_second"] for line in steps[1:] or steps),
            "curve": [[line["tokens"], line["loss"]] for line in lines if line["kind"] == "eval"],
        }
        if "eval" in plan.evaluations:
            shared["rows"], result["eval"] = stored.compact_eval(self.evaluate(folder, "eval"))
        if "inspect" in plan.evaluations and config["model"]["attention"] == "nsa":
            layers = self.evaluate(folder, "inspect")["layers"]
            heads = [[head["selection_recall"] for head in layer["kv_heads"]] for layer in layers]
            result["selection_recall"] = stored.compact_selection(heads)
        if plan.needle:
            result["needle"] = self.needle(folder, plan.needle)
        return shared, result

    def by_baseline(self, name: str, plan: Plan, model: str, seed: int) -> dict:
        """Evaluations of full attention with the baselines, after all others because each takes minutes."""
        folder = self.given.out / f"{name}.{model}.{seed}"
        return {
            f"{evaluation}_by_baseline": {
                baseline: self.needle(folder, needle, "--baseline", baseline)
                if needle
                else stored.compact_eval(self.evaluate(folder, evaluation, "--baseline", baseline))[1]
                for baseline in BASELINES
            }
            for evaluation, needle in plan.by_baseline.items()
        }


def metrics(folder: Path) -> list[dict]:
    """The lines of a run's metrics, but one at the end that a kill has torn."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def finished(folder: Path) -> bool:
    lines = metrics(folder)
    return bool(lines) and lines[-1]["kind"] == "end" and lines[-1]["reason"] == "finished"


def commit() -> str | None:
    if given := os.environ.get("COMMIT"):
        return given
    done = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or None


def machine() -> dict[str, str | None]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu: str | None
    driver: str | None
    try:
        gpu, driver = subprocess.check_output(query, text=True).splitlines()[0].split(", ")
    except (OSError, subprocess.CalledProcessError, IndexError):
        gpu = driver = None
    return {"gpu": gpu, "driver": driver, "date": time.strftime("%Y-%m-%d")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("plan", nargs="?", choices=PLANS)
    option("models", nargs="*", help="models to run (default: all of the plan)")
    option("--seeds", type=int, nargs="+", help="seeds (default: those of the plan)")
    option("--limit", type=float, help="time limit, seconds; saves the run in progress and exits with code 3")
    option("--spare", type=float, default=60, help="seconds of --limit reserved for the evaluations after training")
    option("--nsa", type=Path, default=ROOT / "build" / "bin" / "nsa", help="path of the program nsa")
    option("--out", type=Path, default=ROOT / "build" / "evidence", help="folder of the runs (default: build/evidence)")
    option("--results", type=Path, default=stored.RESULTS)
    option("--lengths", type=int, nargs="+", help="context lengths of nsa needle, tokens (default: those of the plan)")
    option("--samples", type=int, help="samples of nsa needle (default: those of the plan)")
    option("--list", action="store_true")
    option("--missing", action="store_true")
    own = sys.argv[1:]
    split = own.index("--") if "--" in own else len(own)
    given = parser.parse_args(own[:split])
    given.options = own[split + 1 :]
    there = {name: stored.read(given.results, name)[1] for name in PLANS}
    if given.missing:
        jobs = [
            (seed, place, f"{name} {model} {seed}")
            for place, (name, plan) in enumerate(PLANS.items())
            for model in plan.models
            for seed in given.seeds or plan.seeds_of(model)
            if given.plan in (None, name) and (not given.models or model in given.models)
            if not stored.complete(there[name], plan, model, seed)
        ]
        print(*(job for _, _, job in sorted(jobs, key=lambda job: job[:2])), sep="\n", end="\n" if jobs else "")
        return 0
    if given.list or not given.plan:
        for name, plan in PLANS.items():
            print(f"{name}: {plan.title}")
            for model, options in plan.models.items():
                seeds = ", ".join(str(seed) for found, seed in there[name] if found == model)
                print(f"  {model:22} {options:62} {'seeds ' + seeds if seeds else ''}".rstrip())
        return 0
    plan = PLANS[given.plan]
    for model in given.models:
        if model not in plan.models:
            parser.error(f"models: {model!r}: must be one of {', '.join(plan.models)}")
    given.out.mkdir(parents=True, exist_ok=True)
    given.results.mkdir(parents=True, exist_ok=True)
    runs = Runs(given)

    wanted = [
        (given.plan, plan, model, seed)
        for seed in given.seeds or plan.seeds
        for model in given.models or plan.models
        if given.seeds or seed in plan.seeds_of(model)
    ]

    def found() -> dict:
        return stored.read(given.results, given.plan)[1]

    def measure(which: tuple) -> None:
        stored.write(given.results, given.plan, *runs.measure(*which))

    try:
        for which in wanted:
            if which[2:] not in found():
                print(f"\n== {given.plan}.{which[2]}.{which[3]}", flush=True)
                measure(which)
        for which in wanted:
            model, seed = which[2:]
            if not stored.complete(found(), plan, model, seed):
                if not finished(given.out / f"{given.plan}.{model}.{seed}"):  # the baselines need this run, not another
                    measure(which)
                result = found()[model, seed] | runs.by_baseline(*which)
                stored.write(given.results, given.plan, runs.shared(plan), result)
    except Stopped:
        spent = given.limit and given.limit <= given.spare
        why = f"--limit {given.limit:g}: not more than --spare, {given.spare:g}: trains nothing" if spent else "stopped"
        print(f"{why}; the same command continues", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
