"""Measuring and looking inside: eval, recall, needle, inspect, bench, info and debug compare."""

import importlib
import itertools
import json
import math
import re

import pytest
from safetensors.torch import load_file

from conftest import PROGRAM, ROOT, TINY, metrics, nsa, open_checkpoint, refused

TINY_BENCH = "--lengths 64,96 --heads 2 --head-dim 16 --v-head-dim 16 --repeats 1 --budget 0.01 --threads 2".split()


def result(tmp_path, *arguments, timeout=300):
    path = tmp_path / "out.json"
    text = nsa(*arguments, "--json", path, timeout=timeout).text
    return json.loads(path.read_text()), text


def test_eval_by_position_adds_up(trained, corpus, tmp_path):
    out, _ = result(tmp_path, "eval", trained["nsa"], "--tokens", 0)
    parts = out["loss_by_position"]
    assert out["kind"] == "nsa-eval" and out["tokens"] == sum(p["tokens"] for p in parts) > 256
    mean = sum(p["loss"] * p["tokens"] for p in parts) / out["tokens"]
    assert out["loss"] == pytest.approx(mean) and out["bits_per_byte"] == pytest.approx(mean / math.log(2))
    assert all(a["to"] == b["from"] for a, b in itertools.pairwise(parts))
    assert 0 < out["loss"] < math.log(257) + 0.5


def test_eval_equals_the_last_evaluation_of_the_training(trained, tmp_path):
    lines = [json.loads(line) for line in (trained["nsa"] / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "eval"][-1]
    out, _ = result(tmp_path, "eval", trained["nsa"], "--tokens", 65536, "--threads", 2)
    assert out["tokens"] == last["eval_tokens"]
    assert out["loss"] == pytest.approx(last["loss"], rel=1e-3)


def test_eval_refuses_what_is_no_checkpoint(tmp_path, corpus):
    assert "nowhere" in refused("eval", tmp_path / "nowhere")
    (tmp_path / "model.safetensors").write_bytes(b"no checkpoint")
    refused("eval", tmp_path / "model.safetensors", "--data", corpus)


def test_inspect_tells_what_the_queries_select(trained, corpus, tmp_path):
    out, text = result(tmp_path, "inspect", trained["nsa"], "--queries", 8, "--maps")
    (layer,) = out["layers"]
    (head,) = layer["kv_heads"]
    assert "KV head 0" in text
    assert all(0 < layer["gates"][branch] < 1 for branch in ("cmp", "slc", "swa"))
    assert 0 <= head["entropy"] <= head["entropy_max"] + 1e-9
    for position, blocks, forced in zip(
        *(head["map"][k] for k in ("query_positions", "blocks", "forced")), strict=True
    ):
        own = position // out["block_size"]
        assert len(blocks) == min(out["topk"], own + 1) and blocks == sorted(set(blocks)) and blocks[-1] == own
        assert set(forced) == {b for b in range(own + 1) if b < 1 or b > own - 2}


def test_inspect_needs_a_selection(trained):
    assert "attention full" in refused("inspect", trained["full"])


def test_needle_is_a_table_of_lengths_and_depths(trained, tmp_path):
    arguments = "--lengths 64,128 --depths 0,0.5,1 --samples 2".split()
    out, _ = result(tmp_path, "needle", trained["window"], *arguments)
    assert out["lengths"] == [64, 128] and out["depths"] == [0, 0.5, 1]
    for table in ("accuracy", "exact", "loss", "loss_without_needle"):
        assert [len(row) for row in out[table]] == [3, 3]
    assert all(0 <= cell <= 1 for row in out["accuracy"] for cell in row)
    for exact, (low, high) in zip(*(itertools.chain(*out[t]) for t in ("exact", "exact_interval")), strict=True):
        assert 0 <= low <= exact <= high <= 1 and high - low > 0.5  # two samples tell little


@pytest.mark.parametrize("task", ["multikey", "multivalue", "multiquery", "tracking"])
@pytest.mark.parametrize("attention", ["nsa", "full"])
def test_needle_tasks_score_answers(trained, tmp_path, attention, task):
    """Several answers share a context: one may be right where another is wrong."""
    arguments = "--lengths 250 --depths 0,1 --samples 3 --lines 3 --task".split()
    baseline = ["--baseline", "quest", "--budget", 64] if attention == "full" else []
    out, text = result(tmp_path, "needle", trained[attention], *arguments, task, *baseline)
    assert (out["task"], out["lines"]) == (task, 3) and f"{task}, 3 samples each" in text
    for exact, answers, tokens in zip(*(out[name][0] for name in ("exact", "answers", "accuracy")), strict=True):
        assert 0 <= exact <= answers <= 1 and 0 <= tokens <= 1
    message = refused("needle", trained[attention], "--task", task, "--lengths", 64, "--lines", 9)
    assert "length 64: too short for needle, question and answer" in message


def test_needle_has_one_line_without_a_task(trained, tmp_path):
    arguments = "--lengths 64 --depths 0.5 --samples 2".split()
    out, _ = result(tmp_path, "needle", trained["full"], *arguments)
    single, _ = result(tmp_path, "needle", trained["full"], *arguments, "--task", "single", "--lines", 9)
    assert out == single and out["task"] == "single" and "lines" not in out and out["answers"] == out["exact"]
    assert "--task: two not in" in refused("needle", trained["full"], "--task", "two")


def test_a_forward_of_many_needle_contexts_is_split(trained, tmp_path):
    """135 contexts of 1000 tokens take several forwards; each sample has its own loss without the needle."""
    arguments = "--lengths 1000 --depths 0,1 --threads 2 --samples".split()
    many, few = (result(tmp_path, "needle", trained["window"], *arguments, n)[0] for n in (45, 44))
    assert many["loss"][0][0] * 45 - few["loss"][0][0] * 44 == pytest.approx(many["loss"][0][0], rel=0.3)


def test_diagnosis_of_needles(trained, tmp_path):
    """Every block is selected where topk covers the context; else those that rank first are."""
    arguments = "--lengths 250 --depths 0,0.5 --samples 4 --diagnose".split()
    out, text = result(tmp_path, "needle", trained["nsa"], *arguments, "--set", "topk=16")
    found = out["diagnosis"]
    assert [(head["layer"], head["kv_head"]) for head in found["heads"]] == [(0, 0)]
    missed = sum(4 - round(4 * exact) for exact in out["exact"][0])
    assert len(found["misses"]) == missed > 0 and f"misses: {missed} of 8" in text
    for miss in found["misses"]:
        (block,) = miss["blocks"]
        assert block["selected"] and 0 < block["mass"] == pytest.approx(block["dense_mass"], rel=1e-4)
        assert miss["depth"] in (0, 0.5) and 0 <= miss["sample"] < 4
    some, _ = result(tmp_path, "needle", trained["nsa"], *arguments, "--set", "topk=9")
    blocks = [miss["blocks"][0] for miss in some["diagnosis"]["misses"]]
    assert {block["selected"] for block in blocks if not block["forced"]} == {False, True}
    for block in blocks:
        assert (block["mass"] > 0) == block["selected"] and block["mass"] >= block["dense_mass"] * block["selected"]
        # The first block and two local ones are among the topk.
        assert block["forced"] or block["selected"] == (block["rank"] < 9 - 3)
    assert "attention full: only a model with attention nsa" in refused("needle", trained["full"], *arguments)


def test_needle_asks_at_eleven_depths(trained, tmp_path):
    out, text = result(tmp_path, "needle", trained["full"], "--lengths", 64, "--samples", 1)
    assert out["depths"] == pytest.approx([d / 10 for d in range(11)])
    assert len(re.findall(r"^ +64 ", text, re.MULTILINE)) == 11


def test_key_value_lines_in_training_data(corpus, tmp_path):
    """The same seed plants the same lines, other text stays, and so do the documents held out."""

    def run(name, *options):
        nsa("train", "--out", tmp_path / name, "--data", corpus, "--steps", 8, *TINY, *options)
        tensors, _ = open_checkpoint(tmp_path / name / "model.safetensors")
        (last,) = metrics(tmp_path / name, "eval")
        return tensors["embedding.weight"].tolist(), last["eval_tokens"]

    once, tokens = run("once", "--retrieval-fraction", 0.3)
    assert run("again", "--retrieval-fraction", 0.3) == (once, tokens)
    without, same_tokens = run("without")
    assert without != once and same_tokens == tokens
    kinds = ("--retrieval-fraction", 0.3, "--retrieval-kinds")
    assert run("single", *kinds, "single") == (once, tokens)
    several, _ = run("several", *kinds, "single,multivalue,tracking")
    assert several != once and run("several-again", *kinds, "single,multivalue,tracking")[0] == several
    config = json.loads((tmp_path / "several" / "config.json").read_text())
    assert config["train"]["retrieval_kinds"] == ["single", "multivalue", "tracking"]
    assert "--retrieval-kinds: chains not in" in refused(
        "train", "--out", tmp_path / "x", "--retrieval-kinds", "chains"
    )
    assert "retrieval_fraction = 0.7: must be 0 ... 0.5" in refused(
        "train", "--out", tmp_path / "x", "--retrieval-fraction", 0.7
    )
    assert "train.retrieval_fraction" in refused(
        "train", "--out", tmp_path / "once", "--resume", "--retrieval-fraction", 0.1
    )


@pytest.mark.parametrize(
    "templates, expected",
    [
        (["--needle", "{key} is a number"], "needle '{key} is a number': must have {value}, the answer"),
        (["--question", "{key} = {value}"], "question '{key} = {value}': must not have {value}, the answer"),
        (["--question", "is "], "question 'is ': must have {key}"),
        (["--needle", "it is {value}"], "needle 'it is {value}': must have {key}"),
        (["--task", "multikey", "--needle", "it is {value}", "--question", "is "], "must have {key}"),
    ],
)
def test_needle_refuses_templates_that_measure_nothing(trained, templates, expected):
    assert expected in nsa("needle", trained["nsa"], "--lengths", 128, *templates, code=2).text
    passkey = ["--needle", "The pass key is {value}.", "--question", "What is the pass key? "]
    nsa("needle", trained["nsa"], *"--lengths 128 --depths 0 --samples 1".split(), *passkey)


def test_needle_refuses_a_context_longer_than_the_texts(trained):
    out = nsa("needle", trained["nsa"], "--lengths", "64,10000000", "--samples", 1, code=2)
    assert b"length 10000000: the texts have" in out.stderr and b"too few" in out.stderr
    assert " 64 " not in out.stdout.decode()  # refused before the work begins


def test_recall_beyond_the_window(tmp_path):
    """NSA and full attention recall pairs from beyond the window, at every distance: the demo's recall map. The window
    alone cannot, trained alone or cut out of the NSA model."""
    out, text = result(tmp_path, "recall", "--check", "--threads", 1, timeout=900)
    assert "chance" in text
    assert out["distances"][0] > 2 * (out["window_size"] - 1)  # of two layers
    found = {model: score.get("by_distance") for model, score in out["scores"].items()}
    assert all(cell > 0.95 for model in ("nsa", "full") for cell in found[model])
    assert all(cell < 0.2 for cell in found["window"])


def test_multi_hop_recall_beyond_the_window(tmp_path):
    """Three hops, the value of each the key of the next. Full attention takes longer to learn that."""
    out, _ = result(tmp_path, "recall", "--hops", 3, "--pairs", 12, "--steps", 400, "--threads", 1, timeout=900)
    assert out["scores"]["nsa"]["accuracy"] > 0.95 and out["scores"]["window"]["accuracy"] < 0.05


def test_recall_of_pairs_far_apart(tmp_path):
    """They begin five tokens apart, and move away as they are learnt."""
    out, text = result(tmp_path, "recall", "--pairs", 4, "--length", 200, "--steps", 600, "--threads", 1, timeout=900)
    for model in ("nsa", "full"):
        slots = [step[model]["slot"] for step in out["history"]]
        assert out["slot"] == 31 and {5, 31} < {*slots} <= {5, 10, 20, 31} and slots == sorted(slots)
    assert min(out["scores"][model]["accuracy"] for model in ("nsa", "full")) > 0.95
    assert "ended before" not in text


def test_the_accuracy_of_recall_is_a_mean_from_the_first_step_on(tmp_path):
    """One answer a step, so that after one step it is right or wrong."""
    options = "recall --pairs 1 --slot 2 --values 1 --tokens-per-step 12 --steps 1 --threads 1 --seed".split()
    found = {
        result(tmp_path, *options, seed)[0]["history"][0][model]["accuracy"]
        for seed in range(6)
        for model in ("nsa", "full")
    }
    assert found == {0, 1}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recall_with_the_selector_loss(dtype, tmp_path):
    """It changes the NSA model and no other."""
    options = "recall --pairs 8 --gap 100 --topk 4 --steps 4 --threads 1".split()
    options += ["--dtype", dtype, "--selector-loss"]
    without, with_loss = (result(tmp_path, *options, weight)[0]["history"][-1] for weight in (0, 10))
    assert without["nsa"]["loss"] != with_loss["nsa"]["loss"] and without["full"] == with_loss["full"]


def test_recall_refuses_a_gap_that_windows_can_bridge():
    assert "gap = 5" in refused("recall", "--gap", 5, "--steps", 1)


def test_recall_refuses_impossible_tasks():
    assert "length = 100: must be at least 249" in refused("recall", "--length", 100)
    assert "length = 64: must be at least 249" in refused("recall", "--steps", 1, "--lengths", "512,64")
    assert "hops = 5: must be at most pairs = 4" in refused("recall", "--pairs", 4, "--hops", 5)
    refused("recall", "--length", 512, "--slot", 4)
    assert "selector_loss" in refused("recall", "--selector-loss", 1, "--share-kv", "--phi", "mean")


def test_multi_hop_accuracy_is_at_most_that_of_its_worst_hop(tmp_path):
    options = "--pairs 7 --hops 3 --length 100 --lengths 64,200 --steps 2 --threads 2".split()
    out, text = result(tmp_path, "recall", *options)
    assert (out["length"], out["hops"], out["pairs"]) == (100, 3, 7) and "multi-hop recall: 3 hops" in text
    assert out["slot"] == (100 - 9 - 6) // 7 and out["gap"] == 100 - 6 - 7 * out["slot"]
    assert out["distances"][0] == out["gap"] and out["distances"][-1] == 100
    for model in ("nsa", "full", "window"):
        score = out["scores"][model]
        assert len(score["by_hop"]) == 3 and len(score["by_length"]) == 2
        assert len(score["by_distance"]) == len(out["distances"]) - 1
        assert 0 <= score["accuracy"] <= min(score["by_hop"]) <= 1


def test_recall_at_the_language_models_own_sizes(tmp_path):
    """64 pairs, l, d, l', n = 32, 16, 64, 16 and a window of 512."""
    sizes = "--kernel-size 32 --kernel-stride 16 --block-size 64 --topk 16 --window-size 512".split()
    out, text = result(tmp_path, "recall", "--pairs", 64, "--length", 4096, *sizes, "--steps", 1, "--threads", 2)
    assert out["length"] == 4096 and out["gap"] > 2 * 511 and "window 512, 1024 selected tokens" in text
    assert all(0 <= out["scores"][model]["accuracy"] <= 0.2 for model in ("nsa", "full", "window"))


def test_bench_takes_the_shape_of_a_run(trained, tmp_path):
    options = "--lengths 96 --repeats 1 --budget 0.01 --threads 2 --no-backward --no-parts --no-plain".split()
    out, _ = result(tmp_path, "bench", "--model", trained["nsa"], *options)
    model = json.loads((trained["nsa"] / "config.json").read_text())["model"]
    for name in ("num_heads", "num_kv_heads", "head_dim", "v_head_dim", "phi", "topk", "window_size"):
        assert out["settings"][name] == model[name]
    assert "nowhere" in refused("bench", "--model", tmp_path / "nowhere")


def test_bench_reports_every_operation(tmp_path):
    out, text = result(tmp_path, "bench", *TINY_BENCH)
    operations = {r["op"] for r in out["results"]}
    forward = {"compress", "compressed_attention", "selected_attention", "sliding_window_attention"}
    assert forward | {f"{op}_backward" for op in forward} | {"select_blocks", "combine"} <= operations
    whole = {"forward", "plain_forward", "dense_forward"}
    assert whole | {f"{op}_backward" for op in whole} <= operations
    assert {r["variant"] for r in out["results"] if r["op"] == "forward"} == {"mean", "mlp"}
    for r in out["results"]:
        assert r["best_s"] > 0 and r["median_s"] >= r["best_s"] and r["judged"] == (r["cpu_over_wall"] >= 1.9)
        assert r["gflop"] > 0 and r["bytes"] > 0 and r["part_of"] == ""
        assert r["peak_gflops"] is None or r["share"] == pytest.approx(r["gflops"] / r["peak_gflops"])
    for ratio in out["ratios"]:
        assert ratio["over_dense"] == pytest.approx(ratio["dense_seconds"] / ratio["seconds"])
    assert "faster than dense attention" in text
    assert "bench --lengths 64,96" in out["command"] and re.fullmatch(r"\d{4}-\d\d-\d\d", out["date"])


def test_bench_times_some_operations(tmp_path):
    out, _ = result(tmp_path, "bench", *TINY_BENCH, "--only", "window")
    found = [(r["op"], r["length"]) for r in out["results"]]
    ops = ("sliding_window_attention", "sliding_window_attention_backward")
    assert found == [(op, length) for length in (64, 96) for op in ops]
    assert "--only dense: no operation's name contains it" in refused("bench", *TINY_BENCH, "--only", "dense")


@pytest.mark.parametrize("selection", ["own", "random", "clustered", "model-like"])
def test_bench_attends_to_given_blocks(selection, tmp_path):
    out, text = result(tmp_path, "bench", *TINY_BENCH, "--selection", selection, "--phi", "mean", "--no-plain")
    assert out["settings"]["selection"] == selection
    assert out["neighbour_overlap"] == [{"length": length, "measured": None} for length in (64, 96)]
    assert f"neighbour overlap, {selection} selection: no choice at 64, no choice at 96" in text
    assert all(ratio["over_dense"] > 0 and ratio["over_plain"] is None for ratio in out["ratios"])
    assert not any(r["op"].startswith("plain") for r in out["results"])


def test_bench_selects_as_models_do_by_default(tmp_path):
    tiny = TINY_BENCH[2:]  # but for the lengths
    command = [
        "bench",
        "--lengths",
        2048,
        *tiny,
        "--topk",
        4,
        "--block-size",
        16,
        "--only",
        "selected",
        "--no-backward",
    ]
    out, text = result(tmp_path, *command)
    assert (out["settings"]["selection"], out["settings"]["neighbour_overlap"]) == ("model-like", 0.8)
    (overlap,) = out["neighbour_overlap"]
    assert overlap["length"] == 2048 and overlap["measured"] == pytest.approx(0.8, abs=0.01)
    out, text = result(tmp_path, *command, "--neighbour-overlap", 0.3)
    (overlap,) = out["neighbour_overlap"]
    assert overlap["measured"] > 0.7 and f"{overlap['measured']:.3f} at 2048 (the least possible)" in text
    out, _ = result(tmp_path, *command, "--selection", "own")
    assert out["neighbour_overlap"] == [] and "neighbour_overlap" not in out["settings"]


def test_bench_correlates_queries_until_their_own_blocks_overlap(tmp_path):
    command = ["bench", "--lengths", 1024, *TINY_BENCH[2:], "--topk", 8, "--block-size", 16, "--phi", "mean"]
    command += ["--selection", "own", "--no-backward", "--no-parts", "--no-plain"]
    random, _ = result(tmp_path, *command)
    out, _ = result(tmp_path, *command, "--neighbour-overlap", 0.85)
    assert random["neighbour_overlap"][0]["measured"] < 0.75 and "neighbour_overlap" not in random["settings"]
    assert out["neighbour_overlap"][0]["measured"] == pytest.approx(0.85, abs=0.02)
    assert out["settings"]["neighbour_overlap"] == 0.85


def test_bench_attends_to_recorded_blocks(trained, tmp_path):
    blocks = tmp_path / "blocks.safetensors"
    inspected, _ = result(tmp_path, "inspect", trained["nsa"], "--blocks", blocks)
    (layer,), length = inspected["layers"], inspected["tokens"]
    (head,), (name, recorded) = layer["kv_heads"], *load_file(blocks).items()
    assert name == f"layers.{layer['layer']}" and recorded.shape == (length, 1, inspected["topk"])
    for query, row in zip(head["map"]["query_positions"], head["map"]["blocks"], strict=True):
        assert [b for b in recorded[query, 0].tolist() if b >= 0] == row
    replay = ["bench", "--model", trained["nsa"], "--blocks", blocks, "--repeats", 1, "--budget", 0.01]
    replay += ["--only", "selected", "--no-backward", "--lengths"]
    out, _ = result(tmp_path, *replay, length, "--layer", layer["layer"])
    assert out["settings"]["selection"] == "recorded"
    assert out["neighbour_overlap"] == [{"length": length, "measured": pytest.approx(head["neighbour_overlap"])}]
    assert f"has blocks of {length} queries" in refused(*replay, length + 1, "--layer", layer["layer"])
    assert "has no tensor layers.7" in refused(*replay, length, "--layer", 7)
    refused(*replay, length, "--selection", "random")


def test_python_takes_the_blocks_of_the_program(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench" / "peers")
    peers = importlib.import_module("peers")
    blocks, overlap = peers.given_blocks(PROGRAM, "model-like", 4096, 2)
    assert blocks.shape == (4096, 2, peers.TOPN) and overlap == pytest.approx(0.8, abs=0.01)
    before, after = blocks[1023:-1], blocks[1024:]
    assert (before[..., None] == after[..., None, :]).sum() / after.numel() == pytest.approx(overlap)
    for options in (["--lengths", "64,96"], ["--selection", "own", "--lengths", 64]):
        refused("bench", *options, "--write-blocks", "blocks.safetensors")


def test_bench_of_minimax_m3(tmp_path):
    """The command of tools/gpu.sh, on the CPU: 17 blocks of 128, so that the last queries leave one out."""
    script = (ROOT / "tools" / "gpu.sh").read_text().replace("\\\n", " ")
    (command,) = re.findall(r"run minimax_m3 \S+/nsa (bench .*) --json", script)
    length = 17 * 128
    command = command.replace("--device cuda", "--device cpu").replace("--lengths 8192,65536", f"--lengths {length}")
    out, text = result(tmp_path, *command.split(), "--repeats", 1, "--threads", 2)
    rows = {r["op"]: r for r in out["results"]}
    assert [*rows] == ["selected_attention", "selected_attention_backward"] and len(out["results"]) == 2
    pairs = sum(min(t + 1, 15 * 128 + t % 128 + 1) for t in range(length))
    assert rows["selected_attention"]["gflop"] == pytest.approx(4e-9 * pairs * 64 * 128)
    assert rows["selected_attention_backward"]["gflop"] == pytest.approx(10e-9 * pairs * 64 * 128)
    assert out["ratios"] == [] and "vs dense" not in text


def test_bench_refuses_peers_of_other_devices(tmp_path):
    path = tmp_path / "peers.json"
    settings = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "v_head_dim": 16, "dtype": "bfloat16"}
    path.write_text(json.dumps({"gpu": "a GPU", "settings": settings, "lengths": {}}))
    assert "measured on a GPU, not on this device" in refused("bench", *TINY_BENCH, "--peers", path)
    path.write_text("[]")
    assert "not a result of bench/peers/peers.py" in refused("bench", *TINY_BENCH, "--peers", path)
    assert "cannot be read" in refused("bench", *TINY_BENCH, "--peers", tmp_path / "nowhere")


def test_bench_refuses_flash3_that_does_not_load(tmp_path):
    (tmp_path / "module.so").write_text("not a library")
    for path in (tmp_path / "module.so", tmp_path / "nowhere"):
        assert f"--flash3 {path}: cannot be loaded" in refused("bench", *TINY_BENCH, "--flash3", path)


def test_bench_marks_what_it_extrapolates(tmp_path):
    limits = "--longest-dense-forward 64 --no-backward --no-parts".split()
    out, _ = result(tmp_path, "bench", *TINY_BENCH, *limits)
    dense = {
        r["length"]: r
        for r in out["results"]
        if r["op"] == "dense_forward" and (r["extrapolated"] or r["length"] == 64)
    }
    assert dense[96]["extrapolated"] and not dense[64]["extrapolated"]
    best = min(r["best_s"] for r in out["results"] if r["op"] == "dense_forward" and r["length"] == 64)
    assert dense[96]["best_s"] == pytest.approx(best * (96 / 64) ** 2)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--lengths", "8"],
        ["--kv-heads", "3"],
        ["--topk", "2"],
        ["--dtype", "float16"],
        ["--phi", "max"],
        ["--lengths", "x"],
        ["--selection", "all"],
        ["--neighbour-overlap", "1.1"],
        ["--neighbour-overlap", "0.8", "--selection", "random"],
        ["--layer", "1"],
        ["--only", "selected", "--no-parts"],
        ["--only", "selected", "--targets"],
    ],
)
def test_bench_refuses(arguments):
    refused("bench", *arguments)


def test_info_describes_the_kernels_of_a_call():
    lines = nsa("info", "--describe", "--dtype", "float32").stdout.decode().splitlines()
    if lines[0].startswith("none: this build of libnsa has no CUDA backend"):
        assert len(lines) == 1
    else:
        assert "compressed_attention: portable kernels: neither bfloat16 nor float16" in lines
    assert "num_kv_heads = 4: must divide num_heads = 6" in refused("info", "--describe", "--heads", 6)
    assert "topk" in refused("info", "--describe", "--topk", 0)


def test_info_says_what_was_chosen_and_why(monkeypatch):
    assert "NSA_BACKEND is not set" in nsa("info").text
    monkeypatch.setenv("NSA_BACKEND", "reference")
    monkeypatch.setenv("NSA_CPU_ISA", "portable")
    text = nsa("info").text
    assert "chosen: reference, NSA_BACKEND = reference" in text
    assert "chosen: portable, NSA_CPU_ISA = portable" in text


def test_debug_compare_repeats_dumped_calls(corpus, tmp_path, monkeypatch):
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    monkeypatch.setenv("NSA_DUMP", str(dumps))
    nsa("train", "--out", tmp_path / "run", "--data", corpus, "--steps", 1, *TINY)
    nsa("bench", *TINY_BENCH, "--lengths", 64, "--dtype", "bfloat16", "--phi", "linear")
    nsa("generate", tmp_path / "run", "--prompt", "def value(self): return self" * 4, "--tokens", 3)
    monkeypatch.delenv("NSA_DUMP")
    one_of_each = {path.stem.split("-", 2)[2]: path for path in sorted(dumps.iterdir())}
    assert len(one_of_each) >= 14 and {"prefill", "decode"} <= set(one_of_each), sorted(one_of_each)
    text = nsa("debug", "compare", *one_of_each.values()).text
    for operation, path in one_of_each.items():
        part = text.split(str(path))[1].split("/dumps/")[0]
        assert f"{operation} on the backend" in part
        errors = [line.split() for line in part.splitlines() if "e-" in line or "e+" in line]
        assert all(float(e[3]) < 2e-2 for e in errors), part  # bfloat16
        assert "not finite" not in part


def test_debug_compare_refuses_other_files(trained):
    assert "no dump" in refused("debug", "compare", trained["nsa"] / "model.safetensors")
