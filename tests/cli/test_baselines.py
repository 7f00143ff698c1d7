"""A full-attention model with training-free sparse attention: nsa eval, needle and recall --baseline."""

import json
import math

import pytest

from conftest import nsa, refused

BASELINES = ["streaming", "h2o", "quest", "infllm", "clusterkv", "exact"]


@pytest.fixture(scope="module")
def full(trained, tmp_path_factory):
    return loss(trained["full"], tmp_path_factory.mktemp("full"))


def loss(run, tmp_path, *options):
    out = tmp_path / "eval.json"
    nsa("eval", run, "--threads", 2, "--json", out, *options)
    return json.loads(out.read_text())


@pytest.mark.parametrize("baseline", BASELINES)
def test_a_baseline_reads_at_most_its_budget(trained, full, tmp_path, baseline):
    enough = loss(trained["full"], tmp_path, "--baseline", baseline, "--budget", 256)
    few = loss(trained["full"], tmp_path, "--baseline", baseline, "--budget", 8)
    assert enough["loss"] == pytest.approx(full["loss"], abs=1e-5)
    assert (few["baseline"], few["budgets"]) == (baseline, [8]) and "baseline" not in full
    assert math.isfinite(few["loss"]) and abs(few["loss"] - full["loss"]) > 1e-5
    assert few["eval_tokens"] == full["eval_tokens"]


def test_the_budget_is_what_nsa_reads(trained, tmp_path):
    nsa_options = ["--set", "topk=4", "--set", "block_size=16", "--set", "window_size=32"]
    result = loss(trained["full"], tmp_path, "--baseline", "quest", "--context", 200, *nsa_options)
    budget = 4 * 16 + 32 + (200 - 8) // 4 + 1  # and the compressed keys of TINY's l and d
    assert result["budgets"] == [budget]
    text = nsa("eval", trained["full"], "--baseline", "quest", "--context", 200, *nsa_options).text
    assert f"baseline quest: {budget} tokens per query at length 200" in text


def test_needle_runs_with_a_baseline(trained, corpus, tmp_path):
    def found(*options):
        out = tmp_path / "needle.json"
        lengths = ["--lengths", "96,160", "--depths", "0,1", "--samples", 2, "--data", corpus]
        nsa("needle", trained["full"], "--threads", 2, "--json", out, *lengths, *options)
        return json.loads(out.read_text())

    full, enough = found(), found("--baseline", "h2o", "--budget", 160)
    few, by_default = found("--baseline", "h2o", "--budget", 8), found("--baseline", "h2o", "--set", "topk=3")
    assert [pytest.approx(row, abs=1e-4) for row in full["loss"]] == enough["loss"]
    assert [pytest.approx(row, abs=1e-4) for row in full["loss"]] != few["loss"]
    assert "baseline" not in full and (few["baseline"], few["budgets"]) == ("h2o", [8, 8])
    assert by_default["budgets"] == [3 * 16 + 32 + (length - 8) // 4 + 1 for length in (96, 160)]


@pytest.mark.parametrize("attention", ["nsa", "window"])
def test_other_attention_is_refused(trained, attention):
    for command in ("eval", "needle"):
        message = refused(command, trained[attention], "--baseline", "h2o")
        assert f"--baseline h2o: needs a model with attention full, got {attention}" in message


def test_options_are_checked(trained):
    message = refused("eval", trained["full"], "--baseline", "snapkv")
    assert "--baseline" in message and all(baseline in message for baseline in BASELINES)
    assert "--baseline" in refused("eval", trained["full"], "--budget", 64)
    assert "--budget" in refused("eval", trained["full"], "--baseline", "h2o", "--budget", -1)


def test_recall_with_baselines(tmp_path):
    def recalled(*options):
        out = tmp_path / "recall.json"
        small = "--pairs 8 --length 100 --lengths 64 --steps 3 --threads 2 --topk 3".split()
        return nsa("recall", *small, "--json", out, *options).text, json.loads(out.read_text())

    text, out = recalled("--baseline", "quest,infllm", "--budget", 100)
    assert (out["baselines"], out["budget"]) == (["quest", "infllm"], 100)
    for model in ("NSA", "full attention"):
        assert f"ended before the sequences of {model} reached their full length: accuracy" in text
    assert text.count("with 4 pairs every 5 tokens") == 2
    full = out["scores"]["full"]
    for baseline in ("quest", "infllm"):
        assert out["scores"][baseline] == full and f"full + {baseline}" in text
    _, out = recalled("--baseline", "streaming")
    assert out["budget"] == 3 * 16 + 4 + (100 - 8) // 4 + 1
    assert out["scores"]["full"] == full and 0 <= out["scores"]["streaming"]["accuracy"] <= 1
    assert "snapkv" in refused("recall", "--baseline", "quest,snapkv")
