"""nsa train: what it writes, that it learns, what it refuses."""

import json
from itertools import pairwise

import numpy as np
import pytest
from safetensors.numpy import load_file

from conftest import TINY, metrics, nsa, refused


@pytest.mark.parametrize("attention", ["nsa", "full", "window"])
def test_it_learns_and_writes_a_run_folder(trained, attention):
    run = trained[attention]
    config = json.loads((run / "config.json").read_text())
    assert config["model"]["attention"] == attention
    losses = [line["loss"] for line in metrics(run, "train")]
    assert losses[-1] < 0.8 * losses[0]
    evaluations = metrics(run, "eval")
    assert [line["step"] for line in evaluations] == [8, 16, 24]
    assert evaluations[-1]["loss"] < evaluations[0]["loss"]
    assert metrics(run, "end")[-1]["reason"] == "finished"


def test_loss_by_position_adds_up(trained):
    line = metrics(trained["nsa"], "eval")[-1]
    parts = line["loss_by_position"]
    assert parts[0]["from"] == 0 and all(a["to"] == b["from"] for a, b in pairwise(parts))
    assert sum(part["tokens"] for part in parts) == line["eval_tokens"]
    mean = sum(part["loss"] * part["tokens"] for part in parts) / line["eval_tokens"]
    assert mean == pytest.approx(line["loss"], rel=1e-9)


def test_the_log_has_the_scalars_of_the_selection(trained):
    for line in metrics(trained["nsa"], "train"):
        for layer in line["layers"]:
            for gate in ("gate_cmp", "gate_slc", "gate_swa"):
                assert 0 < layer[gate] < 1
            assert 0 <= layer["unforced_share"] <= 0.25  # one of four picks is free
            assert 0 <= layer["neighbour_overlap"] <= 1
    assert "layers" not in metrics(trained["full"], "train")[-1]


def test_weights_are_readable_from_python_and_counted_right(trained):
    run = trained["nsa"]
    weights = load_file(run / "model.safetensors")
    counts = json.loads((run / "config.json").read_text())["parameters"]
    size = {name: array.size for name, array in weights.items()}
    assert sum(size.values()) == counts["total"]
    assert sum(n for name, n in size.items() if ".phi_" in name) == counts["phi"]
    assert sum(n for name, n in size.items() if ".gate." in name) == counts["gates"]
    assert sum(n for name, n in size.items() if ".k_proj.c" in name or ".v_proj.c" in name) * 2 == counts["extra_kv"]
    for name in ("q_proj.weight", "k_proj.cmp.weight", "v_proj.swa.weight", "phi_k.pe", "phi_v.w2", "gate.0.weight"):
        assert f"layers.0.attention.{name}" in weights


@pytest.mark.parametrize(
    "option", [["--share-kv"], ["--phi", "linear"], ["--phi", "mean"], ["--phi-per-kv-head"], ["--qk-norm"]]
)
def test_variants_of_the_model_train(tmp_path, corpus, option):
    arguments = ["--steps", 2, "--noise", 0.5, "--gate-balance", 0.1, "--selector-loss", 0.1, *TINY]
    arguments += ["--kv-heads", 2, *option]
    nsa("train", "--out", tmp_path / "run", "--data", corpus, *arguments)
    weights = load_file(tmp_path / "run" / "model.safetensors")
    counts = json.loads((tmp_path / "run" / "config.json").read_text())["parameters"]
    assert sum(array.size for array in weights.values()) == counts["total"]


def test_dense_layers(tmp_path, corpus):
    """All layers dense is full attention to the bit; one of two has its gates, phi and scalars in the other alone."""

    def train(name, *options):
        nsa("train", "--out", tmp_path / name, "--data", corpus, "--steps", 4, *TINY, "--layers", 2, *options)
        return load_file(tmp_path / name / "model.safetensors")

    full = train("full", "--attention", "full", "--partial-rotary-factor", 0.5)  # as NSA has by default
    dense = train("dense", "--dense-layers", "0,1")
    assert full.keys() == dense.keys() and all((full[name] == dense[name]).all() for name in full)
    options = ["--dense-layers", 1, "--noise", 0.5, "--gate-balance", 0.1, "--selector-loss", 0.1]
    mixed = train("mixed", *options)
    counts = json.loads((tmp_path / "mixed" / "config.json").read_text())["parameters"]
    assert sum(array.size for array in mixed.values()) == counts["total"]
    assert sum(array.size for name, array in mixed.items() if ".gate." in name) == counts["gates"]
    assert {name.split(".")[1] for name in mixed if ".gate." in name or ".phi_" in name} == {"0"}
    assert [layer["layer"] for layer in metrics(tmp_path / "mixed", "train")[-1]["layers"]] == [0]
    recomputed = train("recomputed", *options, "--recompute")
    assert all((mixed[name] == recomputed[name]).all() for name in mixed)
    report = tmp_path / "inspect.json"
    nsa("inspect", tmp_path / "mixed", "--json", report)
    assert [layer["layer"] for layer in json.loads(report.read_text())["layers"]] == [0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--dense-layers", 2], "dense_layers = [2]: must be ascending numbers 0 ... 1"),
        (["--dense-layers", "1,0"], "dense_layers = [1, 0]: must be ascending numbers 0 ... 1"),
        (["--dense-layers", "0,x"], "--dense-layers"),
        (["--dense-layers", 0, "--attention", "full"], "dense_layers = [0]: must be [] with attention full"),
    ],
)
def test_dense_layers_that_are_refused(options, expected, tmp_path, corpus):
    assert expected in refused(
        "train", "--out", tmp_path / "run", "--data", corpus, "--steps", 1, *TINY, "--layers", 2, *options
    )


SMALL = "--layers 1 --hidden-size 32 --heads 2 --kv-heads 1 --head-dim 16 --context 256 --steps 1 --threads 2".split()
RECIPE = {"kernel_size": 8, "kernel_stride": 8, "block_size": 32, "topk": 32, "share_kv": True, "rope_theta": 5e5}
RECIPE |= {"partial_rotary_factor": 0.5}
PAPER = {"kernel_size": 32, "kernel_stride": 16, "block_size": 64, "topk": 16, "share_kv": False, "rope_theta": 1e4}
PAPER |= {"partial_rotary_factor": 1}


@pytest.mark.parametrize(
    ("options", "expected", "selector_loss"),
    [
        ([], RECIPE, 0.1),
        (["--selector-loss", 0.2], RECIPE, 0.2),
        (["--selector-loss", 0], RECIPE, 0),
        (["--phi", "mean"], RECIPE, 0),
        (["--attention", "full"], RECIPE | {"partial_rotary_factor": 1}, 0),
        (["--partial-rotary-factor", 1], RECIPE | {"partial_rotary_factor": 1}, 0.1),
        (["--preset", "paper"], PAPER, 0),
        (["--preset", "paper", "--share-kv", "--topk", 4], PAPER | {"share_kv": True, "topk": 4}, 0),
        (["--separate-kv", "--rope-theta", 1e4], RECIPE | {"share_kv": False, "rope_theta": 1e4}, 0),
    ],
)
def test_presets(options, expected, selector_loss, tmp_path, corpus):
    nsa("train", "--out", tmp_path / "run", "--data", corpus, *SMALL, *options)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    model = config["model"]
    assert config["train"]["selector_loss"] == selector_loss
    assert {name: model[name] for name in expected} == expected
    assert model["num_layers"] == 1 and model["window_size"] == 512


def test_a_preset_is_for_new_runs(tmp_path, corpus, trained):
    assert "preset = 'best': must be recipe or paper" in refused(
        "train", "--out", tmp_path / "run", "--data", corpus, "--preset", "best", "--steps", 1
    )
    assert "--preset and --resume" in refused("train", "--out", trained["nsa"], "--resume", "--preset", "paper")
    assert "--preset and --init" in refused("train", "--out", tmp_path / "a", "--init", tmp_path, "--preset", "paper")


def test_a_narrow_phi_is_noted_once(tmp_path, corpus):
    done = nsa("train", "--out", tmp_path / "run", "--data", corpus, "--steps", 1, *TINY, "--phi-hidden", 5)
    assert "note: phi starts from Xavier weights, not as the mean: --phi-hidden 5 is below 2 * 16" in done.text
    assert "note" not in nsa("generate", tmp_path / "run", "--tokens", 1, "--prompt", "x").text


def test_equal_parameters_widens_the_full_model(tmp_path, corpus, trained):
    nsa("train", "--out", tmp_path / "run", "--data", corpus, "--attention", "full", "--equal-parameters", "--steps", 1,
        *TINY)  # fmt: skip
    totals = [json.loads((run / "config.json").read_text())["parameters"]["total"]
              for run in (tmp_path / "run", trained["nsa"])]  # fmt: skip
    assert abs(totals[0] - totals[1]) <= 3 * 32 / 2


def test_gradients_accumulate_to_the_same_step(tmp_path, corpus):
    """Two rows at once and two rows one after the other are the same step up to rounding."""
    weights = []
    for name, shape in (("wide", ["--batch-size", 2]), ("deep", ["--batch-size", 1, "--grad-accum", 2])):
        out = tmp_path / name
        nsa("train", "--out", out, "--data", corpus, "--steps", 1, *TINY, *shape)
        weights.append(load_file(out / "model.safetensors"))
    norms = [metrics(tmp_path / name, "end")[0]["tokens"] for name in ("wide", "deep")]
    assert norms[0] == norms[1]
    losses = [metrics(tmp_path / name, "eval")[-1]["loss"] for name in ("wide", "deep")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_sequences_are_short_first(tmp_path, corpus):
    """The same tokens in shorter sequences; of the context's own length they are those of a run without the option."""

    def run(*options):
        out = tmp_path / "-".join(map(str, ["run", *options]))
        nsa("train", "--out", out, "--data", corpus, "--steps", 4, *TINY, *options)
        return load_file(out / "model.safetensors")["embedding.weight"], metrics(out, "end")[0]["tokens"]

    usual, tokens = run()
    context = json.loads((tmp_path / "run" / "config.json").read_text())["train"]["context"]
    full, full_tokens = run("--context-warmup", context)
    short, short_tokens = run("--context-warmup", context // 4)
    assert tokens == full_tokens == short_tokens
    assert (usual == full).all() and (usual != short).any()


def test_the_gate_penalty_pulls_the_gates_together(tmp_path, corpus):
    def imbalance(weight):
        out = tmp_path / str(weight)
        nsa("train", "--out", out, "--data", corpus, "--steps", 24, "--lr", 0.02, "--gate-balance", weight, *TINY)
        layer = metrics(out, "train")[-1]["layers"][0]
        gates = [layer["gate_cmp"], layer["gate_slc"], layer["gate_swa"]]
        return max(gates) / min(gates)

    assert imbalance(10) < imbalance(0)


@pytest.mark.parametrize("option", [[], ["--dtype", "bfloat16"], ["--share-kv"]], ids=("float32", "bfloat16", "shared"))
def test_the_selector_loss_is_logged_and_falls(tmp_path, corpus, option):
    def divergence(weight):
        arguments = ["--steps", 24, "--lr", 0.01, "--selector-loss", weight, *TINY, "--threads", 1, *option]
        nsa("train", "--out", tmp_path / str(weight), "--data", corpus, *arguments)
        return metrics(tmp_path / str(weight), "train")[-1]["layers"][0]["selector_loss"]

    assert divergence(1) < 0.3 * divergence(1e-9)


def test_the_queries_of_the_selector_loss(tmp_path, corpus):
    def divergence(*options):
        out = tmp_path / "_".join(map(str, ("run", *options)))
        nsa("train", "--out", out, "--data", corpus, "--steps", 4, "--selector-loss", 1, *TINY, *options)
        return metrics(out, "train")[-1]["layers"][0]["selector_loss"]

    given = divergence()
    assert given == divergence("--selector-queries", 16)  # of 256 tokens
    assert given != divergence("--selector-queries", 100)
    message = refused("train", "--out", tmp_path / "refused", "--data", corpus, "--selector-queries", 4, *TINY)
    assert "selector_queries = 4: needs a selector_loss above 0" in message


def test_the_selector_loss_leaves_shared_keys_to_the_text(tmp_path, corpus):
    """The first step with it moves φ of the keys to other weights, and nothing else."""

    def weights(weight):
        arguments = ["--steps", 1, "--clip", 0, "--selector-loss", weight, *TINY, "--threads", 1, "--share-kv"]
        nsa("train", "--out", tmp_path / str(weight), "--data", corpus, *arguments)
        return load_file(tmp_path / str(weight) / "model.safetensors")

    without, trained = weights(0), weights(10)
    moved = {name for name in without if (without[name] != trained[name]).any()}
    assert moved and all(".phi_k." in name for name in moved), moved


def test_the_selector_loss_is_nothing_to_full_attention(tmp_path, corpus):
    for weight in (0, 0.1):
        options = ["--attention", "full", "--steps", 2, "--selector-loss", weight, *TINY, "--threads", 1]
        nsa("train", "--out", tmp_path / str(weight), "--data", corpus, *options)
    without, given = (load_file(tmp_path / weight / "model.safetensors") for weight in ("0", "0.1"))
    assert all((without[name] == given[name]).all() for name in without)


def test_without_selector_loss_nothing_is_computed(trained, tmp_path, corpus):
    nsa("train", "--out", tmp_path / "none", "--data", corpus, "--steps", 24, "--selector-loss", 0, *TINY)
    usual, none = (load_file(run / "model.safetensors") for run in (trained["nsa"], tmp_path / "none"))
    assert all((usual[name] == none[name]).all() for name in usual)
    assert all("selector_loss" not in layer for line in metrics(tmp_path / "none", "train") for layer in line["layers"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--steps", "0", "--tokens", "-1"], "tokens"),
        (["--steps", "3", "--minutes", "1"], "exactly one of steps, tokens and minutes"),
        (["--context-warmup", "65", "--context", "64", "--steps", "3"], "context_warmup = 65: must be 0 ... 64"),
        (["--context-warmup", "16", "--minutes", "1"], "context_warmup = 16: needs steps or tokens, not minutes"),
        (["--attention", "sparse"], "attention = 'sparse': must be nsa, full or window"),
        (["--phi", "max"], "phi = 'max': must be mean, linear or mlp"),
        (["--selector-loss", ".1", "--share-kv", "--phi", "mean"], "selector_loss = 0.1: must be 0 with share_kv"),
        (["--kernel-stride", "7"], "kernel_stride"),
        (["--topk", "2"], "topk"),
        (["--heads", "3", "--kv-heads", "2"], "num_kv_heads = 2: must divide num_heads = 3"),
        (["--head-dim", "20"], "head_dim = 20: must be a multiple of 8"),
        (["--lr", "nan"], "lr"),
        (["--dtype", "float8"], "dtype = 'float8'"),
        (["--data", "/no/such/folder"], "/no/such/folder"),
        (["--tokenizer", "/no/such/model"], "tokenizer"),
        (["--held-out-percent", "101"], "--held-out-percent"),
        (["--batch-size", "99999999999"], "batch_size"),
        (["--unknown"], "--unknown"),
    ],
)
def test_bad_arguments_are_refused_by_name(tmp_path, corpus, arguments, expected):
    data = [] if "--data" in arguments else ["--data", corpus]
    assert expected in refused("train", "--out", tmp_path / "run", *data, *arguments)
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_finished_run_needs_overwrite(trained, corpus):
    assert "--resume" in refused("train", "--out", trained["nsa"], "--data", corpus, "--steps", 1)


@pytest.mark.parametrize("attention", ["nsa", "full"])
def test_recomputed_layers_give_the_same_weights(tmp_path, corpus, attention):
    arguments = ["--attention", attention, "--steps", 3, *TINY]
    if attention == "nsa":
        arguments += ["--noise", 0.5, "--gate-balance", 0.1, "--selector-loss", 0.1]
    for name, option in (("kept", []), ("recomputed", ["--recompute"])):
        nsa("train", "--out", tmp_path / name, "--data", corpus, *arguments, *option)
    kept, again = (load_file(tmp_path / name / "model.safetensors") for name in ("kept", "recomputed"))
    assert all((kept[name] == again[name]).all() for name in kept)


@pytest.mark.parametrize("phi", ["mlp", "linear"])
def test_a_step_moves_phi_by_a_tenth_at_most(tmp_path, corpus, phi):
    """Where blocks are as long and heads as wide as usual; at the common rate it would be a quarter and more."""
    wide = "--layers 1 --hidden-size 64 --heads 1 --kv-heads 1 --head-dim 64 --dtype float32 --phi".split()
    short = "--context 256 --batch-size 1 --steps 1 --warmup-steps 0 --eval-every 0 --eval-tokens 256 --data".split()

    def weights(name, *options):
        nsa("train", "--out", tmp_path / name, *wide, phi, *short, corpus, *options)
        return load_file(tmp_path / name / "model.safetensors")

    start, usual, common = weights("a", "--lr", 0), weights("b"), weights("c", "--phi-lr-scale", 1)

    def moved(after, name):
        return np.sqrt(np.mean((after[name] - start[name]) ** 2) / np.mean(start[name] ** 2))

    for part in ("phi_k", "phi_v"):
        name = f"layers.0.attention.{part}.w1"
        assert 0 < moved(usual, name) <= 0.1 < moved(common, name)
    for name in start:
        if ".phi_" not in name:
            assert (usual[name] == common[name]).all(), name
