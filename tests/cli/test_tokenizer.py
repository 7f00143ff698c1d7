"""nsa train --tokenizer: a SentencePiece model in place of bytes, where the program was built with the library."""

import json
import math
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from conftest import PROGRAM, TINY, metrics, nsa, refused

# Source text needs its newlines and indentation, which SentencePiece's defaults throw away.
TRAINER = ["--model_type=bpe", "--normalization_rule_name=identity", "--remove_extra_whitespaces=false",
           "--byte_fallback=true", "--character_coverage=1.0"]  # fmt: skip


def spm_train():
    """The trainer of Debian's package sentencepiece; NSA_SPM_TRAIN names one that is elsewhere."""
    return os.environ.get("NSA_SPM_TRAIN") or shutil.which("spm_train")


def make_model(corpus, prefix, vocab_size):
    texts = ",".join(str(path) for path in sorted(corpus.iterdir()))
    arguments = [f"--input={texts}", f"--model_prefix={prefix}", f"--vocab_size={vocab_size}", *TRAINER]
    subprocess.run([spm_train(), *arguments], check=True, capture_output=True)
    return prefix.with_suffix(".model")


def without_library():
    done = subprocess.run(
        [PROGRAM, "train", "--out", os.devnull, "--tokenizer", "none"], capture_output=True, check=False
    )
    return b"built without SentencePiece" in done.stderr


needs_sentencepiece = [
    pytest.mark.skipif(without_library(), reason="the program was built without libsentencepiece-dev"),
    pytest.mark.skipif(not spm_train(), reason="no spm_train (Debian's sentencepiece) in PATH or NSA_SPM_TRAIN"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("bpe")
    model = make_model(corpus, folder / "bpe", 300)
    out = folder / "run"
    nsa("train", "--out", out, "--data", corpus, "--tokenizer", model, "--steps", 8, *TINY)
    return out


@pytest.mark.skipif(not without_library(), reason="the program was built with SentencePiece")
def test_a_program_without_the_library_says_so(tmp_path, corpus):
    message = refused("train", "--out", tmp_path / "run", "--data", corpus, "--tokenizer", "some.model", *TINY)
    assert "built without SentencePiece" in message and "libsentencepiece-dev" in message


class TestWithSentencePiece:
    pytestmark = needs_sentencepiece

    def test_it_trains_on_pieces(self, run):
        assert json.loads((run / "config.json").read_text())["model"]["vocab_size"] == 301  # and the end of a document
        evaluation = metrics(run, "eval")[-1]
        assert 0 < evaluation["loss"] < 7

    def test_prompt_and_text_come_back_as_text(self, run, tmp_path):
        """A prompt of BPE tokens, of a newline and of bytes outside the vocabulary; text without their marks."""
        prompt = "def value\n    return é"
        path = tmp_path / "out.json"
        options = ["--tokens", 60, "--temperature", 2, "--ignore-end", "--json", path]
        done = nsa("generate", run, "--prompt", prompt, *options)
        (result,) = json.loads(path.read_text())["sequences"]
        assert len(result["tokens"]) == 60 and 1 < result["prompt_tokens"] <= 1 + len(prompt.encode())
        text = done.stdout.removeprefix(prompt.encode())
        assert len(text) > 30
        for mark in ("\u2581".encode(), b"<0x", b"<s>"):
            assert mark not in text
        # Bytes are tokens of their own in this vocabulary, 3 control tokens before them.
        bytes_drawn = [token - 3 for token in result["tokens"] if 3 <= token < 259]
        assert bytes_drawn and all(bytes([byte]) in text for byte in bytes_drawn)

    def test_bits_of_each_byte_of_the_text(self, run, tmp_path):
        """Tokens spell a document with one space before it; its end counts as a byte."""
        path, text = tmp_path / "eval.json", tmp_path / "text.py"
        text.write_text("def value(self):\n    return é in self\n" * 3)
        nsa("eval", run, "--data", text, "--json", path)
        result = json.loads(path.read_text())
        nats = result["loss"] * result["eval_tokens"]
        assert nats / math.log(2) / result["bits_per_byte"] == pytest.approx(1 + len(text.read_bytes()) + 1, rel=1e-6)

    def test_eval_finds_the_same_documents(self, run, tmp_path):
        path = tmp_path / "eval.json"
        nsa("eval", run, "--json", path)
        result, last = json.loads(path.read_text()), metrics(run, "eval")[-1]
        for name in ("loss", "bits_per_byte"):  # of other threads than those of the training
            assert result[name] == pytest.approx(last[name], rel=1e-5)

    def test_another_vocabulary_is_refused(self, run, corpus):
        config = json.loads((run / "config.json").read_text())
        path = config["data"]["tokenizer"]
        original = Path(path).read_bytes()
        try:
            make_model(corpus, run.parent / "bpe", 290)
            assert "has 291 tokens, the model was trained with 301" in refused("generate", run, "--tokens", 1)
        finally:
            Path(path).write_bytes(original)

    def test_a_file_that_is_no_model_is_refused(self, tmp_path, corpus):
        path = tmp_path / "no.model"
        path.write_text("nothing")
        message = refused("train", "--out", tmp_path / "run", "--data", corpus, "--tokenizer", path, *TINY)
        assert f"tokenizer {path}" in message
