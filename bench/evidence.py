#!/usr/bin/env python3
"""NSA beside full attention in training, from the runs to what they answer: everything that docs/evidence.md tells.

    bench/evidence.sh                                       all of it, on every GPU
    python bench/evidence.py 8k                             trains and measures whatever of the plan 8k is missing
    python bench/evidence.py 8k full recipe --limit 540     of two models, for 540 s; the next call goes on from there
    python bench/evidence.py --list                         plans and models, and which results are there
    python bench/evidence.py --missing                      PLAN MODEL SEED of each result that is not
    python tools/evidence.py                                the page and its pictures from the results

A plan is a length of training that all its models share, with the data, their order and the seed; what was trained is
then asked by `nsa eval` (and `needle`, where the plan says so). A result is a file PLAN.MODEL.SEED.json in --results,
written when its run has ended and has been measured; runs are kept in --out until then, and stay there. When all models
are measured, full attention is asked by the other sparse methods, too, if its runs are there. What follows `--` goes to
every `nsa train` (or `recall`), later options overriding the plan's: results that differ in it cannot stand beside each
other, so choose other --results, and another --out, as a run there that was trained with other options is refused.
"""

import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
METHODS = ("streaming", "h2o", "quest", "infllm", "clusterkv", "exact")
WHOLE = "--partial-rotary-factor 1"
MAIN = {
    "full": "--attention full",
    "full-gated": "--attention full --gated",
    "full-wide": "--attention full --equal-parameters",
    "window": "--attention window",
    "recipe": "",
    "whole-rotary": WHOLE,
    "no-selector-loss": f"{WHOLE} --selector-loss 0",
}
# `whole-rotary`, the recipe before half of the rotation, with one thing changed; then what differs in more.
VARIANTS = {
    name: f"{WHOLE} {change}"
    for name, change in {
        "blocks-32-16-64-16": "--kernel-size 32 --kernel-stride 16 --block-size 64 --topk 16",
        "blocks-16-8-32-32": "--kernel-size 16 --kernel-stride 8",
        "blocks-8-4-32-32": "--kernel-stride 4",
        "blocks-8-8-64-16": "--block-size 64 --topk 16",
        "separate-kv": "--separate-kv",
        "phi-mean": "--phi mean",
        "phi-linear": "--phi linear",
        "phi-common-rate": "--phi-lr-scale 1",
        "window-128": "--window-size 128",
        "window-256": "--window-size 256",
        "qk-norm": "--qk-norm",
        "last-layer-dense": "--dense-layers 7",
        "noise": "--noise 1",
        "gate-balance": "--gate-balance .1",
        "selector-loss-weak": "--selector-loss .03",
        "selector-loss-strong": "--selector-loss 1",
        "topk-64": "--topk 64",
    }.items()
} | {
    "paper-blocks-and-kv": "--preset paper --rope-theta 500000",
    "paper": "--preset paper",
    "full-partial-rotary": "--attention full --partial-rotary-factor .5",
}
# Look-ups beyond the window in the blocks of the recipe; the models are trained for it.
RECALL = (
    "--kernel-size 8 --kernel-stride 8 --block-size 32 --topk 32 --share-kv --rope-theta 500000 --pairs 64 "
    "--head-dim 64 --kv-heads 2 --lr .003 --tokens-per-step 16384 --steps 2000 --selector-loss 1 "
    "--partial-rotary-factor .5 --dtype bfloat16"
)
RECALLS = {
    "2k": "--length 2048",
    "4k": "--length 4096",
    "8k": "--length 8192",
    "16k": "--length 16384",
    "32k": "--length 32768",
    "64k": "--length 65536",
    "hops-8k": "--length 8192 --hops 3",
    "4k-no-selector-loss": "--length 4096 --selector-loss 0",
}
RECALLS |= {f"{name}-whole-rotary": f"{RECALLS[name]} {WHOLE}" for name in ("16k", "64k", "hops-8k")}


class Needle(NamedTuple):
    """A question in parts, one for each length, so that a call's limit loses little."""

    lengths: tuple[int, ...]
    depths: str
    samples: int


class Plan(NamedTuple):
    text: str
    train: str
    models: dict[str, str]
    seeds: tuple[int, ...] = (1, 2, 3)
    fewer: Mapping[str, int] = MappingProxyType({})  # models that have only so many of the seeds
    questions: tuple[str, ...] = ("eval", "inspect")  # to every model
    needle: Needle | None = None
    # Of `eval` and `needle`, what full attention is asked by every method, too; of a recall plan, the models.
    by_method: Mapping[str, Needle | None] = MappingProxyType({})
    command: str = "train"  # recall: which trains and asks NSA, full attention and the window by itself

    def seeds_of(self, model: str) -> tuple[int, ...]:
        return self.seeds[: self.fewer.get(model)]


def some(*names: str) -> dict[str, str]:
    return {name: (MAIN | VARIANTS)[name] for name in names}


JOINED = "--concat-by-folder --document-bytes 65536"
DEPTHS = "0,.1,.2,.3,.4,.5,.6,.7,.8,.9,1"
PLANS = {
    "8k": Plan(
        "bytes, 8192 of context, 5000 steps of 32768 (164 million bytes)",
        "--steps 5000",
        MAIN | some("window-128", "blocks-16-8-32-32", "blocks-8-4-32-32", "full-partial-rotary"),
        seeds=(1, 2, 3, 4, 5),
        fewer=dict.fromkeys(("full-gated", "window", "full-partial-rotary"), 3)
        | dict.fromkeys(("window-128", "blocks-16-8-32-32"), 1)
        | {"blocks-8-4-32-32": 4},
        by_method={"eval": None},
    ),
    "32k": Plan(
        "bytes, 32768 of context, 3000 steps of 32768 (98 million bytes)",
        "--steps 3000 --context 32768 --batch-size 1",
        some("full", "recipe", "whole-rotary", "no-selector-loss"),
        seeds=(1, 2, 3, 4, 5),
        fewer={"no-selector-loss": 1},
    ),
    "32k-time": Plan(
        "bytes, 32768 of context, 15 minutes",
        "--minutes 15 --context 32768 --batch-size 1 --eval-every 500",  # evaluations are not in the 15
        some("full", "recipe", "whole-rotary"),
    ),
    "pieces": Plan(
        "pieces (BPE, 4000), 8192 of context, 5000 steps of 32768 (164 million pieces)",
        "--steps 5000 --tokenizer {tokenizer}",
        some("full", "recipe", "whole-rotary", "no-selector-loss", "window-128", "qk-norm", "blocks-8-4-32-32")
        | some("full-partial-rotary"),
        seeds=tuple(range(1, 10)),
        fewer=dict.fromkeys(("no-selector-loss", "window-128", "qk-norm", "full-partial-rotary"), 1)
        | {"whole-rotary": 5, "blocks-8-4-32-32": 3},
    ),
    "recall": Plan(
        "64 pairs of a key and a value beyond the window",
        RECALL,
        RECALLS,
        seeds=(1, 2, 3, 4, 5),
        fewer=dict.fromkeys(("16k", "64k", "16k-whole-rotary", "64k-whole-rotary"), 3)
        | dict.fromkeys(("2k", "8k", "32k"), 2)
        | dict.fromkeys(("4k", "4k-no-selector-loss"), 1),
        by_method=dict.fromkeys(("2k", "16k", "hops-8k")),
        command="recall",
    ),
    "lookups": Plan(
        "bytes, 65536 of context, 1024 at first, 3600 steps of 65536, half of them look-ups, rotary base 1 million",
        "--steps 3600 --batch-size 1 --context 65536 --context-warmup 1024 --eval-every 1000 --retrieval-fraction .5 "
        f"--selector-queries 128 --rope-theta 1000000 {JOINED}",
        some("recipe", "whole-rotary", "blocks-8-4-32-32"),
        fewer=dict.fromkeys(("whole-rotary", "blocks-8-4-32-32"), 1),
        needle=Needle((8192, 16384, 32768, 65536), DEPTHS, 25),
    ),
    "lookups-8k": Plan(
        "bytes, 8192 of context, 1024 at first, 5000 steps of 32768, a quarter of them look-ups",
        "--steps 5000 --batch-size 4 --context-warmup 1024 --eval-every 500 --retrieval-fraction .25 " + JOINED,
        some("recipe", "whole-rotary", "blocks-8-4-32-32", "window", "full"),
        fewer=dict.fromkeys(("whole-rotary", "blocks-8-4-32-32", "window"), 1),
        needle=Needle((8192,), DEPTHS, 100),
        by_method={"needle": Needle((8192,), "0,.3,.6,.9", 5)},  # H2O goes token by token
    ),
    "speed": Plan(
        "300 million parameters, bytes, 32768 of context, 12 steps",
        "--steps 12 --context 32768 --batch-size 1 --hidden-size 1024 --layers 18 --heads 16 --kv-heads 1 "
        f"--head-dim 128 --ffn-size 3072 {JOINED} --log-every 3 --eval-every 0 "
        "--eval-tokens 32768 --save-every 0",
        some("full", "full-gated", "recipe", "whole-rotary", "no-selector-loss"),
        seeds=(1,),
        questions=(),
    ),
    "8k-long": Plan(
        "bytes, 8192 of context, 9200 steps (301 million bytes)",
        "--steps 9200",
        some("full", "recipe", "whole-rotary"),
        seeds=(1,),
    ),
    "ablations": Plan(
        "bytes, 8192 of context, 1500 steps (49 million bytes)",
        "--steps 1500",
        some("full", "recipe", "whole-rotary", "window", "no-selector-loss") | VARIANTS,
        seeds=(1,),
    ),
    "ablations-pieces": Plan(
        "pieces (BPE, 4000), 8192 of context, 1500 steps (49 million pieces)",
        "--steps 1500 --tokenizer {tokenizer}",
        some("full", "recipe", "whole-rotary", "no-selector-loss"),
        seeds=(1,),
    ),
}


def make_tokenizer(folder: Path) -> Path:
    """A SentencePiece model of 4000 pieces from the Python sources that `nsa train` has as its default data."""
    import sentencepiece

    model = folder / "pieces.model"
    own = folder / f"pieces-{os.getpid()}"  # of two processes at once
    if model.exists():
        return model
    files = sorted({file for name in ("stdlib", "purelib") for file in Path(sysconfig.get_path(name)).rglob("*.py")})
    random.Random(1).shuffle(files)
    lines = (line for file in files[:3000] for line in file.read_text(errors="ignore").splitlines(keepends=True))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(own),
        vocab_size=4000,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        input_sentence_size=1000000,
        user_defined_symbols=["\n"],
        minloglevel=1,
    )
    own.with_suffix(".vocab").unlink()
    own.with_suffix(".model").replace(model)
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
        self.about = {"command": shlex.join(["bench/evidence.py", *sys.argv[1:]]), "commit": commit(), **machine()}

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
        options = merged(plan.train.split(), plan.models[model].split(), self.given.options)
        wanted = shlex.join(options) + "\n"
        trained_with = folder.with_name(f"{folder.name}.options")
        found = trained_with.read_text() if trained_with.exists() else "nobody knows which\n"
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

    def ask(self, folder: Path, *question: str) -> dict:
        """The JSON that one of the program's questions gives of a run that has ended; asked once."""
        answer = folder / f"{'_'.join(question).replace('-', '')}.json"
        if not answer.exists():
            temporary = folder / "answer.json"
            self.nsa(question[0], folder, *question[1:], "--json", temporary)
            temporary.replace(answer)
        return json.loads(answer.read_text())

    def find(self, folder: Path, needle: Needle, *method: str) -> dict:
        """What `nsa needle` gives, asked in parts."""
        needle = needle._replace(
            lengths=self.given.lengths or needle.lengths, samples=self.given.samples or needle.samples
        )
        dtype = ["--dtype", "bfloat16"] if self.about["gpu"] else []
        options = ["--depths", needle.depths, "--samples", str(needle.samples), *dtype, *method]
        parts = [self.ask(folder, "needle", "--lengths", str(length), *options) for length in needle.lengths]
        return parts[0] | {
            name: [row for part in parts for row in part[name]]
            for name, value in parts[0].items()
            if isinstance(value, list) and name not in ("depths", "set")
        }

    def measure(self, name: str, plan: Plan, model: str, seed: int) -> dict:
        folder = self.given.out / f"{name}.{model}.{seed}"
        result: dict[str, Any] = {
            "plan": name,
            "text": plan.text,
            "model": model,
            "seed": seed,
            "options": plan.models[model],
            plan.command: shlex.join(merged(plan.train.split(), self.given.options)),
            **self.about,
        }
        if plan.command == "recall":
            folder.mkdir(parents=True, exist_ok=True)
            options = merged(plan.train.split(), plan.models[model].split(), self.given.options)
            methods = ["--method", ",".join(METHODS)] if model in plan.by_method else []
            self.nsa("recall", "--seed", seed, *options, *methods, "--json", folder / "recall.json")
            return result | {"answer": json.loads((folder / "recall.json").read_text())}
        self.train(plan, model, seed, folder)
        config = json.loads((folder / "config.json").read_text())
        lines = metrics(folder)
        steps = [line for line in lines if line["kind"] == "train"]
        if not steps:
            raise SystemExit(
                f"{folder}: no step was logged: --log-every must be at most the steps, and metrics.jsonl whole"
            )
        fields = ("step", "tokens", "seconds", "loss")
        result |= {
            "fingerprint": config["fingerprint"],
            "context": config["train"]["context"],
            "parameters": config["parameters"],
            "selected_tokens": config["model"]["topk"] * config["model"]["block_size"],
            "tokens_per_second": statistics.median(line["tokens_per_second"] for line in steps[1:] or steps),
            "curve": [{field: line[field] for field in fields} for line in lines if line["kind"] == "eval"],
        }
        if "eval" in plan.questions:
            result["eval"] = self.ask(folder, "eval")
        if "inspect" in plan.questions and config["model"]["attention"] == "nsa":
            layers = self.ask(folder, "inspect")["layers"]
            result["choice"] = [[head["recall"] for head in layer["kv_heads"]] for layer in layers]
        if plan.needle:
            result["needle"] = self.find(folder, plan.needle)
        return result

    def by_method(self, name: str, plan: Plan, model: str, seed: int) -> dict:
        """Of full attention: what `measure` leaves to the end, as the methods take minutes each."""
        folder = self.given.out / f"{name}.{model}.{seed}"
        return {
            f"{question}_by_method": {
                method: self.find(folder, needle, "--method", method)
                if needle
                else self.ask(folder, question, "--method", method)
                for method in METHODS
            }
            for question, needle in plan.by_method.items()
        }


def metrics(folder: Path) -> list[dict]:
    """The lines of a run's metrics, but one at the end that a kill has torn."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def finished(folder: Path) -> bool:
    lines = metrics(folder)
    return bool(lines) and lines[-1]["kind"] == "end" and lines[-1]["reason"] == "finished"


def complete(file: Path, plan: Plan, model: str) -> bool:
    """Is the result there, the answers by method with it?"""
    if not file.exists():
        return False
    if plan.command == "recall" or model != "full" or not plan.by_method:
        return True
    result = json.loads(file.read_text())
    return all(f"{question}_by_method" in result for question in plan.by_method)


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


def rounded(value: Any) -> Any:
    """Losses to seven digits: they are sums of float32."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("plan", nargs="?", choices=PLANS)
    option("models", nargs="*", help="without: all of the plan")
    option("--seeds", type=int, nargs="+", help="without: those of the plan")
    option("--limit", type=float, help="seconds; then the run in progress is saved and the call ends with code 3")
    option("--spare", type=float, default=60, help="seconds of --limit kept for the questions after training")
    option("--nsa", type=Path, default=ROOT / "build" / "bin" / "nsa", help="the program")
    option("--out", type=Path, default=ROOT / "build" / "evidence", help="folder of the runs")
    option("--results", type=Path, default=ROOT / "bench" / "results" / "evidence")
    option("--lengths", type=int, nargs="+", help="contexts of `nsa needle` instead of the plan's")
    option("--samples", type=int, help="of `nsa needle` instead of the plan's")
    option("--list", action="store_true")
    option("--missing", action="store_true")
    own = sys.argv[1:]
    split = own.index("--") if "--" in own else len(own)
    given = parser.parse_args(own[:split])
    given.options = own[split + 1 :]
    if given.missing:
        jobs = [
            (seed, place, f"{name} {model} {seed}")
            for place, (name, plan) in enumerate(PLANS.items())
            for model in plan.models
            for seed in given.seeds or plan.seeds_of(model)
            if given.plan in (None, name) and (not given.models or model in given.models)
            if not complete(given.results / f"{name}.{model}.{seed}.json", plan, model)
        ]
        print(*(job for _, _, job in sorted(jobs, key=lambda job: job[:2])), sep="\n", end="\n" if jobs else "")
        return 0
    if given.list or not given.plan:
        for name, plan in PLANS.items():
            print(f"{name}: {plan.text}")
            for model, options in plan.models.items():
                there = sorted(given.results.glob(f"{name}.{model}.*.json"))
                seeds = ", ".join(file.name.split(".")[-2] for file in there)
                print(f"  {model:22} {options:62} {'seeds ' + seeds if seeds else ''}".rstrip())
        return 0
    plan = PLANS[given.plan]
    for model in given.models:
        if model not in plan.models:
            parser.error(f"models: {model!r}: must be one of {', '.join(plan.models)}")
    given.out.mkdir(parents=True, exist_ok=True)
    given.results.mkdir(parents=True, exist_ok=True)
    runs = Runs(given)

    def write(file: Path, result: dict) -> None:
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(rounded(result)) + "\n")
        temporary.replace(file)

    wanted = {
        given.results / f"{given.plan}.{model}.{seed}.json": (given.plan, plan, model, seed)
        for seed in given.seeds or plan.seeds
        for model in given.models or plan.models
        if given.seeds or seed in plan.seeds_of(model)
    }
    try:
        for file, which in wanted.items():
            if not file.exists():
                print(f"\n== {file.stem}", flush=True)
                write(file, runs.measure(*which))
        for file, which in wanted.items():
            if not complete(file, plan, which[2]):
                if not finished(given.out / file.stem):  # the run is gone: its methods are those of another one
                    write(file, runs.measure(*which))
                write(file, json.loads(file.read_text()) | runs.by_method(*which))
    except Stopped:
        print("stopped; the same command goes on", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
