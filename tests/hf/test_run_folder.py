"""A run of the program in transformers: the same next tokens by the same margins."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from models import move_to_hub
from nsa.convert import main
from program import assert_same_text, needs_program, nsa

PROMPT = "def value(self): return self in None\n    import class for value in ( self )"
START = 256  # the token before a document
MODEL = "--layers 2 --hidden-size 32 --heads 2 --kv-heads 1 --head-dim 16 --dtype float32".split()
NSA = "--kernel-size 8 --kernel-stride 4 --block-size 16 --topk 4 --window-size 32".split()
RUN = "--context 256 --batch-size 1 --held-out-percent 20 --eval-every 0 --steps 12 --threads 2".split()

pytestmark = needs_program


def write_corpus(folder):
    folder.mkdir()
    for i in range(10):
        (folder / f"{i}.py").write_text(" ".join(PROMPT.split() * (5 + i)))


@pytest.mark.parametrize("below", ["", "runs/1"])
def test_a_run_in_the_hub_is_one(tmp_path, below):
    """A file of the hub is a link into its cache."""
    run, hub = tmp_path / "run", tmp_path / "models--a--b"
    write_corpus(tmp_path / "corpus")
    nsa("train", "--out", run, "--data", tmp_path / "corpus", *MODEL, *NSA, *RUN)
    assert main([str(run), str(tmp_path / "expected")]) == 0
    snapshot = move_to_hub(run, hub, below)
    assert main([str(snapshot), str(tmp_path / "found")]) == 0
    expected, found = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("expected", "found"))
    assert found == expected


def test_gates_that_transformers_does_not_have_are_refused(tmp_path, capsys):
    write_corpus(tmp_path / "corpus")
    options = ["--data", tmp_path / "corpus", "--attention", "full", "--gated"]
    nsa("train", "--out", tmp_path / "run", *options, *MODEL, *NSA, *RUN)
    assert main([str(tmp_path / "run"), str(tmp_path / "out")]) != 0
    assert "gated = true" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [
        "nsa",
        "nsa --dense-layers 0",
        "full",
        "window",
        "nsa --partial-rotary-factor .5",
        "full --partial-rotary-factor .5",
    ],
)
def test_a_run_generates_in_transformers_what_the_program_generates(options, tmp_path):
    corpus, run, out = tmp_path / "corpus", tmp_path / "run", tmp_path / "out"
    write_corpus(corpus)
    nsa("train", "--out", run, "--data", corpus, "--attention", *options.split(), *MODEL, *NSA, *RUN)
    report = tmp_path / "out.json"
    nsa("generate", run, "--prompt", PROMPT, "--temperature", 0, "--tokens", 60, "--ignore-end", "--json", report)
    (expected,) = json.loads(report.read_text())["sequences"]
    before = {file: file.read_bytes() for file in run.iterdir() if file.is_file()}
    assert main([str(run), str(out)]) == 0
    assert {file: file.read_bytes() for file in run.iterdir() if file.is_file()} == before
    model = AutoModelForCausalLM.from_pretrained(out)
    assert len(expected["tokens"]) == 60
    assert_same_text(expected, model, torch.tensor([[START, *PROMPT.encode()]]))
