"""nsa generate: the cache changes nothing, sampling does what its options say."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import PROGRAM, nsa, refused

PROMPT = "def value(self): return self in None\n    import class for value in ( self )"


def generated(run, tmp_path, *options, prompt=PROMPT):
    report, done = reported(run, tmp_path, "--prompt", prompt, "--ignore-end", *options)
    (sequence,) = report["sequences"]
    return sequence | {"cached": report["cached"]}, done


def reported(run, tmp_path, *options):
    path = tmp_path / "out.json"
    done = nsa("generate", run, "--json", path, *options)
    return json.loads(path.read_text()), done


def assert_same_text(found, expected):
    """Up to a choice between two tokens that are as likely within rounding."""
    for i, (a, b) in enumerate(zip(found["tokens"], expected["tokens"], strict=True)):
        if a != b:
            assert min(found["margins"][i], expected["margins"][i]) < 1e-3, f"token {i}"
            break
        assert found["margins"][i] == pytest.approx(expected["margins"][i], abs=1e-3)


@pytest.mark.parametrize("attention", ["nsa", "full", "window"])
def test_greedy_text_equals_the_full_forward(trained, tmp_path, attention):
    """Prompt and text run over several compression blocks, selection blocks and the window."""
    options = ["--temperature", 0, "--tokens", 120]
    cached, _ = generated(trained[attention], tmp_path, *options)
    again, _ = generated(trained[attention], tmp_path, *options, "--no-cache")
    assert cached["cached"] and not again["cached"]
    assert len(cached["tokens"]) == 120
    assert_same_text(cached, again)


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


# Of lengths below a compression block, beyond the window, none, and twice the same.
PROMPTS = ["def value", "class self : import value in None", "", "def value", PROMPT]


def test_a_cache_in_fp8_changes_margins_by_its_rounding(trained, tmp_path):
    options = ["--tokens", 3, "--temperature", 0]
    plain, _ = generated(trained["nsa"], tmp_path, *options)
    fp8, _ = generated(trained["nsa"], tmp_path, *options, "--kv-cache-dtype", "fp8")
    assert fp8["margins"][0] != plain["margins"][0]
    assert fp8["margins"][0] == pytest.approx(plain["margins"][0], abs=0.05)


@pytest.mark.parametrize("attention", ["full", "window"])
def test_a_cache_in_fp8_is_for_sparse_attention(trained, attention):
    message = refused("generate", trained[attention], "--kv-cache-dtype", "fp8")
    assert f"--kv-cache-dtype fp8: attention {attention} of layer 0: must be nsa in every layer" in message


@pytest.fixture(scope="module")
def wide(tmp_path_factory, corpus):
    """Runs of one step whose activations are large, and a long prompt."""
    folder = tmp_path_factory.mktemp("wide")
    (folder / "prompt.txt").write_text("def value ( self )\n" * 400)
    shape = "--layers 2 --hidden-size 512 --ffn-size 2048 --heads 8 --kv-heads 4 --head-dim 64 --context 64".split()
    for attention in ("nsa", "full"):
        nsa("train", "--out", folder / attention, "--data", corpus, "--attention", attention, "--steps", 1,
            "--batch-size", 1, *shape)  # fmt: skip
    return folder


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
def test_weights_ask_for_huge_pages(wide):
    command = [PROGRAM, "generate", wide / "nsa", "--tokens", "10000", "--ignore-end", "--no-echo", "--prompt", "def"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout.read(1)  # the model is loaded
        maps = Path(f"/proc/{process.pid}/smaps").read_text()
        process.kill()
    assert re.search(r"^VmFlags:.* hg( |$)", maps, re.MULTILINE)


# In a small process of its own: a process counts the memory of the one that started it as its own.
PEAK = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


def with_peak(*arguments):
    """Exit code, stderr and the most resident memory, MiB."""
    command = [sys.executable, "-I", "-c", PEAK, PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stderr, int(done.stdout) / 1024


@pytest.mark.parametrize(
    "attention, options",
    [("nsa", []), ("nsa", ["--dtype", "bfloat16", "--kv-cache-dtype", "fp8"]), ("full", [])],
)
def test_max_memory_is_kept_or_refused(wide, attention, options):
    """Refused before the model is loaded, then before the cache is made, then kept by shorter chunks of the prompt."""
    command = ["generate", wide / attention, "--prompt-file", wide / "prompt.txt", "--tokens", 2, "--ignore-end",
               *options]  # fmt: skip
    limit, refusals = 1, 0
    while True:
        code, errors, peak = with_peak(*command, "--max-memory", f"{limit}MiB")
        if code == 0:
            break
        found = re.fullmatch(r"nsa: --max-memory \d+ MiB: must be at least (\d+) MiB\b.*\n", errors)
        assert code == 2 and found and refusals < 2, errors
        limit, refusals = int(found[1]) + 16, refusals + 1
    assert limit - 400 < peak <= limit
    code, errors, unlimited = with_peak(*command)
    assert code == 0 and peak + 50 < unlimited, errors


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"{line}\n" for line in [*PROMPTS[:-1], PROMPT.replace("\n", " ")]))
    return path


@pytest.mark.parametrize("attention", ["nsa", "full", "window"])
def test_batched_prompt_generates_as_alone(trained, tmp_path, prompts, attention):
    options = ["--temperature", 0, "--tokens", 40, "--ignore-end"]
    cached, done = reported(trained[attention], tmp_path, "--prompts", prompts, *options)
    again, _ = reported(trained[attention], tmp_path, "--prompts", prompts, *options, "--no-cache")
    assert len(cached["sequences"]) == len(again["sequences"]) == len(PROMPTS) and b"5 prompts: " in done.stderr
    lines = prompts.read_text().splitlines()
    for i in (0, 1, 2, 4):
        alone, _ = generated(trained[attention], tmp_path, *options, prompt=lines[i])
        for report in (cached, again):
            found = report["sequences"][i]
            assert found["prompt_tokens"] == alone["prompt_tokens"] and len(found["tokens"]) == 40
            assert_same_text(found, alone)
    assert_same_text(cached["sequences"][3], cached["sequences"][0])


def test_texts_of_several_prompts_are_printed_one_after_the_other(trained, tmp_path, prompts):
    """Some end with a document, the others with the number of tokens."""
    options = ["--tokens", 30, "--temperature", 3, "--seed", 7, "--prompts", prompts]
    report, done = reported(trained["nsa"], tmp_path, *options)
    lengths = [len(sequence["tokens"]) for sequence in report["sequences"]]
    assert max(lengths) == 30 and all(
        length == 30 or sequence["tokens"][-1] == 256
        for length, sequence in zip(lengths, report["sequences"], strict=True)
    )
    texts = [bytes(token for token in sequence["tokens"] if token < 256) for sequence in report["sequences"]]
    lines = prompts.read_bytes().splitlines()
    assert done.stdout == b"".join(line + text + b"\n" for line, text in zip(lines, texts, strict=True))
    quiet = nsa("generate", trained["nsa"], *options, "--no-echo")
    assert quiet.stdout == b"".join(text + b"\n" for text in texts)


def test_a_sequence_that_has_ended_leaves_the_others_as_they_are(trained, tmp_path, prompts):
    """The end of a document is drawn soon at this temperature, by other sequences at other times."""
    options = ["--tokens", 100, "--temperature", 50, "--seed", 1, "--prompts", prompts]
    ended, _ = reported(trained["nsa"], tmp_path, *options)
    all_on, _ = reported(trained["nsa"], tmp_path, *options, "--ignore-end")
    lengths = [len(sequence["tokens"]) for sequence in ended["sequences"]]
    assert min(lengths) < 100 and len(set(lengths)) > 1
    for a, b in zip(ended["sequences"], all_on["sequences"], strict=True):
        assert a["tokens"] == b["tokens"][: len(a["tokens"])]
        assert a["margins"] == pytest.approx(b["margins"][: len(a["margins"])], abs=1e-4)


def test_sequences_draw_by_seeds_of_their_own(trained, tmp_path, prompts):
    """The same prompt twice: other texts; the first sequence's is that of the prompt alone."""
    options = ["--tokens", 40, "--temperature", 1, "--seed", 3, "--ignore-end"]
    together, _ = reported(trained["full"], tmp_path, "--prompts", prompts, *options)
    tokens = [sequence["tokens"] for sequence in together["sequences"]]
    assert PROMPTS[0] == PROMPTS[3] and tokens[0] != tokens[3]
    alone, _ = generated(trained["full"], tmp_path, *options, prompt=PROMPTS[0])
    assert alone["tokens"] == tokens[0]


def test_prompts_by_numbers(trained, tmp_path):
    path = tmp_path / "ids.txt"
    path.write_text("256 100 101\n\n256 104\n")
    report, done = reported(trained["nsa"], tmp_path, "--ids", path, "--temperature", 0, "--tokens", 3)
    assert [sequence["prompt_tokens"] for sequence in report["sequences"]] == [3, 2]
    texts = [" ".join(map(str, sequence["tokens"])) for sequence in report["sequences"]]
    assert done.stdout.decode() == f"256 100 101 {texts[0]} \n256 104 {texts[1]} \n"


def test_lines_as_on_windows(trained, tmp_path):
    """A prompt per line has no carriage return and no byte order mark; the prompt that is a file has all its bytes."""
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xef\xbb\xbfdef f\r\nclass\r\n")
    options = ["--temperature", 0, "--tokens", 1]
    report, _ = reported(trained["nsa"], tmp_path, "--prompts", path, *options)
    assert [sequence["prompt_tokens"] for sequence in report["sequences"]] == [6, 6]
    report, _ = reported(trained["nsa"], tmp_path, "--prompt-file", path, *options)
    assert report["sequences"][0]["prompt_tokens"] == 1 + len(path.read_bytes())
    path.write_bytes(b"\xef\xbb\xbf256 100\r\n")
    report, _ = reported(trained["nsa"], tmp_path, "--ids", path, *options)
    assert report["sequences"][0]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("size", "mebibytes"),
    [("2.5MiB", 3), ("0.001 gib", 2), ("1048576", 1), ("2e6", 2), ("5MB", 5), ("9000k", 9)],
)
def test_max_memory_takes_fractions_and_units(trained, size, mebibytes):
    message = refused("generate", trained["nsa"], "--tokens", 1, "--max-memory", size)
    assert f"--max-memory {mebibytes} MiB: must be at least" in message


@pytest.mark.parametrize(
    ("options", "expected"),
    [(["--temperature", -1], "temperature = -1"), (["--top-p", 0], "top_p = 0"), (["--top-k", -3], "top_k = -3"),
     (["--tokens", 0], "--tokens"), (["--dtype", "int8"], "--dtype"), (["--prompt-file", "/no/such/file"], "/no/such"),
     (["--prompts", "/dev/null"], "/dev/null: is empty"), (["--prompts", "x", "--prompt", "y"], "--prompts")],
)  # fmt: skip
def test_bad_arguments_are_refused_by_name(trained, options, expected):
    assert expected in refused("generate", trained["nsa"], *options)
