"""The folder `evidence`: runs of the program, their results, and the pages made of them."""

import argparse
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import PROGRAM, ROOT, metrics, nsa

sys.path.insert(0, str(ROOT))

from evidence import page, targets
from evidence import results as stored
from evidence import statistics as stats
from evidence.plans import PLANS, RECIPE_BLOCKS, Needle
from evidence.run import Runs

import nsa as package
from check_words import keys_at_fault
from tables.bench import Bench

SMALL = (
    "--layers 1 --hidden-size 32 --heads 2 --kv-heads 1 --head-dim 16 --context 256 --batch-size 1 --window-size 32 "
    "--kernel-size 8 --kernel-stride 4 --block-size 16 --topk 4 --held-out-percent 20 --eval-every 8 --threads 1"
).split()


def python(*arguments, code=0, timeout=300):
    """A module of the folder as a program."""
    command = [sys.executable, "-m", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # these models are too small to share
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=ROOT)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def run(folder, corpus, *arguments, options=(), code=0):
    where = ["--nsa", PROGRAM, "--out", folder / "out", "--results", folder / "results"]
    return python("evidence.run", *arguments, *where, "--", "--data", corpus, *SMALL, *options, code=code)


def write_page(folder, *options, code=0):
    (folder / "docs").mkdir(exist_ok=True)
    done = python("evidence.page", "--results", folder / "results", "--docs", folder / "docs", *options, code=code)
    return done.stderr + done.stdout


def page_of(folder, name="evidence.md"):
    return (folder / "docs" / name).read_text().replace("\u2212", "-")


def results(folder, plan="8k"):
    return stored.read(folder / "results", plan)[1]


def rewrite(folder, change, plan="8k", source=None):
    """Results of `source` with `change(shared, result)`, which may return False for those to leave out."""
    shared, found = stored.read((source or folder) / "results", plan)
    (folder / "results").mkdir(exist_ok=True)
    (folder / "results" / f"{plan}.jsonl").unlink(missing_ok=True)
    for result in found.values():
        if change(shared, result) is not False:
            stored.write(folder / "results", plan, shared, result)


@pytest.fixture(scope="module")
def measured(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("evidence")
    for plan in ("8k", "ablations"):  # of one model without baselines, in the second plan
        models = ["full", "recipe-2", "window"] if plan == "8k" else ["full", "last-layer-dense"]
        options = ["--steps", 16, *(["--layers", 8] if plan == "ablations" else [])]
        run(folder, corpus, plan, *models, "--seeds", 1, 2, options=options)
    return folder


def test_difference_of_one_seed_equals_that_of_the_program(measured, tmp_path):
    out = measured / "out"
    nsa("eval", out / "8k.recipe-2.1", "--against", out / "8k.full.1", "--window", out / "8k.window.1", "--json",
        tmp_path / "x")  # fmt: skip
    expected = json.loads((tmp_path / "x").read_text())
    found = {model: [results(measured)[model, 1]["eval"]] for model in ("recipe-2", "full", "window")}
    mean, half = stats.difference(found["recipe-2"], found["full"])
    assert mean == pytest.approx(expected["against"]["difference"], abs=1e-6)
    assert half == pytest.approx(expected["against"]["half_width"], rel=1e-3)
    gain = stats.retained_gain(found["recipe-2"], found["full"], found["window"])
    assert (gain is None) == (expected["window"]["retained_gain"] is None)
    assert gain is None or gain == pytest.approx(expected["window"]["retained_gain"], rel=1e-3)


def test_difference_of_two_seeds(measured):
    found = results(measured)
    ours, theirs = ([found[model, seed]["eval"] for seed in (1, 2)] for model in ("recipe-2", "full"))
    seeds = [a["loss"] - b["loss"] for a, b in zip(ours, theirs, strict=True)]
    mean, half = stats.difference(ours, theirs)
    assert mean == pytest.approx(statistics.mean(seeds), abs=1e-6)
    over_seeds = stats.student(1) * statistics.stdev(seeds) / math.sqrt(2)
    over_rows = stats.difference([ours[0]], [theirs[0]])[1]
    assert half >= over_seeds * 0.999 and half < over_seeds + over_rows
    parts = [stats.parts("by_position", lambda low, high, at=at: low == at) for at in (0, 16, 128)]
    assert all(stats.difference(ours, ours, of) in (None, (0, 0)) for of in parts)


def test_results_keep_the_losses_of_the_program(measured):
    """Positions are put together by octave, and nothing is lost on the way."""
    given = json.loads((measured / "out" / "8k.recipe-2.1" / "eval.json").read_text())
    kept = results(measured)["recipe-2", 1]["eval"]
    assert [low for low, _ in kept["rows"]["by_position"]["bounds"]] == [0, 16, 32, 64, 128]
    for name, told in (("by_position", "loss_by_position"), ("by_recurrence", "loss_by_recurrence")):
        for low, high in kept["rows"][name]["bounds"]:
            inside = [p for p in given[told] if (p["from"], p["to"]) == (low, high) or low <= p["from"] < high]
            tokens = sum(part["tokens"] for part in inside)
            expected = sum(part["loss"] * part["tokens"] for part in inside if part["tokens"]) / max(tokens, 1)
            of = stats.parts(name, lambda a, b, low=low, high=high: (a, b) == (low, high))
            assert sum(n for _, n in of(kept)) == tokens
            assert (stats.loss([kept], of) or 0) == pytest.approx(expected, rel=1e-5)


def test_pages(measured):
    write_page(measured)
    found = results(measured)
    mean = statistics.mean(found["recipe-2", seed]["eval"]["loss"] for seed in (1, 2))
    tables = page_of(measured, "evidence_tables.md")
    assert f"| recipe-2 | {mean:.4f} |" in tables and "| full + Quest |" in tables
    assert "`--partial-rotary-factor 1 --dense-layers 7`" in tables
    assert f"| Loss, nats/byte: context 8192, 164 million bytes | {mean:.4f} |" in page_of(measured)
    assert (measured / "docs" / "images" / "evidence.png").stat().st_size > 10000
    assert write_page(measured, "--check") == ""
    text = (measured / "docs" / "evidence.md").read_text()
    (measured / "docs" / "evidence.md").write_text(text.replace("recipe-2", "recipe-3"))
    assert "evidence.md: not what the results make" in write_page(measured, "--check", code=1)


def test_existing_results_are_not_measured_again(measured, corpus):
    before = {file: file.read_bytes() for file in (measured / "results").iterdir()}
    done = run(measured, corpus, "8k", "full", "recipe-2", "window", "--seeds", 1, 2, options=["--steps", 16])
    assert "==" not in done.stdout
    assert before == {file: file.read_bytes() for file in (measured / "results").iterdir()}


def test_a_run_of_other_options_is_refused(measured, corpus, tmp_path):
    """Neither one that has ended nor one to be resumed."""
    shutil.copytree(measured / "out" / "8k.recipe-2.1", tmp_path / "out" / "8k.recipe-2.1")
    assert "8k.recipe-2.1 was trained with other options" in run(tmp_path, corpus, "8k", "recipe-2", code=1).stderr
    shutil.copy(measured / "out" / "8k.recipe-2.1.options", tmp_path / "out")
    assert (
        "was trained with other options"
        in run(tmp_path, corpus, "8k", "recipe-2", "--seeds", 1, options=["--steps", 17], code=1).stderr
    )
    assert not list((tmp_path / "results").iterdir())
    run(tmp_path, corpus, "8k", "recipe-2", "--seeds", 1, options=["--steps", 16])
    assert results(tmp_path)["recipe-2", 1]["eval"] == results(measured)["recipe-2", 1]["eval"]


def test_results_of_other_options_are_refused(measured, corpus):
    before = (measured / "results" / "8k.jsonl").read_bytes()
    done = run(measured, corpus, "8k", "recipe-2", "--seeds", 3, options=["--steps", 17], code=1)
    assert "8k.jsonl: options of this run differs from the results there" in done.stderr
    assert not (measured / "out" / "8k.recipe-2.3").exists()
    assert before == (measured / "results" / "8k.jsonl").read_bytes()


def test_results_of_other_rows_are_refused(measured, tmp_path):
    """Losses of other held-out rows would be compared with these."""
    shutil.copytree(measured / "results", tmp_path / "results")
    shared, found = stored.read(tmp_path / "results", "8k")
    tokens = [count + 1 for count in shared["rows"]["tokens"]]
    with pytest.raises(SystemExit, match="rows of this run differs"):
        stored.write(tmp_path / "results", "8k", shared | {"rows": shared["rows"] | {"tokens": tokens}},
                     found["full", 1])  # fmt: skip


def test_a_torn_line_of_a_killed_run(measured, corpus, tmp_path):
    """Training continues where the program continues."""
    shutil.copytree(measured / "out", tmp_path / "out")
    metrics = tmp_path / "out" / "8k.recipe-2.1" / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole[:-20])
    run(tmp_path, corpus, "8k", "recipe-2", "--seeds", 1, options=["--steps", 16])
    assert metrics.read_text().splitlines()[:-1] == whole.splitlines()[:-1]
    (tmp_path / "results" / "8k.jsonl").unlink()
    metrics.write_text("")
    done = run(tmp_path, corpus, "8k", "recipe-2", "--seeds", 1, options=["--steps", 16], code=1)
    assert "no step was logged" in done.stderr


def test_stored_results_are_those_of_the_plans():
    assert {file.name for file in stored.RESULTS.iterdir()} <= {f"{name}.jsonl" for name in PLANS}
    for name, plan in PLANS.items():
        shared, found = stored.read(stored.RESULTS, name)
        assert found and (shared["command"], shared["options"].replace("'", "")) == (plan.command, plan.options)
        for (model, seed), result in found.items():
            assert result["options"] == plan.models[model] and seed in plan.seeds_of(model)


def test_the_program_has_the_options_of_all_plans():
    options = {}
    for plan in PLANS.values():
        given = " ".join([plan.options, *plan.models.values()])
        options.setdefault(plan.command, set()).update(re.findall(r"--[a-z-]+", given))
    for command, used in options.items():
        assert used <= set(re.findall(r"--[a-z-]+", nsa(command, "--help").text))


def test_tables_say_recipe_of_the_recipes_blocks_alone(monkeypatch):
    recipe = package.NSAConfig.recipe()
    assert RECIPE_BLOCKS == (recipe.kernel_size, recipe.kernel_stride, recipe.block_size, recipe.topk)
    bench, paper = Bench("bench_recipe.json"), package.NSAConfig()
    for given, name in ((recipe, "recipe"), (paper, "paper"), (package.NSAConfig(topk=8), "32, 16, 64, 8")):
        monkeypatch.setattr(bench, "settings", vars(given))
        assert bench.setting() == name


def test_a_limit_stops_and_the_next_call_continues(tmp_path, corpus):
    """On a busy machine a limit may pass before the first step: it is doubled until two calls have trained."""
    stopped = run(tmp_path, corpus, "8k-long", "recipe-2", "--limit", 60, code=3).stderr
    assert "--limit 60: not more than --spare, 60: trains nothing" in stopped
    seconds, steps, folder = 2, [0], tmp_path / "out" / "8k-long.recipe-2.1"
    while len(steps) < 3:
        limit = ["8k-long", "recipe-2", "--limit", seconds, "--spare", 0]
        stopped = run(tmp_path, corpus, *limit, options=["--steps", 100000], code=3)
        assert "the same command continues" in stopped.stderr and not list((tmp_path / "results").iterdir())
        ends = metrics(folder, "end") if (folder / "metrics.jsonl").exists() else []
        assert all(end["reason"] == "interrupted" for end in ends)
        if ends and ends[-1]["step"] > steps[-1]:
            steps.append(ends[-1]["step"])
        else:
            seconds *= 2
            assert seconds < 100, f"no step in {seconds} s"


def test_results_of_two_gpus(measured, tmp_path):
    """Losses are compared, times are not."""
    speeds = {1: {"gpu": "one", "tokens_per_second": 123456}, 2: {"gpu": "other", "tokens_per_second": 654321}}

    def change(shared, result):
        result |= speeds[result["seed"]]
        return (result["model"], result["seed"]) != ("window", 2)

    rewrite(tmp_path, change, source=measured)
    write_page(tmp_path)
    tables = page_of(tmp_path, "evidence_tables.md")
    assert tables.count("123,456") == 3 and "654,321" not in tables

    def by_time(shared, result):
        shared["options"] = "--minutes 1"

    rewrite(tmp_path, by_time)
    assert "gpu: results of a plan about time differ" in write_page(tmp_path, code=1)


def test_other_settings_where_the_recipe_misses_a_target(measured, tmp_path):
    """A model better than full attention in every row, and a recipe that is worse."""
    shared, found = stored.read(measured / "results", "8k")
    full = found["full", 1]
    (tmp_path / "results").mkdir()

    def write(model, shift):
        nats = [nats + shift * tokens for nats, tokens in stats.all_tokens(full["eval"])]
        result = full | {"model": model, "eval": full["eval"] | {"nats": nats}}
        stored.write(tmp_path / "results", "8k", shared, result)

    write("full", 0)
    write("recipe-2", 0.25)
    write("recipe-1", -0.5)
    write_page(tmp_path)
    section = page_of(tmp_path).split("## Targets")[1].split("\n## ")[0]
    assert "| Loss, `8k`: NSA - full attention | +0.2500±0.0000 | 1 | ≤ 0 | ≤ -0.02 | 0.25 |" in section
    assert "| Loss, `8k`: NSA - full attention | -0.5000±0.0000 | 1 | met |  |  |  |" in section
    write("recipe-2", -0.25)
    write_page(tmp_path)
    assert "`recipe-1` | seeds" not in page_of(tmp_path)


def test_needle_retrieval_of_model_and_baselines(tmp_path):
    """Over the depths at which the model and each baseline were evaluated, and the seeds that both have."""
    answer = {"depths": [0, 0.5, 1], "lengths": [64], "samples": 20, "accuracy": [[1, 0, 0.9]]}
    fewer = {"depths": [0, 1], "lengths": [64], "samples": 5}
    by_baseline = {"quest": fewer | {"accuracy": [[1, 1]]}, "h2o": fewer | {"accuracy": [[0.2, 1]]}}
    shared = {"command": "train", "options": ""}

    def write(model, seed, **more):
        stored.write(tmp_path, "retrieval-8k", shared, {"model": model, "seed": seed, "gpu": None} | more)
        return stored.read_all(tmp_path)

    write("recipe-2", 1, needle=answer)
    plans = write("full", 1, needle=answer, needle_by_baseline=by_baseline)
    found = {"recipe-2": 0.95, "full": 0.95, "full + Quest": 1, "full + H2O": 0.6}
    assert plans["retrieval-8k"].retrieval() == pytest.approx(found)
    text, value, seeds = targets.Measured(plans, "recipe-2").best_baseline_needle()
    assert (text, seeds) == ("+5.0, Quest", 1) and value == pytest.approx(5)
    none = {baseline: fewer | {"accuracy": [[0, 0]]} for baseline in by_baseline}
    plans = write("full", 2, needle=answer, needle_by_baseline=none)
    assert plans["retrieval-8k"].retrieval()["full + Quest"] == pytest.approx(0.5)
    assert targets.Measured(plans, "recipe-2").best_baseline_needle() == (text, value, 1)


def test_needle_tasks_are_rows_of_their_own(trained, tmp_path, corpus):
    """Results of a run and its tasks, as `nsa needle` gives them."""
    given = argparse.Namespace(nsa=PROGRAM, limit=None, lengths=None, samples=None)
    run = shutil.copytree(trained["nsa"], tmp_path / "run")
    needle = Needle((64, 200), "0,1", 2, ("multikey", "tracking"))
    with pytest.raises(SystemExit, match="task multikey"):
        Runs(given).needle(run, needle)
    found = Runs(given).needle(run, needle._replace(lengths=(200, 220)))
    assert "lines" not in found and found["lengths"] == [200, 220] and list(found["tasks"]) == ["multikey", "tracking"]
    for task, answer in found["tasks"].items():
        assert (answer["lines"], answer["samples"], len(answer["accuracy"][0])) == (4, 2, 2)
        assert (
            json.loads((run / f"needle_lengths_200_depths_0,1_samples_2_task_{task}.json").read_text())["task"] == task
        )
    stored.write(
        tmp_path, "retrieval-8k", {"command": "train", "options": ""}, {"model": "full", "seed": 1, "gpu": None}
    )
    shared = {"model": "recipe-2", "seed": 1, "gpu": None, "needle": found}
    stored.write(tmp_path, "retrieval-8k", {}, shared)
    rows = list(page.needle_section(stored.read_all(tmp_path)["retrieval-8k"]))[1]
    assert all(f"| recipe-2{name} | 1 | 2 \u00d7 2 |" in rows for name in ("", ", multikey", ", tracking"))


def test_differences_of_curves_over_time():
    """A model that is twice as fast is compared with what the other one has had time for."""
    ours, theirs = [(1, 4.0), (2, 3.0), (3, 2.5)], [(2, 5.0), (4, 4.0)]
    assert page.apart([ours, theirs], [1, 2, 3]) == [(2, -2.0), (3, -2.0)]
    assert page.mean_curve([[(1, 0.0), (2, 1.0)], [(1, 1.0), (3, 3.0)]]) == [(1, 0.5), (2, 1.5)]
    assert page.interpolated([(1, 4.0)], 1) == 4 and page.interpolated([], 1) is None


# Of each plan: models, and what makes it tiny.
EVERY_PLAN = {
    "8k": ("full full-gated full-equal-parameters window recipe-2", "--steps 2"),
    "8k-long": ("full recipe-2", "--steps 2"),
    "bpe": ("full recipe-2", "--steps 2 --tokenizer bytes"),
    "32k": ("full recipe-2", "--steps 2 --context 256"),
    "32k-time": ("full recipe-2", "--minutes .01 --context 256"),
    "retrieval-8k": ("full recipe-2", "--steps 2 --context-warmup 64 --document-bytes 1024"),
    "retrieval-64k": ("recipe-2", "--steps 2 --context 256 --context-warmup 64 --document-bytes 1024"),
    "speed": ("full recipe-2", "--steps 2 --document-bytes 1024"),
    "ablations": ("full paper selector-loss-strong", "--steps 2"),
    "recall": (
        "16k 64k multi-hop-8k 4k-no-selector-loss",
        "--length 128 --tokens-per-step 256 --pairs 6 --steps 2 --topk 3 --threads 1",
    ),
}


def test_every_plan(tmp_path, corpus):
    """All of evidence/run.sh, two runs at a time, and the page with all targets."""
    environment = {**os.environ, "NSA": str(PROGRAM), "OUT": str(tmp_path / "out"), "GPUS": "0 1", "LIMIT": "0",
                   "OMP_NUM_THREADS": "1"}  # fmt: skip
    (tmp_path / "docs").mkdir()
    environment |= {"RESULTS": str(tmp_path / "results"), "DOCS": str(tmp_path / "docs")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"

    def script(plan, code=0, **more):
        models, options = EVERY_PLAN[plan]
        tiny = [] if plan == "recall" else ["--data", corpus, *SMALL, "--log-every", 1]
        command = [ROOT / "evidence" / "run.sh", plan, "--seeds", 1, "--lengths", 64, 128, "--samples", 1, "--"]
        words = [str(word) for word in [*command, *tiny, *options.split()]]
        own = {**environment, "MODELS": models, **more}
        done = subprocess.run(words, text=True, capture_output=True, timeout=300, env=own)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    for plan, (models, _) in EVERY_PLAN.items():
        script(plan, **({} if plan == "recall" else {"DOCS": ""}))  # the last one writes the pages
        assert {model for model, _ in results(tmp_path, plan)} == set(models.split())
    # The file of a tokenizer may differ where its tokens do not: those of the rows are compared.
    shared = {name: stored.read(tmp_path / "results", name)[0] for name in EVERY_PLAN}
    assert [name for name, fields in shared.items() if "fingerprint" not in fields] == ["bpe", "recall"]
    text = page_of(tmp_path)
    section = text[text.index("## Targets") : text.index("## Training-free")].splitlines()
    too_short_for = ("4096", "64k: worst", "far recurrences", "long-range gain", "selected tokens")
    assert not [line for line in section if "not measured" in line and not any(name in line for name in too_short_for)]
    assert "| full + Quest |" in text and "64: worst depth" in page_of(tmp_path, "evidence_tables.md")
    assert "0 results to make" in script("8k").stdout
    rewrite(tmp_path, lambda shared, result: result["model"] != "window")
    shutil.rmtree(tmp_path / "out" / "8k.window.1")
    assert "; the same command continues" in script("8k", LIMIT="1", code=3).stderr


def test_recall(tmp_path):
    where = ["--nsa", PROGRAM, "--results", tmp_path / "results", "--out", tmp_path / "out"]
    tiny = "--length 128 --tokens-per-step 256 --pairs 8 --steps 2 --topk 3 --threads 1".split()
    python("evidence.run", "recall", "2k", "--seeds", 1, *where, "--", *tiny)
    scores = results(tmp_path, "recall")["2k", 1]["scores"]
    assert {"nsa", "full", "window", "quest", "nsa_without_cmp"} <= scores.keys()
    write_page(tmp_path)
    row = f"| 2k | `--length 2048` | {100 * scores['nsa']['accuracy']:.1f} |"
    assert row in page_of(tmp_path, "evidence_tables.md")


def test_missing(tmp_path):
    models = ["full", "recipe-2", "no-selector-loss"]
    stored.write(tmp_path, "32k", {}, {"model": "full", "seed": 2})

    def missing(*seeds):
        return python("evidence.run", "32k", *models, "--missing", "--results", tmp_path, *seeds).stdout.splitlines()

    others = [f"32k {model} {seed}" for seed in (3, 4, 5) for model in ("full", "recipe-2")]  # the third has one seed
    assert missing() == ["32k full 1", "32k recipe-2 1", "32k no-selector-loss 1", "32k recipe-2 2", *others]
    assert missing("--seeds", "6") == ["32k full 6", "32k recipe-2 6", "32k no-selector-loss 6"]


def test_unknown_models_are_refused():
    done = python("evidence.run", "8k", "quest", code=2)
    assert "models: 'quest': must be one of full, full-gated" in done.stderr


@pytest.mark.parametrize(
    "result, faults",
    [
        ({"length": 8192, "scores": {"nsa": {"accuracy": 1.0, "by_hop": [1.0]}, "full": {"accuracy": 0.9}}}, []),
        ({"length": 8192, "nsa": 1.0}, ["nsa"]),
        ([{"runs": [{"length": 8192, "quest": {"accuracy": 0.8}}]}], ["quest"]),
        ({"scores": {"full": {"full": 1.0}}}, ["scores.full"]),
        ({"scores": {"nsa": 0.9}}, ["scores.nsa"]),
        ({"scores": {"nsa": {"accuracy": 1.0, "by_chain": []}}}, ["scores.nsa"]),
        ({"data": {"join": True}, "loss_by_repeat": []}, ["join", "loss_by_repeat"]),
        ({"far_repeats": 0.2}, ["far_repeats"]),
    ],
)
def test_keys_of_results_are_the_fields(result, faults):
    assert [key for key, _ in keys_at_fault(result)] == faults


def test_front_has_every_block_setting_once():
    points = page.front(stored.read_all(stored.RESULTS))
    times = json.loads(page.TIMES.read_text())["ms"]
    assert sorted(name for name, *_ in points) == sorted(times)
    assert all(ms == times[name]["forward_backward"]["65536"] for name, ms, *_ in points)
    assert all(half > 0 for _, _, *differences in points for _, half in differences)
    assert page.front({}) == []
