"""The report: made of run folders and results, complete, self-contained, and clear about what it cannot read."""

import itertools
import json
import math
import random
import re

import pytest

from nsa.report.__main__ import main

LENGTHS = [1024, 4096, 16384, 65536]


def write_run(folder, attention, steps=120):
    rng = random.Random(attention)
    folder.mkdir()
    counts = {"phi": 40000, "gates": 9000, "extra_kv": 60000, "rest": 3000000, "total": 3109000}
    (folder / "config.json").write_text(json.dumps({"model": {"attention": attention}, "parameters": counts}))
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
        "accuracy": [[1, 0.9, 0.8, 0.9, 1], [1, 0.7, 0.5, 0.8, 1], [0.6, 0.2, 0.1, 0.4, 1]],
    },
    "recall": {
        **{"kind": "nsa-recall", "chance": 0.0625, "nsa": 0.993, "window": 0.07, "nsa_window_gate_only": 0.06},
        "history": [{"step": s, "loss": 1, "accuracy": min(1, s / 300)} for s in range(0, 500, 20)],
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
    *("needle", "recall"),
}


def test_everything(runs):
    out = runs / "report"
    assert main([str(runs / "nsa"), str(runs / "full"), "--out", str(out)]) == 0
    assert {p.stem for p in out.glob("*.png")} == PICTURES
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len(PICTURES)
    assert "http" not in page and "<td>full</td>" in page and "3,109,000" in page


def test_results_alone(runs):
    out = runs / "report"
    assert main([str(runs / "nsa" / "bench.json"), "--out", str(out)]) == 0
    assert {p.stem for p in out.glob("*.png")} == {"attention_time"}


def test_a_run_that_has_just_begun(tmp_path):
    write_run(tmp_path / "full", "full", steps=1)
    assert main([str(tmp_path / "full"), "--out", str(tmp_path / "out")]) == 0
    assert {p.stem for p in (tmp_path / "out").glob("*.png")} == {"loss", "speed"}


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


def test_foreign_json(runs, capsys):
    file = runs / "other.json"
    file.write_text('{"kind": "something"}')
    assert main([str(file), "--out", str(runs / "report")]) == 2
    assert "kind = 'something': must be one of nsa-bench" in capsys.readouterr().err
