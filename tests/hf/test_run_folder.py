"""A run of the program in transformers: the same next tokens by the same margins."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from nsa.convert import main

PROGRAM = Path(os.environ.get("NSA_PROGRAM", Path(__file__).resolve().parents[2] / "build" / "bin" / "nsa"))
PROMPT = "def value(self): return self in None\n    import class for value in ( self )"
START = 256  # the token before a document
MODEL = "--layers 2 --hidden-size 32 --heads 2 --kv-heads 1 --head-dim 16 --dtype float32".split()
NSA = "--kernel-size 8 --kernel-stride 4 --block-size 16 --topk 4 --window-size 32".split()
RUN = "--context 256 --batch-size 1 --held-out-percent 20 --eval-every 0 --steps 12 --threads 2".split()

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="the program nsa is not built")


def nsa(*arguments):
    environment = {**os.environ, "NSA_DEVICE": "cpu"}
    subprocess.run([PROGRAM, *map(str, arguments)], check=True, capture_output=True, env=environment)


def write_corpus(folder):
    folder.mkdir()
    for i in range(10):
        (folder / f"{i}.py").write_text(" ".join(PROMPT.split() * (5 + i)))


def test_gates_that_transformers_does_not_have_are_refused(tmp_path, capsys):
    write_corpus(tmp_path / "corpus")
    options = ["--data", tmp_path / "corpus", "--attention", "full", "--gated"]
    nsa("train", "--out", tmp_path / "run", *options, *MODEL, *NSA, *RUN)
    assert main([str(tmp_path / "run"), str(tmp_path / "out")]) != 0
    assert "gated = true" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("attention", ["nsa", "full", "window"])
def test_a_run_generates_in_transformers_what_the_program_generates(attention, tmp_path):
    corpus, run, out = tmp_path / "corpus", tmp_path / "run", tmp_path / "out"
    write_corpus(corpus)
    nsa("train", "--out", run, "--data", corpus, "--attention", attention, *MODEL, *NSA, *RUN)
    report = tmp_path / "out.json"
    options = ["--temperature", 0, "--tokens", 60, "--ignore-end", "--json", report]
    nsa("generate", run, "--prompt", PROMPT, *options)
    expected = json.loads(report.read_text())
    before = {file: file.read_bytes() for file in run.iterdir() if file.is_file()}
    assert main([str(run), str(out)]) == 0
    assert {file: file.read_bytes() for file in run.iterdir() if file.is_file()} == before
    model = AutoModelForCausalLM.from_pretrained(out)
    ids = torch.tensor([[START, *PROMPT.encode()]])
    options = {"max_new_tokens": 60, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    given = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert min(expected["margins"]) > 1e-3  # else equal tokens would be luck
    assert given.sequences[0, ids.shape[1] :].tolist() == expected["tokens"]
    for logits, margin in zip(given.logits, expected["margins"], strict=True):
        best = logits[0].topk(2).values
        assert float(best[0] - best[1]) == pytest.approx(margin, abs=1e-4)
