"""The report: made of run folders and results, complete, self-contained, and clear about what it cannot read."""

import itertools
import json
import math
import os
import random
import re
import signal

import pytest

from nsa.report.__main__ import main
from nsa.report.fields import steps_of_one_token
from nsa.report.page import verdicts
from nsa.report.sources import read_sources
from nsa.report.training import gates, selection_health

LENGTHS = [1024, 4096, 16384, 65536]


def write_run(folder, attention, steps=120, context=4096):
    rng = random.Random(attention)
    folder.mkdir(parents=True)
    counts = {"phi": 40000, "gates": 9000, "extra_kv": 60000, "rest": 3000000, "total": 3109000}
    config = {"model": {"attention": attention}, "train": {"context": context}, "parameters": counts}
    (folder / "config.json").write_text(json.dumps(config))
    lines = []
    for step in range(1, steps + 1):
        done = step / steps
        loss = 1.4 + 4 * math.exp(-6 * done) + rng.gauss(0, 0.06)
        line = {"kind": "train", "step": step, "tokens": step * 8192, "seconds": step * 2.0, "loss": loss}
        line["tokens_per_second"] = 4000 + rng.gauss(0, 150) + 600 * (attention == "nsa")
        if attention == "nsa":
            gates = {"gate_cmp": 0.5 - 0.1 * done, "gate_slc": 0.5 + 0.2 * done, "gate_swa": 0.5 + 0.1 * done}
            health = {"unforced_share": 0.6, "selection_entropy": 2 + done, "neighbour_overlap": 0.7}
            line["layers"] = [{k: v - 0.04 * i for k, v in (gates | health).items()} for i in range(4)]
        lines.append(line)
        if step % 30 == 0:
            edges = [0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
            bins = [
                {"from": a, "to": b, "loss": loss + 1 / (1 + a / 100), "tokens": 9}
                for a, b in itertools.pairwise(edges)
            ]
            held_out = {
                "kind": "eval",
                "loss": loss + 0.1,
                "bits_per_byte": loss / math.log(2),
                "loss_by_position": bins,
            }
            lines.append({**held_out, "step": step, "tokens": line["tokens"], "seconds": line["seconds"]})
    lines.append({"kind": "end", "step": steps, "reason": "finished"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def bench():
    results = []
    for factor, suffix in ((1.0, "forward"), (3.5, "forward_backward")):
        for n in LENGTHS:
            point = {"length": n, "extrapolated": False}
            results.append({**point, "op": suffix, "variant": "mean", "best_s": factor * 2e-5 * n * (1 + n / 2e5)})
            results.append({**point, "op": suffix, "variant": "mlp", "best_s": factor * 2.6e-5 * n * (1 + n / 2e5)})
            point["extrapolated"] = n > 16384
            results.append({**point, "op": f"dense_{suffix}", "variant": "gqa", "best_s": factor * 2.7e-8 * n * n})
            results.append({**point, "op": f"dense_{suffix}", "variant": "expanded", "best_s": factor * 3e-8 * n * n})
            results.append({**point, "op": f"plain_{suffix}", "variant": "", "best_s": factor * 1.1e-8 * n * n})
    crossover = {p: {"dense": 1024, "plain": 4096} for p in ("forward", "forward_backward")}
    settings = {"dtype": "bfloat16", "num_heads": 16, "num_kv_heads": 1, "head_dim": 128}
    machine = {"cpu": "a CPU", "threads": 2, "isa": "avx512bf16"}
    return {"kind": "nsa-bench", "results": results, "crossover": crossover, "settings": settings, "machine": machine}


FORWARD_STAGES = [
    *("compress", "compressed attention, selection", "selected attention", "sliding window, combine"),
]
BACKWARD_STAGES = [
    *("gates, row terms", "selected attention: dQ", "selected attention: dK, dV", "compressed attention: dK, dV"),
    *("sliding window: dK, dV", "compressed and window: dQ", "compress_backward"),
]


def gpu_bench():
    """As `nsa bench --device cuda --peers` writes it: times in proportion to lengths, the peers up to 16384 tokens."""
    results = []

    def add(op, length, ms, variant="mean", part_of="", extrapolated=False):
        peer = variant == "mean" and length <= 16384
        results.append(
            {
                **{"op": op, "variant": variant, "part_of": part_of, "length": length, "seconds": 1e-3 * ms},
                **{
                    "extrapolated": extrapolated,
                    "peer": "somebody" if peer else None,
                    "peer_s": 2e-3 * ms if peer else None,
                },
            }
        )

    for n in LENGTHS:
        for op, stages in (("forward", FORWARD_STAGES), ("forward_backward", FORWARD_STAGES + BACKWARD_STAGES)):
            for variant in ("mean", "mlp"):
                add(op, n, len(stages) * n / 1e3, variant)
                for stage in stages:
                    add(stage, n, n / 1e3, variant, op)
            for factor, form in ((1, "cudnn"), (2, "flash2")):
                add(f"dense_{op}", n, factor * len(stages) * n * n / 4e6, form, extrapolated=n > 16384)
    settings = {"dtype": "bfloat16", "num_heads": 64, "num_kv_heads": 4, "head_dim": 128, "v_head_dim": 128}
    return {
        **{"kind": "nsa-bench", "results": results, "crossover": {"forward": {"dense": 4000.4, "plain": 1024}}},
        **{"settings": {**settings, "phi": "mean"}, "machine": {"gpu": "a GPU, compute capability 9.0, 1 MiB"}},
    }


def inspect():
    rng = random.Random(0)
    positions = list(range(0, 4096, 16))
    layers = []
    for layer in range(2):
        heads = []
        for head in range(2):
            blocks, forced = [], []
            for t in positions:
                own = t // 64
                kept = sorted({0, max(0, own - 1), own})
                forced.append(kept)
                blocks.append(sorted({*kept, *rng.sample(range(own + 1), min(own + 1, 5))}))
            chosen = {"query_positions": positions, "blocks": blocks, "forced": forced}
            heads.append({"kv_head": head, "unforced_share": 0.6, "map": chosen})
        layers.append({"layer": layer, "gates": {"cmp": 0.4, "slc": 0.6, "swa": 0.7}, "kv_heads": heads})
    return {"kind": "nsa-inspect", "checkpoint": "runs/nsa", "layers": layers}


RESULTS = {
    "bench": bench(),
    "inspect": inspect(),
    "needle": {
        "kind": "nsa-needle",
        "checkpoint": "runs/nsa",
        "lengths": [1024, 2048, 4096],
        "depths": [0, 0.25, 0.5, 0.75, 1],
        "samples": 16,
        "exact": [[1, 0.9, 0.8, 0.9, 1], [1, 0.7, 0.5, 0.8, 1], [0.6, 0.2, 0.1, 0.4, 1]],
    },
    "recall": {
        **{"kind": "nsa-recall", "chance": 0.0625},
        "history": [
            {"step": s, "nsa": {"loss": 1, "accuracy": min(1, s / 300)}, "full": {"accuracy": s / 500}}
            for s in range(0, 500, 20)
        ],
        "window_size": 4,
        "distances": [9, 100, 200],
        "scores": {
            "nsa": {"accuracy": 0.993, "by_distance": [1, 0.98]},
            "full": {"accuracy": 0.99, "by_distance": [1, None]},
            "window": {"accuracy": 0.07, "by_distance": [0.1, 0]},
            "nsa_window_gate_only": {"accuracy": 0.06},
        },
    },
}


@pytest.fixture
def runs(tmp_path):
    for attention in ("nsa", "full"):
        write_run(tmp_path / attention, attention)
    for name, result in RESULTS.items():
        (tmp_path / "nsa" / f"{name}.json").write_text(json.dumps(result))
    return tmp_path


PICTURES = {
    *("loss", "loss_by_position", "speed", "attention_time", "selection_map", "gates", "selection_health"),
    *("needle", "recall", "recall_map"),
}


def test_everything(runs):
    out = runs / "report"
    assert main([str(runs / "nsa"), str(runs / "full"), "--out", str(out)]) == 0
    assert {p.stem for p in out.glob("*.png")} == PICTURES
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len(PICTURES)
    assert "http" not in page and "<td>full</td>" in page and "3,109,000" in page


@pytest.mark.parametrize(
    ("difference", "half_width", "sentence"),
    [
        (
            -0.0226,
            0.0074,
            "nsa is ahead of full by 0.0226 nats per token of held-out loss (± 0.0074, paired 95 % interval).",
        ),
        (0.5, 0.1, "full is ahead of nsa by 0.5000 nats per token of held-out loss (± 0.1000, paired 95 % interval)."),
        (
            0.01,
            0.02,
            "nsa and full are level: +0.0100 nats per token of held-out loss (± 0.0200, paired 95 % interval).",
        ),
        (-0.01, None, "nsa is ahead of full by 0.0100 nats per token of held-out loss (without an interval)."),
    ],
)
def test_who_is_ahead_by_how_much(runs, difference, half_width, sentence):
    against = {"checkpoint": "runs/full/", "difference": difference, "half_width": half_width}
    result = {"kind": "nsa-eval", "checkpoint": str(runs / "nsa"), "against": against}
    (runs / "nsa" / "eval.json").write_text(json.dumps(result))
    assert verdicts(read_sources([runs / "nsa", runs / "full"])) == [sentence]


def test_the_page_begins_with_a_sentence_and_the_runs(tmp_path):
    """Of the last evaluations, where no file compares them; then model, data and device."""
    for attention in ("nsa", "full"):
        write_run(tmp_path / attention, attention, steps=30)
    config = json.loads((tmp_path / "nsa" / "config.json").read_text())
    config["model"] |= {"num_layers": 4, "hidden_size": 256, "num_heads": 8, "num_kv_heads": 2}
    config["train"]["device"] = "cuda"
    config["data"] = {"paths": ["/data/text"], "tokenizer": "/models/bpe.model", "ids": ""}
    (tmp_path / "nsa" / "config.json").write_text(json.dumps(config))
    paths = [tmp_path / "nsa", tmp_path / "full"]
    assert main([*map(str, paths), "--out", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report" / "report.html").read_text()
    (sentence,) = verdicts(read_sources(paths))
    assert re.match(r"(nsa|full) is ahead of (nsa|full) by 0\.\d{4} nats per token", sentence)
    assert "nsa eval nsa --against full" in sentence
    model = "<td>nsa</td><td>nsa, 4 layers of 256, 8 heads, 2 KV heads</td>"
    assert f"{model}<td>text; bpe.model; context 4,096</td><td>cuda</td>" in page
    assert page.index(sentence) < page.index("<table>") < page.index("<img")
    (tmp_path / "nsa" / "config.json").write_text(json.dumps(config | {"fingerprint": "1"}))
    assert "have different data" in verdicts(read_sources(paths))[0]


def test_events_for_tensorboard(runs, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command = [str(runs / "nsa"), str(runs / "full"), "--tensorboard", str(runs / "events")]
    assert main(command) == 0
    for name in ("nsa", "full"):
        lines = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
        events = EventAccumulator(str(runs / "events" / name))
        events.Reload()
        for kind in ("train", "eval"):
            expected = [(line["step"], pytest.approx(line["loss"])) for line in lines if line["kind"] == kind]
            assert [(event.step, event.value) for event in events.Scalars(f"{kind}/loss")] == expected
        assert ("train/layer 3/gate_slc" in events.Tags()["scalars"]) == (name == "nsa")
    assert main(command) == 1 and "exists already" in capsys.readouterr().err


def test_layers_have_their_numbers_where_others_are_dense(tmp_path):
    write_run(tmp_path / "runs" / "nsa", "nsa", steps=30)
    file = tmp_path / "runs" / "nsa" / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if "layers" in line:
            line["layers"] = [{**layer, "layer": 2 * i + 1} for i, layer in enumerate(line["layers"])]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sources = read_sources([tmp_path / "runs" / "nsa"])
    bars, health = gates(sources).axes[0], selection_health(sources).axes[0]
    assert list(bars.get_xticks()) == [1, 3, 5, 7]
    assert [line.get_label() for line in health.get_lines()] == [f"layer {number}" for number in (1, 3, 5, 7)]


def test_results_alone(runs):
    out = runs / "report"
    assert main([str(runs / "nsa" / "bench.json"), "--out", str(out)]) == 0
    assert {p.stem for p in out.glob("*.png")} == {"attention_time"}


def test_a_run_that_has_just_begun(tmp_path):
    write_run(tmp_path / "full", "full", steps=1)
    assert main([str(tmp_path / "full"), "--out", str(tmp_path / "out")]) == 0
    assert {p.stem for p in (tmp_path / "out").glob("*.png")} == {"loss", "speed"}


def test_speed_over_context_wants_several(tmp_path):
    folders = []
    for context in (1024, 4096):
        folder = tmp_path / str(context) / "full"
        write_run(folder, "full", context=context)
        folders.append(str(folder))
        out = tmp_path / f"report{context}"
        assert main([*folders, "--out", str(out), "--only", "speed_over_context"]) == 0
    assert not (tmp_path / "report1024" / "speed_over_context.png").exists()
    assert (tmp_path / "report4096" / "speed_over_context.png").exists()


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("config.json", None, "config.json: .*No such file"),
        ("config.json", "{", "config.json: not JSON"),
        ("config.json", "[]", "config.json: must hold a JSON object"),
        ("config.json", "{}", "config.json: no model.attention"),
        ("metrics.jsonl", "", "metrics.jsonl: no training step yet"),
        ("metrics.jsonl", '{"kind": "train"}\n{"kind"', "metrics.jsonl:2: not a line of metrics"),
        ("metrics.jsonl", '{"kind": "other"}', "metrics.jsonl:1: not a line of metrics"),
    ],
)
def test_refused(runs, capsys, name, content, message):
    file = runs / "full" / name
    file.unlink() if content is None else file.write_text(content)
    assert main([str(runs / "full"), "--out", str(runs / "report")]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert not (runs / "report").exists()


def test_a_file_without_end_is_refused(runs, capsys):
    """A sparse file of a terabyte; no memory could hold it."""
    for name in ("metrics.jsonl", "config.json"):
        os.truncate(runs / "full" / name, 2**40)
        assert main([str(runs / "full"), "--out", str(runs / "report")]) == 2
        assert f"{name}: too large: must be at most" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo"])
def test_files_of_a_report_are_its_own(runs, kind, coarse):
    """What has their names is replaced; a link is not followed, a FIFO not waited for."""
    outside, report = runs / "outside", runs / "report"
    report.mkdir()
    if kind == "link":
        outside.write_text("other")
    for name in ("report.html", "loss.png"):
        os.mkfifo(report / name) if kind == "fifo" else (report / name).symlink_to(outside)
    signal.alarm(60)
    assert main([str(runs / "full"), "--out", str(report)]) == 0
    signal.alarm(0)
    assert outside.read_text() == "other" if kind == "link" else not outside.exists()
    assert all(path.is_file() and not path.is_symlink() for path in report.iterdir())
    assert (report / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [["", "--out", "x"], ["x", "--out", ""], ["x", "--tensorboard", ""]])
def test_an_empty_path_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    option = next((name for name in ("--out", "--tensorboard") if arguments[-1] == "" and name in arguments), "PATH")
    assert end.value.code == 2 and f"argument {option}: must not be empty" in capsys.readouterr().err


def test_foreign_json(runs, capsys):
    file = runs / "other.json"
    file.write_text('{"kind": "something"}')
    assert main([str(file), "--out", str(runs / "report")]) == 2
    assert "kind = 'something': must be one of nsa-bench" in capsys.readouterr().err


@pytest.fixture
def gpu_result(tmp_path):
    path = tmp_path / "bench_cuda.json"
    path.write_text(json.dumps(gpu_bench()))
    return path


def test_a_gpu_has_its_own_picture(gpu_result, tmp_path, capsys):
    out = tmp_path / "out"
    assert main([str(gpu_result), "--out", str(out)]) == 0
    assert {p.stem for p in out.glob("*.png")} == {"cuda_time"} and (out / "report.html").exists()
    alone = tmp_path / "alone"
    capsys.readouterr()
    assert main([str(gpu_result), "--only", "cuda_time", "--out", str(alone)]) == 0
    assert [p.name for p in alone.iterdir()] == ["cuda_time.png"]
    assert capsys.readouterr().out.strip() == str(alone / "cuda_time.png")


def decode_result():
    """As `tools/gpu.sh decode` leaves it: times in proportion to the context."""
    stages = {}
    for context in (8192, 65536):
        steps = [
            {"batch": batch, "new": 1, "median": 20 + batch * context / 1e4, "floor": 1.5, "dense_floor": context / 100}
            for batch in (32, 1)
        ]
        name = "decode" if context == 65536 else f"decode_{context}"
        result = {"problem": "H=64", "context": context, "ragged": False, "selection": "own", "steps": steps}
        stages[name] = {"result": result}
    dense = [
        {"batch": b, "context": n, "us": {"a": n / 9, "b": None}, "best": "a"} for b in (32, 1) for n in (8192, 65536)
    ]
    stages["decode_dense"] = {"result": {"steps": dense}}
    speeds = [
        {"attention": attention, "batch": 1, "context": n, "tokens_per_second": 1e6 / n}
        for attention in ("nsa", "full")
        for n in (1024, 65536)
    ]
    stages["generate_speed"] = {"result": {"problem": "300 million", "steps": speeds}}
    return {"gpu": "a GPU", "stages": stages}


def test_decode_steps_have_their_pictures(tmp_path, capsys):
    path, out = tmp_path / "decode.json", tmp_path / "out"
    path.write_text(json.dumps(decode_result()))
    assert main([str(path), "--out", str(out)]) == 0
    assert {p.stem for p in out.glob("*.png")} == {"decode_time", "generate_speed"}
    for stage, field, value, message in (
        ("decode_8192", "floor", 0, "decode_8192'.result.steps[1].floor = 0: must be at least"),
        ("decode_dense", "best", "b", "decode_dense'.result.steps[1].us.b = null: must be"),
        ("generate_speed", "tokens_per_second", 0, "generate_speed'.result.steps[1].tokens_per_second = 0: must be"),
    ):
        broken = decode_result()
        broken["stages"][stage]["result"]["steps"][1][field] = value
        path.write_text(json.dumps(broken))
        assert main([str(path), "--out", str(out)]) == 2
        assert message in capsys.readouterr().err


def test_steps_of_another_problem_are_not_those_of_the_first():
    result = decode_result()
    expected = steps_of_one_token(result)
    other = json.loads(json.dumps(result["stages"]["decode"]["result"]))
    other |= {"problem": "H=64 D=192/128", "context": 4096}
    result["stages"]["decode_keys192"] = {"result": other}
    assert steps_of_one_token(result) == expected
    assert set(expected) == {(batch, n) for batch in (32, 1) for n in (8192, 65536)}


def test_decode_picture_without_peers(tmp_path):
    path, out = tmp_path / "decode.json", tmp_path / "out"
    result = decode_result()
    del result["stages"]["decode_dense"], result["stages"]["generate_speed"]
    path.write_text(json.dumps(result))
    assert main([str(path), "--out", str(out)]) == 0
    assert {p.stem for p in out.glob("*.png")} == {"decode_time"}


def test_the_other_runs_are_drawn(runs, capsys, coarse):
    """What is damaged is named in a line of its own and left out; the exit code says so."""
    metrics = (runs / "nsa" / "metrics.jsonl").read_text().splitlines()
    metrics[3] = metrics[3].replace('"loss": ', '"loss": null, "was": ')
    (runs / "nsa" / "metrics.jsonl").write_text("\n".join(metrics))
    (runs / "nsa" / "bench.json").write_bytes(b"\xff\xfe")
    out = runs / "report"
    arguments = [str(runs / "nsa"), str(runs / "full"), str(runs / "nowhere"), "--out", str(out)]
    assert main(arguments) == 2
    said = capsys.readouterr()
    folder = runs / "nsa"
    lines = said.err.splitlines()
    assert lines[0] == f"report: {folder / 'metrics.jsonl'}:4: loss = null: must be a number from -1e+15 to 1e+15"
    assert lines[1].startswith(f"report: {folder / 'bench.json'}: ") and "nowhere" in lines[2] and len(lines) == 3
    assert "of 1 runs" in said.out
    page = (out / "report.html").read_text()
    assert "<td>full</td>" in page and "<td>nsa</td>" not in page
    assert {p.stem for p in out.glob("*.png")} >= {"loss", "speed", "needle", "recall", "selection_map"}


@pytest.fixture
def coarse(monkeypatch):
    """Pictures of few pixels, which are soon written; closed in the end."""
    from nsa.report.style import plt

    monkeypatch.setitem(plt.rcParams, "figure.dpi", 20)
    yield
    plt.close("all")


@pytest.mark.parametrize("name", ["$", "$x$ _\\", "a\nb", "a" * 255, b"\xff$<b>".decode("utf8", "surrogateescape")])
def test_any_name_of_a_folder(tmp_path, name, capsys, coarse):
    folder = tmp_path / name
    write_run(folder, "nsa", steps=60)
    for kind in ("inspect", "needle"):
        result = {**RESULTS[kind], "checkpoint": f"runs/{name[:9]}$"}
        (folder / f"{kind}.json").write_text(json.dumps(result))
    code = main([str(folder), "--out", str(tmp_path / "out")])
    assert (tmp_path / "out" / "report.html").exists()
    assert code == (0 if name.isprintable() else 2), capsys.readouterr().err  # checkpoints must be printable


@pytest.mark.parametrize(
    "file, fields, message",
    [
        ("needle", {"exact": [[1, 1, 1, 1, 1]] * 2 + [[1]]}, r"exact\[2\]: 1 items: must be 5, as depths has"),
        ("needle", {"exact": []}, "exact = .*: must be a list of 1 to"),
        ("needle", {"lengths": [1024]}, "exact: 3 items: must be 1, as lengths has"),
        ("needle", {"checkpoint": None}, "checkpoint = null: must be a text"),
        ("needle", {"task": "multikey", "lines": "4"}, "lines = '4': must be a whole number"),
        ("needle", {"exact": [[1, 0, 0, 0, "x"]] * 3}, r"exact\[0\]\[4\] = 'x': must be a number"),
        ("inspect", {"layers": [{}]}, r"no layers\[0\].layer"),
        ("inspect", {"layers": None}, "layers = null: must be a list"),
        ("bench", {"results": [{"op": "forward"}]}, r"no results\[0\].variant"),
        ("bench", {"machine": 3}, "machine = 3: must be an object"),
        ("bench", {"settings": {}}, "no settings.dtype"),
        ("recall", {"chance": 1e308}, r"chance = 1e\+308: must be a number"),
        ("recall", {"distances": [9, 100]}, "scores.nsa.by_distance: 2 items: must be 1, between the distances"),
        (
            "recall",
            {"scores": {"full": {"by_distance": []}}},
            r"scores.full.by_distance = \[\]: must be a list of 1 to 256",
        ),
        (
            "recall",
            {"history": [{"step": True, "nsa": {"accuracy": 1}}]},
            r"history\[0\].step = True: must be a whole number",
        ),
    ],
)
def test_damaged_results(runs, capsys, file, fields, message):
    path = runs / "nsa" / f"{file}.json"
    path.write_text(json.dumps({**RESULTS[file], **fields}))
    assert main([str(path), "--out", str(runs / "report")]) == 2
    error = capsys.readouterr().err
    assert re.search(f"^report: {re.escape(str(path))}: {message}", error) and error.count("\n") == 1, error
    assert not (runs / "report").exists()


def test_no_place_to_write(runs, capsys):
    (runs / "file").write_text("")
    assert main([str(runs / "full"), "--out", str(runs / "file" / "report")]) == 1
    assert "Not a directory" in capsys.readouterr().err
    assert main([str(runs / ("x" * 300))]) == 2
    assert "name too long" in capsys.readouterr().err


ADVERSARIAL = [
    *(None, True, 0, -1, 1, 3, 0.5, 2**31, 2**63, 10**4000, 1e-308, 1e308, -1e308, 1e15, math.nan, math.inf),
    *("", "x", "$", "$a$ $", "\\frac{", "\ud800", "\n", "\0", "y" * 5000, "nsa", "forward", "__", "{}", "%s"),
    *([], {}, [[]], [0], [None], [1, "x"], {"gpu": "$"}, {"": None}, [[-1, 10**9]]),
]


def damaged(rng, text):
    """The JSON with one to three values replaced, removed or repeated; or its bytes cut, changed or nested."""
    if rng.random() < 0.15:
        data, at = bytearray(text.encode()), rng.randrange(len(text))
        how = rng.randrange(4)
        if how == 0:
            return bytes(data[:at])
        if how == 1:
            data[at] = rng.randrange(256)
        return bytes(data[:at] + (b"[" * 200000 if how == 2 else b"") + data[at:] if how != 3 else data[at:])
    document = json.loads(text)
    for _ in range(rng.randrange(1, 4)):
        at = document
        while True:
            keys = list(at) if isinstance(at, dict) else range(len(at))
            key = rng.choice(keys)
            if not isinstance(at[key], dict | list) or not at[key] or rng.random() < 0.15:
                break
            at = at[key]
        how = rng.random()
        if how < 0.7:
            at[key] = rng.choice(ADVERSARIAL)
        elif how < 0.85 or isinstance(at, dict):
            del at[key]
        else:
            at.insert(key, at[key])
        if not document:
            break
    try:
        return json.dumps(document).encode()
    except ValueError:  # a number of more digits than Python writes
        return b"1" * 5000


def test_damaged_files(tmp_path, capsys, coarse):
    """Several hundred: named in one line, or drawn; a page is made of what is left."""
    rng, folder = random.Random(0), tmp_path / "nsa"
    write_run(folder, "nsa", steps=30)
    results = tmp_path / "results"
    results.mkdir()
    for name, result in {**RESULTS, "gpu": gpu_bench()}.items():
        (results / f"{name}.json").write_text(json.dumps(result))
    files = [*sorted(folder.iterdir()), *sorted(results.iterdir())]
    pictures = {
        "bench": ["attention_time"],
        "gpu": ["cuda_time"],
        "needle": ["needle"],
        "recall": ["recall", "recall_map"],
    }
    pictures |= {"inspect": ["selection_map", "gates"], "config": ["loss"], "metrics": [*("loss", "loss_by_position")]}
    pictures["recall"] = ["recall", "recall_map"]
    pictures["metrics"] += ["speed", "selection_health"]
    refused = drawn = 0
    for _ in range(400):
        file = rng.choice(files)
        whole = file.read_text()
        lines = whole.splitlines()
        number = rng.randrange(len(lines))
        damage = damaged(rng, lines[number])
        file.write_bytes(b"\n".join(damage if i == number else line.encode() for i, line in enumerate(lines)))
        path = folder if file.parent == folder else file
        sources = read_sources([path])
        if sources.left_out:
            refused += 1
            assert len(sources.left_out) == 1 and sources.left_out[0].startswith(str(file)), sources.left_out
        elif drawn < 15:
            drawn += 1
            arguments = [str(path), "--out", str(tmp_path / "out"), "--only", rng.choice(pictures[file.stem])]
            assert main(arguments) == 0
        file.write_text(whole)
    assert refused > 200 and drawn == 15
    capsys.readouterr()
