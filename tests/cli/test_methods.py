"""A model of full attention run by methods that read fewer tokens: nsa eval, needle and recall --method."""

import json
import math

import pytest

from conftest import nsa, refused

METHODS = ["streaming", "h2o", "quest", "infllm", "clusterkv", "exact"]


@pytest.fixture(scope="module")
def full(trained, tmp_path_factory):
    return loss(trained["full"], tmp_path_factory.mktemp("full"))


def loss(run, tmp_path, *options):
    out = tmp_path / "eval.json"
    nsa("eval", run, "--threads", 2, "--json", out, *options)
    return json.loads(out.read_text())


@pytest.mark.parametrize("method", METHODS)
def test_a_method_reads_as_many_tokens_as_it_may(trained, full, tmp_path, method):
    enough = loss(trained["full"], tmp_path, "--method", method, "--budget", 256)
    few = loss(trained["full"], tmp_path, "--method", method, "--budget", 8)
    assert enough["loss"] == pytest.approx(full["loss"], abs=1e-5)
    assert (few["method"], few["budgets"]) == (method, [8]) and "method" not in full
    assert math.isfinite(few["loss"]) and abs(few["loss"] - full["loss"]) > 1e-5
    assert few["eval_tokens"] == full["eval_tokens"]


def test_the_budget_is_what_nsa_reads(trained, tmp_path):
    nsa_options = ["--set", "topk=4", "--set", "block_size=16", "--set", "window_size=32"]
    result = loss(trained["full"], tmp_path, "--method", "quest", "--context", 200, *nsa_options)
    budget = 4 * 16 + 32 + (200 - 8) // 4 + 1  # and the compressed keys of TINY's l and d
    assert result["budgets"] == [budget]
    text = nsa("eval", trained["full"], "--method", "quest", "--context", 200, *nsa_options).text
    assert f"method quest: {budget} tokens read for a query in a sequence of 200" in text


def test_needles_are_sought_by_a_method(trained, corpus, tmp_path):
    def found(*options):
        out = tmp_path / "needle.json"
        lengths = ["--lengths", "96,160", "--depths", "0,1", "--samples", 2, "--data", corpus]
        nsa("needle", trained["full"], "--threads", 2, "--json", out, *lengths, *options)
        return json.loads(out.read_text())

    full, enough = found(), found("--method", "h2o", "--budget", 160)
    few, by_default = found("--method", "h2o", "--budget", 8), found("--method", "h2o", "--set", "topk=3")
    assert [pytest.approx(row, abs=1e-4) for row in full["loss"]] == enough["loss"]
    assert [pytest.approx(row, abs=1e-4) for row in full["loss"]] != few["loss"]
    assert "method" not in full and (few["method"], few["budgets"]) == ("h2o", [8, 8])
    assert by_default["budgets"] == [3 * 16 + 32 + (length - 8) // 4 + 1 for length in (96, 160)]


@pytest.mark.parametrize("attention", ["nsa", "window"])
def test_other_attention_is_refused(trained, attention):
    for command in ("eval", "needle"):
        message = refused(command, trained[attention], "--method", "h2o")
        assert f"--method h2o: needs a model of attention full, this one's is {attention}" in message


def test_options_are_checked(trained):
    message = refused("eval", trained["full"], "--method", "snapkv")
    assert "--method" in message and all(method in message for method in METHODS)
    assert "--method" in refused("eval", trained["full"], "--budget", 64)
    assert "--budget" in refused("eval", trained["full"], "--method", "h2o", "--budget", -1)


def test_recall_by_methods(tmp_path):
    def recalled(*options):
        out = tmp_path / "recall.json"
        small = "--pairs 8 --length 100 --lengths 64 --steps 3 --threads 2 --topk 3".split()
        return nsa("recall", *small, "--json", out, *options).text, json.loads(out.read_text())

    text, out = recalled("--method", "quest,infllm", "--budget", 100)
    assert (out["methods"], out["budget"]) == (["quest", "infllm"], 100)
    for model in ("NSA", "full attention"):
        assert f"ended before the sequences of {model} had grown: it had" in text
    assert text.count("of 4 pairs every 5 tokens") == 2
    for method in ("quest", "infllm"):
        assert out[method] == out["full"] and f"... by {method}" in text
        assert out["by_length"][method] == out["by_length"]["full"]
        assert out["by_distance"][method] == out["by_distance"]["full"]
    full = out["full"]
    _, out = recalled("--method", "streaming")
    assert out["budget"] == 3 * 16 + 4 + (100 - 8) // 4 + 1
    assert out["full"] == full and 0 <= out["streaming"] <= 1
    assert "snapkv" in refused("recall", "--method", "quest,snapkv")
