"""Folders of transformers in the program `nsa`: the same logits, the same greedy tokens, a run that starts there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from models import VOCABULARY, dense, name_tied_head, sparse, tokens
from nsa.convert import main
from program import PROGRAM, assert_same_text, needs_program, nsa, reads_pieces

THETA = {"rope_theta": 20000.0}
ROPES = {
    "default": {"rope_type": "default", **THETA},
    "linear": {"rope_type": "linear", "factor": 4.0, **THETA},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5, **THETA},
    "proportional, scaled": {"rope_type": "proportional", "partial_rotary_factor": 0.75, "factor": 4.0, **THETA},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        **THETA,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **THETA},
    "yarn, all fields": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 48,
        "beta_fast": 20.0,
        "beta_slow": 0.5,
        "truncate": False,
        "mscale": 1.2,
        "mscale_all_dim": 0.8,
        **THETA,
    },
}

pytestmark = needs_program


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def assert_agree(folder: Path, model: PreTrainedModel, ids: torch.Tensor, tmp_path: Path) -> None:
    """Greedy tokens, the margin of each and the loss at each position are the model's; the folder stays as it is."""
    before, report, prompt = content(folder), tmp_path / "report.json", tmp_path / "ids.txt"
    prompt.write_text(" ".join(map(str, ids[0].tolist())))
    nsa("generate", folder, "--ids", prompt, "--temperature", 0, "--tokens", 12, "--json", report)
    program = json.loads(report.read_text())["sequences"][0]
    assert len(program["tokens"]) == 12
    assert_same_text(program, model, ids)
    nsa("eval", folder, "--ids", prompt, "--json", report)
    evaluation = json.loads(report.read_text())
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1].float(), ids[0, 1:], reduction="none")
    assert evaluation["tokens"] == len(losses)
    for part in evaluation["loss_by_position"]:
        expected = losses[part["from"] : part["to"]]
        assert part["tokens"] == len(expected)
        assert part["loss"] == pytest.approx(expected.mean().item(), abs=1e-4)
    assert content(folder) == before


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize(
    ("name", "tied", "options"),
    [("llama", True, {}), ("llama", False, {"shards": True}), ("qwen3", False, {}), ("qwen3", True, {"shards": True})],
)
def test_dense_models(name, tied, options, rope, tmp_path):
    model = dense(name, tie_word_embeddings=tied, rope_parameters=ROPES[rope])
    model.save_pretrained(tmp_path / "model", **({"max_shard_size": "60KB"} if options else {}))
    assert (tmp_path / "model" / "model.safetensors.index.json").exists() == bool(options)
    assert_agree(tmp_path / "model", model, tokens(1, 90), tmp_path)


@pytest.mark.parametrize("kind", [dense, sparse])
def test_an_index_that_names_a_tied_head(kind, tmp_path):
    model = kind("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "model", max_shard_size="60KB")
    name_tied_head(tmp_path / "model")
    assert_agree(tmp_path / "model", model, tokens(1, 90), tmp_path)


@pytest.mark.parametrize(
    ("name", "nsa_options", "dense_layers"),
    [
        ("llama", {"share_kv": True, "phi": "mean"}, []),
        ("llama", {"share_kv": True}, [0]),
        ("qwen3", {"phi": "mlp"}, [1]),
        ("qwen3", {"share_kv": True}, []),
    ],
)
def test_sparse_models(name, nsa_options, dense_layers, tmp_path):
    rope = ROPES["proportional" if dense_layers else "llama3" if name == "llama" else "yarn"]
    model = sparse(name, nsa=nsa_options, dense_layers=dense_layers, rope_parameters=rope)
    model.save_pretrained(tmp_path / "model")
    assert_agree(tmp_path / "model", model, tokens(1, 150), tmp_path)


@needs_program
def test_fields_that_are_set_are_noted(tmp_path):
    sparse("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "ids").write_text("1 2 3\n")
    given = ("--ids", tmp_path / "ids", "--tokens", 2)
    done = nsa("generate", tmp_path / "model", *given, "--set", "window_size=7", "--set", "topk=5")
    notes = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
    trained = sparse("llama").config.nsa
    assert notes == [
        f"note: topk = 5 by --set, trained with {trained['topk']}",
        f"note: window_size = 7 by --set, trained with {trained['window_size']}",
    ]


@pytest.mark.skipif(not shutil.which("spm_train"), reason="no spm_train: Debian's sentencepiece")
@pytest.mark.skipif(not reads_pieces(), reason="the program was built without libsentencepiece-dev")
def test_text_by_the_folders_own_pieces(tmp_path):
    """What `tokenizer.model` makes of a prompt is what its own program makes of it, behind the token for the start."""
    folder, text = tmp_path / "model", "def value(self):\n    return self in None\n"
    dense("llama", vocab_size=300).save_pretrained(folder)
    (tmp_path / "text.txt").write_text(text * 40)
    options = (
        "--vocab_size=290 --model_type=bpe --byte_fallback --character_coverage=1 --remove_extra_whitespaces=false"
    )
    places = [f"--input={tmp_path / 'text.txt'}", f"--model_prefix={folder / 'tokenizer'}"]
    subprocess.run(["spm_train", *places, *options.split()], check=True, capture_output=True)
    encode = ["spm_encode", f"--model={folder / 'tokenizer.model'}", "--output_format=id", "--extra_options=bos"]
    line = "return self in value"
    ids = subprocess.run(encode, input=line, check=True, capture_output=True, text=True).stdout
    (tmp_path / "ids.txt").write_text(ids)
    reports = []
    for prompt in (["--prompt", line], ["--ids", tmp_path / "ids.txt"]):
        nsa("generate", folder, *prompt, "--temperature", 0, "--tokens", 8, "--json", tmp_path / "out.json")
        reports.append(json.loads((tmp_path / "out.json").read_text())["sequences"][0])
    assert reports[0]["prompt_tokens"] == len(ids.split()) > 3
    assert reports[0]["tokens"] == reports[1]["tokens"] and reports[0]["margins"] == reports[1]["margins"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_smaller_dtypes(dtype, tmp_path):
    dense("llama").to(dtype).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert_agree(tmp_path / "model", model, tokens(1, 40), tmp_path)


def test_the_older_spelling_of_the_rotation(tmp_path):
    model = dense("llama", rope_parameters=ROPES["linear"])
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    assert config.pop("rope_parameters")["factor"] == 4.0
    file.write_text(json.dumps({**config, **THETA, "rope_scaling": {"type": "linear", "factor": 4.0}}))
    assert_agree(tmp_path / "model", model, tokens(1, 40), tmp_path)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", [dense, sparse, partial(sparse, dense_layers=[1])])
@pytest.mark.parametrize("rope", ["llama3", "yarn, all fields", "proportional, scaled"])
def test_a_run_starts_from_a_folder_and_comes_back(rope, kind, name, tmp_path):
    model = kind(name, vocab_size=257, tie_word_embeddings=False, rope_parameters=ROPES[rope])
    folder, run, out = tmp_path / "model", tmp_path / "run", tmp_path / "out"
    model.save_pretrained(folder)
    (tmp_path / "text.txt").write_text("def value(self): return self in None\n" * 30)
    before = content(folder)
    options = f"--steps 4 --lr 0 --context 64 --batch-size 1 --held-out-percent 0 --save-every 2 --out {run}".split()
    nsa("train", "--init", folder, "--data", tmp_path / "text.txt", "--dtype", "float32", *options)
    assert content(folder) == before
    folder.rename(tmp_path / "gone")  # the run has all that it needs
    nsa("train", "--resume", "--out", run)
    assert main([str(run), str(out)]) == 0
    back = AutoModelForCausalLM.from_pretrained(out)
    expected = model.state_dict()
    assert back.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in back.state_dict().items())
    ids = torch.randint(VOCABULARY, (1, 100))
    with torch.no_grad():
        assert torch.allclose(back(ids).logits, model(ids).logits, atol=1e-4)


@pytest.mark.bits
def test_stopped_run_resumes_without_the_folder(tmp_path):
    sparse("qwen3", vocab_size=257, tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("def value(self): return self in None\n" * 30)
    options = "--steps 60 --context 64 --batch-size 1 --held-out-percent 0 --save-every 5 --log-every 1".split()
    train = ["train", "--init", tmp_path / "model", "--data", tmp_path / "text.txt", *options]
    nsa(*train, "--out", tmp_path / "whole")
    process = subprocess.Popen(
        [PROGRAM, *map(str, train), "--out", tmp_path / "run"], env={**os.environ, "NSA_DEVICE": "cpu"}
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("train") > 12):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    (tmp_path / "model").rename(tmp_path / "gone")
    nsa("train", "--resume", "--out", tmp_path / "run")
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "run"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[key]) for key, tensor in whole.items())


@pytest.mark.parametrize("kind", [dense, sparse])
def test_the_benchmark_takes_the_shape_of_a_model(kind, tmp_path):
    model = kind("qwen3", **({"nsa": {"phi": "linear", "topk": 4}} if kind is sparse else {}))
    model.save_pretrained(tmp_path / "model")
    options = "--lengths 96 --repeats 1 --budget 0.01 --threads 2 --no-backward --no-parts --no-plain".split()
    nsa("bench", "--model", tmp_path / "model", *options, "--json", tmp_path / "out.json")
    settings = json.loads((tmp_path / "out.json").read_text())["settings"]
    expected = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 16, "v_head_dim": 16}
    assert {key: settings[key] for key in expected} == expected
    assert (settings["phi"], settings["topk"]) == (("linear", 4) if kind is sparse else ("mean", 16))
    assert "--heads excludes --model" in nsa("bench", "--model", tmp_path, "--heads", 4, code=2).stderr


def peak_memory(folder: Path, *arguments: object) -> int:
    """Bytes that the program holds at most while it generates a token."""
    # From a small process: a child's figure includes what its parent held when it was made.
    code = "import resource as r, subprocess as s, sys; s.run(sys.argv[1:], check=True, stdout=s.DEVNULL); "
    code += "print(r.getrusage(r.RUSAGE_CHILDREN).ru_maxrss)"
    command = [sys.executable, "-c", code, PROGRAM, "generate", folder, "--ids", "/dev/stdin", "-n", "1"]
    command += ["--device", "cpu", *arguments]
    done = subprocess.run([*map(str, command)], input="1 2 3\n", capture_output=True, text=True, check=True)
    return int(done.stdout) * 1024


def test_weights_are_in_memory_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the dtype of the matmuls: neither the file nor float32 copies stay beside them."""
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")  # huge pages round every tensor up to 2 MiB
    sizes = {"vocab_size": 64, "hidden_size": 512, "intermediate_size": 8192, "num_hidden_layers": 4, "head_dim": 64}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, dtype="bfloat16")
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "large")
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**sizes, "num_hidden_layers": 1, "intermediate_size": 64})
    ).save_pretrained(tmp_path / "small")
    parameters = model.num_parameters()
    layer = parameters / sizes["num_hidden_layers"]
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        held = peak_memory(tmp_path / "large", "--dtype", dtype) - peak_memory(tmp_path / "small", "--dtype", dtype)
        assert held < size * (parameters + 1.5 * layer) + 2**24  # 8 MiB more come and go with the wait policy of OpenMP
