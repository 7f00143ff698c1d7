"""nsa eval against other runs: recurring tokens, paired differences, retained long-range gain; selection recall."""

import json
import math
import random

import numpy as np
import pytest
from safetensors.numpy import load_file

from conftest import TINY, nsa, refused


@pytest.fixture(scope="module")
def compared(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("compared") / "out.json"
    others = ["--against", trained["full"], "--window", trained["window"]]
    text = nsa("eval", trained["nsa"], *others, "--tokens", 0, "--json", path).text
    return json.loads(path.read_text()), text


def evaluated(tmp_path, run, *options):
    nsa("eval", run, *options, "--json", tmp_path / "one.json")
    return json.loads((tmp_path / "one.json").read_text())


def student_quantile(freedom):
    """97.5 %, by integrating the density."""
    norm = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    step, total, x = 1e-4, 0.5, 0.0
    while total < 0.975:
        total += step * norm * (1 + (x + step / 2) ** 2 / freedom) ** (-(freedom + 1) / 2)
        x += step
    return x


def test_the_difference_is_paired_by_rows(compared, trained, tmp_path):
    out, text = compared
    ours, theirs = out["rows"], evaluated(tmp_path, trained["full"], "--tokens", 0)["rows"]
    tokens = [row["tokens"] for row in ours]
    assert tokens == [row["tokens"] for row in theirs] and len(tokens) >= 4 and len(set(tokens)) > 1
    differences = [a["loss"] - b["loss"] for a, b in zip(ours, theirs, strict=True)]
    mean = sum(differences) / sum(tokens)
    residuals = [d - mean * n for d, n in zip(differences, tokens, strict=True)]
    count = len(tokens)
    error = math.sqrt(sum(r * r for r in residuals) * count / (count - 1)) / sum(tokens)
    given = out["against"]
    assert given["difference"] == pytest.approx(mean, rel=1e-6) == pytest.approx(out["loss"] - given["loss"], rel=1e-6)
    assert given["half_width"] == pytest.approx(student_quantile(count - 1) * error, rel=1e-2)
    assert f"{mean:+.4f} +- " in text
    parts = zip(given["by_position"], out["loss_by_position"], strict=True)
    assert sum(part["difference"] * of["tokens"] for part, of in parts) == pytest.approx(sum(differences), rel=1e-5)


def test_rows_are_the_sums_of_their_parts(trained, tmp_path):
    out = evaluated(tmp_path, trained["nsa"])
    for name in ("by_position", "by_recurrence"):
        for row in out["rows"]:
            assert sum(row[name]["tokens"]) == row["tokens"] and sum(row[name]["loss"]) == pytest.approx(row["loss"])
        for i, part in enumerate(out[f"loss_{name}"]):
            nats, tokens = (sum(row[name][of][i] for row in out["rows"]) for of in ("loss", "tokens"))
            assert tokens == part["tokens"] and nats == pytest.approx(part["loss"] * tokens)


def test_a_run_does_not_differ_from_itself(trained, tmp_path):
    out = evaluated(tmp_path, trained["nsa"], "--against", trained["nsa"])["against"]
    assert out["difference"] == 0 and out["half_width"] == 0


def test_retained_long_range_gain(compared, trained, tmp_path):
    out, text = compared
    full, window = (evaluated(tmp_path, trained[name], "--tokens", 0) for name in ("full", "window"))
    beyond = [
        sum(p["loss"] * p["tokens"] for p in one["loss_by_position"] if p["from"] >= 64) for one in (out, full, window)
    ]
    everywhere = [x["loss"] for x in (out, full, window)]
    gains = {"retained_gain": everywhere, "retained_gain_beyond_selected": beyond}
    for name, (ours, best, worst) in gains.items():
        if worst > best:
            assert out["window"][name] == pytest.approx((worst - ours) / (worst - best), rel=1e-3, abs=1e-4)
        else:  # no gain to retain
            assert out["window"][name] is None
    assert "retained long-range gain" in text


def test_recurring_tokens_are_counted_by_distance(trained, tmp_path):
    draw = random.Random(3)
    text = [draw.randrange(256) for _ in range(700)]
    short, far = text[:100] + text[20:60], text + text[10:40] + text[690:700]
    (tmp_path / "ids").write_text("\n".join(" ".join(map(str, document)) for document in (short, far)))
    out = evaluated(tmp_path, trained["full"], "--ids", tmp_path / "ids", "--context", 1024)
    found = {part["from"]: part["tokens"] for part in out["loss_by_recurrence"]}
    # The first eight tokens of a recurring passage do not follow eight recurring ones.
    assert found == {1: 40 - 8 + 10 - 8, 513: 30 - 8, 1025: 0, 4097: 0, 0: 139 + 739 - 32 - 2 - 22}
    assert out["tokens"] == 139 + 739 and sum(part["loss"] * part["tokens"] for part in out["loss_by_recurrence"]) == (
        pytest.approx(out["loss"] * out["tokens"], rel=1e-6)
    )


def test_what_cannot_be_compared_is_refused(trained, tmp_path, corpus):
    assert "--against" in refused("eval", trained["nsa"], "--window", trained["window"])
    swapped = ["--against", trained["window"], "--window", trained["full"]]
    assert f"--window {trained['full']}: attention full: must be window" in refused("eval", trained["nsa"], *swapped)
    (tmp_path / "ids").write_text("7\n")
    assert "no text of two tokens or more" in refused("eval", trained["nsa"], "--ids", tmp_path / "ids")
    nsa("train", "--out", tmp_path / "run", "--data", corpus, "--attention", "full", "--steps", 1, *TINY)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["model"]["vocab_size"] = 300
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    assert "vocab_size" in refused("eval", trained["nsa"], "--against", tmp_path / "run")
    assert "nowhere" in refused("eval", trained["nsa"], "--against", tmp_path / "nowhere")


@pytest.mark.parametrize("attention", ["full", "window"])
def test_gates_on_attention_without_branches(attention, corpus, trained, tmp_path):
    run = tmp_path / "run"
    nsa("train", "--out", run, "--data", corpus, "--attention", attention, "--gated", "--steps", 24, *TINY)
    config, plain = (json.loads((path / "config.json").read_text()) for path in (run, trained[attention]))
    # A layer of a quarter of the width (8), then a gate for each of two heads.
    gates = 8 * 32 + 8 + 2 * 8 + 2
    assert config["parameters"]["total"] == plain["parameters"]["total"] + gates
    assert config["parameters"]["gates"] == gates
    assert evaluated(tmp_path, run)["loss"] != evaluated(tmp_path, trained[attention])["loss"]
    texts = []
    for cache in ([], ["--no-cache"]):
        options = ["--prompt", "def value", "--tokens", 40, "--temperature", 0, "--ignore-end"]
        nsa("generate", run, *options, *cache, "--json", tmp_path / "text.json")
        texts.append(json.loads((tmp_path / "text.json").read_text())["sequences"][0])
    assert texts[0]["tokens"] == texts[1]["tokens"]
    assert texts[0]["margins"] == pytest.approx(texts[1]["margins"], abs=1e-4)


def test_gated_is_refused_with_branch_gates(corpus, tmp_path):
    assert "gated = true" in refused("train", "--out", tmp_path / "run", "--data", corpus, "--gated", *TINY)


def test_selection_recall_matches_numpy(trained, tmp_path):
    """Compared with numpy on the one layer's queries and keys."""
    draw = random.Random(5)
    tokens = [draw.randrange(256) for _ in range(250)]
    (tmp_path / "ids").write_text(" ".join(map(str, tokens)))
    nsa("inspect", trained["nsa"], "--ids", tmp_path / "ids", "--queries", 40, "--json", tmp_path / "out.json")
    out = json.loads((tmp_path / "out.json").read_text())
    (head,) = out["layers"][0]["kv_heads"]
    config = json.loads((trained["nsa"] / "config.json").read_text())["model"]
    weights = load_file(trained["nsa"] / "model.safetensors")
    x = weights["embedding.weight"][tokens].astype(np.float64)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + config["norm_eps"]) * weights["layers.0.attention_norm.weight"]
    width = config["head_dim"]
    angles = np.arange(len(tokens))[:, None] * config["rope_theta"] ** (-np.arange(0, width, 2) / width)
    angles[:, int(config["partial_rotary_factor"] * width / 2) :] = 0

    def rotated(name, heads):
        y = (x @ weights[f"layers.0.attention.{name}.weight"].T).reshape(len(tokens), heads, width)
        low, high = np.split(y, 2, axis=-1)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    q, k = rotated("q_proj", config["num_heads"]), rotated("k_proj.slc", 1)[:, 0]
    sums = {"selected": 0.0, "oracle": 0.0, "random": 0.0}
    total = 0.0
    for t, blocks, forced in zip(*(head["map"][name] for name in ("query_positions", "blocks", "forced")), strict=True):
        scores = np.exp(q[t] @ k[: t + 1].T / math.sqrt(width))
        mass = (scores / scores.sum(-1, keepdims=True)).sum(0)
        of_block = {b: mass[b * 16 : b * 16 + 16].sum() for b in range(t // 16 + 1)}
        free = sorted((of_block[b] for b in of_block if 1 <= b <= t // 16 - 2), reverse=True)
        picked = set(blocks) - set(forced)
        if len(picked) < len(free):
            total += sum(free)
            sums["selected"] += sum(of_block[b] for b in picked)
            sums["oracle"] += sum(free[: len(picked)])
            sums["random"] += sum(free) * len(picked) / len(free)
    assert total > 0 and head["selection_recall"] == pytest.approx(
        {name: value / total for name, value in sums.items()}, rel=1e-3
    )
    assert head["selection_recall"]["selected"] <= head["selection_recall"]["oracle"] < 1
    nsa("inspect", trained["nsa"], "--ids", tmp_path / "ids", "--set", "topk=16", "--json", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["layers"][0]["kv_heads"][0]["selection_recall"] is None
