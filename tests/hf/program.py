"""Helpers that compare the program `nsa` with transformers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

PROGRAM = Path(os.environ.get("NSA_PROGRAM", Path(__file__).resolve().parents[2] / "build" / "bin" / "nsa"))
needs_program = pytest.mark.skipif(not PROGRAM.exists(), reason="the program nsa is not built")


def nsa(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NSA_DEVICE": "cpu"}
    done = subprocess.run(
        [PROGRAM, *map(str, arguments)], capture_output=True, text=True, errors="replace", env=environment
    )
    assert done.returncode == code, done.stderr
    return done


def reads_pieces() -> bool:
    """Whether the program was built with SentencePiece."""
    if not PROGRAM.exists():
        return False
    done = subprocess.run([PROGRAM, "train", "--out", os.devnull, "--tokenizer", "none"], capture_output=True)
    return b"built without SentencePiece" not in done.stderr


def assert_same_text(report: dict[str, Any], model: PreTrainedModel, ids: torch.Tensor) -> None:
    """What `nsa generate --json` reports of a sequence, greedy, is what the model generates after `ids`, by the same
    margins, none of which is so small that equal tokens would be luck."""
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    given = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(report["tokens"]), **options)
    assert min(report["margins"]) > 1e-4
    assert given.sequences[0, ids.shape[1] :].tolist() == report["tokens"]
    for logits, margin in zip(given.logits, report["margins"], strict=True):
        best = logits[0].topk(2).values
        assert float(best[0] - best[1]) == pytest.approx(margin, abs=1e-4)
