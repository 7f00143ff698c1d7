"""nsa generate: the cache changes nothing, sampling does what its options say."""

import json

import pytest

from conftest import nsa, refused

PROMPT = "def value(self): return self in None\n    import class for value in ( self )"


def generated(run, tmp_path, *options, prompt=PROMPT):
    path = tmp_path / "out.json"
    done = nsa("generate", run, "--prompt", prompt, "--json", path, "--ignore-end", *options)
    return json.loads(path.read_text()), done


@pytest.mark.parametrize("attention", ["nsa", "full", "window"])
def test_greedy_text_equals_the_full_forward(trained, tmp_path, attention):
    """Prompt and text run over several compression blocks, selection blocks and the window."""
    options = ["--temperature", 0, "--tokens", 120]
    cached, _ = generated(trained[attention], tmp_path, *options)
    again, _ = generated(trained[attention], tmp_path, *options, "--no-cache")
    assert cached["cached"] and not again["cached"]
    assert len(cached["tokens"]) == 120
    for i, (a, b) in enumerate(zip(cached["tokens"], again["tokens"], strict=True)):
        if a != b:
            assert min(cached["margins"][i], again["margins"][i]) < 1e-3, f"token {i}"
            break
        assert cached["margins"][i] == pytest.approx(again["margins"][i], abs=1e-3)


def test_text_is_streamed_behind_the_prompt(trained, tmp_path):
    result, done = generated(trained["nsa"], tmp_path, "--tokens", 30, "--seed", 3)
    text = bytes(token for token in result["tokens"] if token < 256)
    assert done.stdout == PROMPT.encode() + text + b"\n"
    assert b"tokens/s" in done.stderr


def test_a_seed_repeats_and_another_differs(trained, tmp_path):
    tokens = [generated(trained["nsa"], tmp_path, "--tokens", 40, "--temperature", 1, "--seed", seed)[0]["tokens"]
              for seed in (1, 1, 2)]  # fmt: skip
    assert tokens[0] == tokens[1] != tokens[2]


@pytest.mark.parametrize("option", [["--top-k", 1], ["--top-p", 1e-9]])
def test_narrow_sampling_is_greedy(trained, tmp_path, option):
    greedy, _ = generated(trained["full"], tmp_path, "--tokens", 40, "--temperature", 0)
    narrow, _ = generated(trained["full"], tmp_path, "--tokens", 40, "--temperature", 2, "--seed", 5, *option)
    assert narrow["tokens"] == greedy["tokens"]


def test_an_empty_prompt_starts_a_document(trained, tmp_path):
    result, _ = generated(trained["window"], tmp_path, "--tokens", 5, prompt="")
    assert result["prompt_tokens"] == 1 and len(result["tokens"]) == 5


def test_bfloat16_runs(trained, tmp_path):
    result, _ = generated(trained["nsa"], tmp_path, "--tokens", 20, "--dtype", "bfloat16")
    assert len(result["tokens"]) == 20


@pytest.mark.parametrize(
    ("options", "expected"),
    [(["--temperature", -1], "temperature = -1"), (["--top-p", 0], "top_p = 0"), (["--top-k", -3], "top_k = -3"),
     (["--tokens", 0], "--tokens"), (["--dtype", "int8"], "--dtype"), (["--prompt-file", "/no/such/file"], "/no/such")],
)  # fmt: skip
def test_bad_arguments_are_refused_by_name(trained, options, expected):
    assert expected in refused("generate", trained["nsa"], *options)
