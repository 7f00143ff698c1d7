"""bench/evidence.py and the page that tools/evidence.py makes of its results."""

import importlib.util
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import PROGRAM, ROOT, nsa

SMALL = (
    "--layers 1 --hidden-size 32 --heads 2 --kv-heads 1 --head-dim 16 --context 256 --batch-size 1 --window-size 32 "
    "--kernel-size 8 --kernel-stride 4 --block-size 16 --topk 4 --held-out-percent 20 --eval-every 8 --threads 1"
).split()


@pytest.fixture(scope="module")
def page_maker():
    spec = importlib.util.spec_from_file_location("evidence_page", ROOT / "tools" / "evidence.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "tools"))  # as when it runs as a program
    spec.loader.exec_module(module)
    return module


def evidence(folder, corpus, *arguments, options=(), code=0):
    command = [sys.executable, ROOT / "bench" / "evidence.py", *arguments, "--nsa", PROGRAM, "--out", folder / "out"]
    command += ["--results", folder / "results", "--", "--data", corpus, *SMALL, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # these models are too small to share
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == code, done.stderr
    return done


def write_page(folder, *options, code=0):
    command = [sys.executable, ROOT / "tools" / "evidence.py", "--results", folder / "results"]
    done = subprocess.run([*command, "--page", folder / "evidence.md", *options], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stderr + done.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("evidence")
    for plan in ("8k", "ablations"):  # of one model without methods, in the second plan
        models = ["full", "recipe", "window"] if plan == "8k" else ["full", "last-layer-dense"]
        options = ["--steps", 16, *(["--layers", 8] if plan == "ablations" else [])]
        evidence(folder, corpus, plan, *models, "--seeds", 1, 2, options=options)
    return folder


def results(folder, plan="8k"):
    files = sorted((folder / "results").glob(f"{plan}.*.json"))
    return {tuple(file.name.split(".")[1:3]): json.loads(file.read_text()) for file in files}


def test_a_difference_of_one_seed_is_that_of_the_program(measured, page_maker, tmp_path):
    out = measured / "out"
    nsa("eval", out / "8k.recipe.1", "--against", out / "8k.full.1", "--window", out / "8k.window.1", "--json",
        tmp_path / "x")  # fmt: skip
    expected = json.loads((tmp_path / "x").read_text())
    found = {model: [results(measured)[model, "1"]["eval"]] for model in ("recipe", "full", "window")}
    mean, half = page_maker.difference(found["recipe"], found["full"])
    assert mean == pytest.approx(expected["against"]["difference"], abs=1e-6)
    assert half == pytest.approx(expected["against"]["half_width"], rel=1e-3)
    kept = page_maker.share_kept(found["recipe"], found["full"], found["window"])
    assert (kept is None) == (expected["window"]["kept"] is None)
    assert kept is None or kept == pytest.approx(expected["window"]["kept"], rel=1e-3)


def test_a_difference_of_two_seeds(measured, page_maker):
    found = results(measured)
    ours, theirs = ([found[model, seed]["eval"] for seed in "12"] for model in ("recipe", "full"))
    seeds = [a["loss"] - b["loss"] for a, b in zip(ours, theirs, strict=True)]
    mean, half = page_maker.difference(ours, theirs)
    assert mean == pytest.approx(statistics.mean(seeds), abs=1e-6)
    over_seeds = page_maker.student(1) * statistics.stdev(seeds) / math.sqrt(2)
    over_rows = page_maker.difference([ours[0]], [theirs[0]])[1]
    assert half >= over_seeds * 0.999 and half < over_seeds + over_rows
    parts = [page_maker.parts("by_position", lambda low, high, at=at: low == at) for at in (0, 16, 128)]
    assert all(page_maker.difference(ours, ours, of) in (None, (0, 0)) for of in parts)
    new = page_maker.parts("by_repeat", lambda low, high: high == 0)
    assert page_maker.loss(ours, new) == pytest.approx(
        statistics.mean(part["loss"] for e in ours for part in e["loss_by_repeat"] if part["to"] == 0), rel=1e-5
    )


def test_the_page(measured):
    write_page(measured)
    page = (measured / "evidence.md").read_text()
    found = results(measured)
    mean = statistics.mean(found["recipe", seed]["eval"]["loss"] for seed in "12")
    assert f"| recipe | {mean:.4f} |" in page and "| full by quest |" in page
    assert "`--partial-rotary-factor 1 --dense-layers 7`" in page
    assert (measured / "images" / "evidence.png").stat().st_size > 10000
    assert write_page(measured, "--check") == ""
    (measured / "evidence.md").write_text(page.replace("recipe", "receipt"))
    assert "is not what" in write_page(measured, "--check", code=1)


def test_what_is_done_is_not_done_again(measured, corpus):
    before = {file: file.stat().st_mtime_ns for file in (measured / "results").iterdir()}
    evidence(measured, corpus, "8k", "full", "recipe", "window", "--seeds", 1, 2, options=["--steps", 16])
    assert before == {file: file.stat().st_mtime_ns for file in (measured / "results").iterdir()}


def test_a_run_of_other_options_is_not_taken(measured, corpus, tmp_path):
    """Neither one that has ended nor one to be resumed."""
    shutil.copytree(measured / "out" / "8k.recipe.1", tmp_path / "out" / "8k.recipe.1")
    assert "8k.recipe.1 was trained with other options" in evidence(tmp_path, corpus, "8k", "recipe", code=1).stderr
    shutil.copy(measured / "out" / "8k.recipe.1.options", tmp_path / "out")
    assert (
        "was trained with other options"
        in evidence(tmp_path, corpus, "8k", "recipe", "--seeds", 1, options=["--steps", 17], code=1).stderr
    )
    assert not list((tmp_path / "results").iterdir())
    evidence(tmp_path, corpus, "8k", "recipe", "--seeds", 1, options=["--steps", 16])
    assert results(tmp_path)["recipe", "1"]["eval"] == results(measured)["recipe", "1"]["eval"]


def test_a_torn_line_of_a_run_that_was_killed(measured, corpus, tmp_path):
    """It goes on where the program goes on."""
    shutil.copytree(measured / "out", tmp_path / "out")
    metrics = tmp_path / "out" / "8k.recipe.1" / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole[:-20])
    evidence(tmp_path, corpus, "8k", "recipe", "--seeds", 1, options=["--steps", 16])
    assert metrics.read_text().splitlines()[:-1] == whole.splitlines()[:-1]
    (tmp_path / "results" / "8k.recipe.1.json").unlink()
    metrics.write_text("")
    done = evidence(tmp_path, corpus, "8k", "recipe", "--seeds", 1, options=["--steps", 16], code=1)
    assert "no step was logged" in done.stderr


def test_the_results_are_those_of_the_plans():
    listed = subprocess.run(
        [sys.executable, ROOT / "bench" / "evidence.py", "--missing", "--results", "/nowhere"],
        check=True,
        capture_output=True,
        text=True,
    )
    planned = {line.replace(" ", ".") + ".json" for line in listed.stdout.splitlines()}
    assert {file.name for file in (ROOT / "bench" / "results" / "evidence").iterdir()} <= planned


def test_a_limit_stops_and_the_next_call_goes_on(tmp_path, corpus):
    limit, steps = ["8k-long", "recipe", "--limit", 2, "--spare", 0], []
    for _ in range(2):
        stopped = evidence(tmp_path, corpus, *limit, options=["--steps", 100000], code=3)
        assert "the same command goes on" in stopped.stderr and not list((tmp_path / "results").iterdir())
        end = json.loads((tmp_path / "out" / "8k-long.recipe.1" / "metrics.jsonl").read_text().splitlines()[-1])
        assert end["reason"] == "interrupted"
        steps.append(end["step"])
    assert 0 < steps[0] < steps[1]


def test_results_of_other_options_are_not_mixed(measured, tmp_path):
    (tmp_path / "results").mkdir()
    for i, file in enumerate((measured / "results").glob("8k.full.*")):
        result = json.loads(file.read_text())
        (tmp_path / "results" / file.name).write_text(json.dumps({**result, "train": f"--steps {i}"}))
    assert "train: results of one plan differ" in write_page(tmp_path, code=1)


def test_results_of_two_gpus(measured, tmp_path):
    """Losses stand beside each other, times do not."""
    (tmp_path / "results").mkdir()

    def write(seed, **change):
        for file in (measured / "results").glob(f"8k.*.{seed}.json"):
            (tmp_path / "results" / file.name).write_text(json.dumps(json.loads(file.read_text()) | change))

    write(1, gpu="one", tokens_per_second=123456)
    write(2, gpu="other", tokens_per_second=654321)
    (tmp_path / "results" / "8k.window.2.json").unlink()
    write_page(tmp_path)
    page = (tmp_path / "evidence.md").read_text()
    assert page.count("123,456") == 3 and "654,321" not in page
    for seed, gpu in enumerate(("one", "other"), 1):
        write(seed, gpu=gpu, train="--minutes 1")
    assert "gpu: results of one plan differ" in write_page(tmp_path, code=1)


def test_what_the_recipe_misses_by_other_settings(measured, tmp_path):
    """A model that is better at every row than full attention stands beside a recipe that is worse."""
    (tmp_path / "results").mkdir()
    full = json.loads((measured / "results" / "8k.full.1.json").read_text())

    def write(model, shift):
        rows = [row | {"loss": row["loss"] + shift * row["tokens"]} for row in full["eval"]["rows"]]
        result = full | {"model": model, "eval": full["eval"] | {"rows": rows}}
        (tmp_path / "results" / f"8k.{model}.1.json").write_text(json.dumps(result))

    write("full", 0)
    write("recipe", 0.25)
    write("whole-rotary", -0.5)
    write_page(tmp_path)
    goals = (tmp_path / "evidence.md").read_text().split("## Goals")[1].split("\n## ")[0].replace("\u2212", "-")
    assert "| 8k, recipe - full | +0.2500 ± 0.0000 | 1 | ≤ 0 | ≤ -0.02 | 0.25 |" in goals
    assert "| 8k, recipe - full | -0.5000 ± 0.0000 | 1 | met |  |  |  |" in goals
    write("recipe", -0.25)
    write_page(tmp_path)
    assert "`whole-rotary` | seeds" not in (tmp_path / "evidence.md").read_text()


def test_lines_found_beside_the_methods(page_maker, tmp_path):
    """Over the depths at which the model and each method were asked, for the goal of the seeds that both have."""
    asked = {"depths": [0, 0.5, 1], "lengths": [64], "samples": 20, "exact": [[1, 0, 0.9]]}
    fewer = {"depths": [0, 1], "lengths": [64], "samples": 5}
    by_method = {"quest": fewer | {"exact": [[1, 1]]}, "h2o": fewer | {"exact": [[0.2, 1]]}}
    for model, answers in {"recipe": {}, "full": {"needle_by_method": by_method}}.items():
        result = {"model": model, "seed": 1, "gpu": None, "needle": asked} | answers
        (tmp_path / f"lookups-8k.{model}.1.json").write_text(json.dumps(result))
    plans = page_maker.read(tmp_path)
    found = {"recipe": 0.95, "full": 0.95, "full by quest": 1, "full by h2o": 0.6}
    assert page_maker.lines_found(plans) == pytest.approx(found)
    text, value, seeds = page_maker.Measured(plans, "recipe").best_method_needle()
    assert (text, seeds) == ("+5.0, quest", 1) and value == pytest.approx(5)
    second = {"model": "full", "seed": 2, "gpu": None, "needle": asked}
    second["needle_by_method"] = {method: fewer | {"exact": [[0, 0]]} for method in by_method}
    (tmp_path / "lookups-8k.full.2.json").write_text(json.dumps(second))
    plans = page_maker.read(tmp_path)
    assert page_maker.lines_found(plans)["full by quest"] == pytest.approx(0.5)
    assert page_maker.Measured(plans, "recipe").best_method_needle() == (text, value, 1)


# Of each plan: models, and what makes it tiny.
EVERY_PLAN = {
    "8k": ("full full-gated full-wide window recipe", "--steps 2"),
    "32k": ("full recipe", "--steps 2 --context 256"),
    "32k-time": ("full recipe", "--minutes .01 --context 256"),
    "pieces": ("full recipe", "--steps 2 --tokenizer bytes"),
    "lookups": ("recipe", "--steps 2 --context 256 --context-warmup 64 --document-bytes 1024"),
    "lookups-8k": ("full recipe", "--steps 2 --context-warmup 64 --document-bytes 1024"),
    "speed": ("full recipe", "--steps 2 --document-bytes 1024"),
    "8k-long": ("full recipe", "--steps 2"),
    "ablations": ("full paper selector-loss-strong", "--steps 2"),
    "recall": (
        "16k 64k hops-8k 4k-no-selector-loss",
        "--length 128 --tokens-per-step 256 --pairs 6 --steps 2 --topk 3 --threads 1",
    ),
}


def test_every_plan(tmp_path, corpus):
    """All of bench/evidence.sh, two runs at a time, and the page with all goals."""
    environment = {**os.environ, "NSA": str(PROGRAM), "OUT": str(tmp_path / "out"), "GPUS": "0 1", "LIMIT": "0",
                   "OMP_NUM_THREADS": "1"}  # fmt: skip
    environment |= {"RESULTS": str(tmp_path / "results"), "PAGE": str(tmp_path / "evidence.md")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"

    def run(plan, code=0, **more):
        models, options = EVERY_PLAN[plan]
        tiny = [] if plan == "recall" else ["--data", corpus, *SMALL, "--log-every", 1]
        command = [ROOT / "bench" / "evidence.sh", plan, "--seeds", 1, "--lengths", 64, 128, "--samples", 1, "--"]
        words = [str(word) for word in [*command, *tiny, *options.split()]]
        own = {**environment, "MODELS": models, **more}
        done = subprocess.run(words, text=True, capture_output=True, timeout=300, env=own)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    for plan, (models, _) in EVERY_PLAN.items():
        run(plan, **({} if plan == "recall" else {"PAGE": ""}))  # the last one writes the page
        assert {model for model, _ in results(tmp_path, plan)} == set(models.split())
    page = (tmp_path / "evidence.md").read_text()
    goals = page[page.index("## Goals") : page.index("## Beside other")].splitlines()
    too_short_for = ("beyond 4096", "needle, 64k", "far repeats", "R, 8k")
    assert not [line for line in goals if "not yet" in line and not any(name in line for name in too_short_for)]
    assert "| full by quest |" in page and "64: worst depth" in page
    assert "0 results to make" in run("8k").stdout
    (tmp_path / "results" / "8k.window.1.json").unlink()
    shutil.rmtree(tmp_path / "out" / "8k.window.1")
    assert "stopped; the same command goes on" in run("8k", LIMIT="1", code=3).stderr


def test_recall(tmp_path):
    command = [sys.executable, ROOT / "bench" / "evidence.py", "recall", "2k", "--nsa", PROGRAM, "--results",
               tmp_path / "results", "--out", tmp_path / "out", "--"]  # fmt: skip
    command += "--length 128 --pairs 8 --steps 2 --topk 3 --threads 1".split()
    command[4:4] = ["--seeds", "1"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    answer = results(tmp_path, "recall")["2k", "1"]["answer"]
    write_page(tmp_path)
    assert f"| 2k | 1 | `--length 2048` | {answer['nsa']:.1%} |" in (tmp_path / "evidence.md").read_text()


def test_what_is_missing(tmp_path):
    models = ["full", "recipe", "no-selector-loss"]
    command = [sys.executable, ROOT / "bench" / "evidence.py", "32k", *models, "--missing", "--results", tmp_path]
    (tmp_path / "32k.full.2.json").write_text("{}")

    def missing(*seeds):
        return subprocess.run([*command, *seeds], check=True, capture_output=True, text=True).stdout.splitlines()

    others = [f"32k {model} {seed}" for seed in (3, 4, 5) for model in ("full", "recipe")]  # the third has one seed
    assert missing() == ["32k full 1", "32k recipe 1", "32k no-selector-loss 1", "32k recipe 2", *others]
    assert missing("--seeds", "6") == ["32k full 6", "32k recipe 6", "32k no-selector-loss 6"]


def test_models_that_a_plan_does_not_have():
    command = [sys.executable, ROOT / "bench" / "evidence.py", "8k", "quest"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "models: 'quest': must be one of full, full-gated" in done.stderr
