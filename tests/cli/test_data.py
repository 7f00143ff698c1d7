"""nsa train on each kind of data, its split, what it skips and refuses, --config, and a tokenizer.json."""

import array
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from faults import ADVERSARIAL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from test_paths import one_refusal

from conftest import PROGRAM, TINY, metrics, nsa, refused

STEPS = [*TINY, "--steps", 20, "--eval-every", 10, "--save-every", 20, "--log-every", 10]
ENVIRONMENT = os.environ | {"NSA_PROGRAM": str(PROGRAM), "NSA_DEVICE": "cpu"}
IN_PYTHON = (sys.executable, "-m", "nsa")  # which has the package `tokenizers`


def train(out, *data):
    """Trains and returns what it printed."""
    return nsa("train", "--out", out, *STEPS, *data).text


def config_of(out):
    return json.loads((out / "config.json").read_text())


def fingerprint(out):
    return config_of(out)["fingerprint"]


def refusal(tmp_path, *data):
    return one_refusal("train", "--out", tmp_path / "run", *STEPS, *data)


def same_weights(a, b):
    a, b = (load_file(out / "model.safetensors") for out in (a, b))
    return all(np.array_equal(a[name], b[name]) for name in a)


def assert_resumes(out, *data, program=(PROGRAM,)):
    """The run of these data, stopped by a signal and resumed, ends with the same bits."""
    stopped = out.parent / f"{out.name}-stopped"
    command = [*map(str, (*program, "train", "--out", stopped, *STEPS, *data))]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    process.stderr.readline()  # the first step is done
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    subprocess.run([*map(str, (*program, "train", "--resume", "--out", stopped))], env=ENVIRONMENT, check=True)
    assert metrics(stopped, "end")[-1]["reason"] == "finished" and same_weights(out, stopped)


@pytest.fixture(scope="module")
def texts(corpus):
    return {path.name: path.read_text() for path in sorted(corpus.iterdir())}


@pytest.fixture(scope="module")
def plain(corpus, tmp_path_factory):
    """A run on the folder of texts, to which the same texts in other files must lead."""
    out = tmp_path_factory.mktemp("plain") / "run"
    train(out, "--data", corpus)
    return out


@pytest.mark.parametrize("percent", [5, 20, 99])
def test_the_end_of_one_file_is_held_out(tmp_path, texts, percent):
    """Also where its hash would hold all of it out."""
    file = tmp_path / "text.txt"
    file.write_text("\n".join(texts.values()))
    tokens = 2 + len(file.read_bytes())
    held_out = -(-tokens * percent // 100)
    options = ["--data", file, "--held-out-percent", percent, "--eval-tokens", 0]
    text = nsa("train", "--out", tmp_path / "run", *STEPS, *options).text
    assert "1 documents to train on, the ends of 1 held out" in text
    # Each span of the context predicts all but its first token.
    (evaluation,) = {line["eval_tokens"] for line in metrics(tmp_path / "run", "eval")}
    assert evaluation == held_out - 1
    nsa("eval", tmp_path / "run", "--tokens", 0, "--json", tmp_path / "eval.json")
    assert json.loads((tmp_path / "eval.json").read_text())["tokens"] == evaluation
    if percent == 20:
        assert_resumes(tmp_path / "run", *options)


def test_nothing_is_held_out_on_demand(tmp_path, corpus):
    text = nsa("train", "--out", tmp_path / "run", "--data", corpus, *STEPS, "--held-out-percent", 0).text
    assert "20 documents to train on, 0 held out" in text and not metrics(tmp_path / "run", "eval")


def test_lines_of_json(tmp_path, texts, plain):
    file = tmp_path / "text.jsonl"
    lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(texts.values())]
    file.write_text("\n".join([*lines[:3], "", " \r", *lines[3:]]))
    train(tmp_path / "run", "--data", file)
    assert fingerprint(tmp_path / "run") == fingerprint(plain) and same_weights(tmp_path / "run", plain)


def test_gzip(tmp_path, texts, plain):
    """Files of one member and of several, and lines of JSON."""
    (tmp_path / "data").mkdir()
    for i, (name, text) in enumerate(texts.items()):
        half = len(text) // 2 if i % 2 else 0
        parts = [gzip.compress(part.encode()) for part in (text[:half], text[half:])]
        (tmp_path / "data" / f"{name}.gz").write_bytes(b"".join(parts))
    train(tmp_path / "run", "--data", tmp_path / "data", "--extension", ".py")
    assert fingerprint(tmp_path / "run") == fingerprint(plain) and same_weights(tmp_path / "run", plain)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts.values())
    (tmp_path / "text.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    train(tmp_path / "lines", "--data", tmp_path / "text.jsonl.gz")
    assert fingerprint(tmp_path / "lines") == fingerprint(plain)
    assert_resumes(tmp_path / "lines", "--data", tmp_path / "text.jsonl.gz")


def test_links_are_followed_once(tmp_path, texts, plain, corpus):
    """As in a snapshot of a hub's cache; what a folder holds anyway is not taken twice, and nothing circles."""
    data = tmp_path / "data"
    data.mkdir()
    for name in texts:
        (data / name).symlink_to(corpus / name)
    first = next(iter(texts))
    (data / first).unlink()
    shutil.copy(corpus / first, data / first)
    (data / "again.py").symlink_to(data / first)
    (data / "circle").symlink_to(data)
    (data / "broken.py").symlink_to(tmp_path / "none")
    os.mkfifo(data / "fifo.py")
    (data / "empty.py").touch()
    (data / "binary.py").write_bytes(b"\0" * 10)
    (data / "numbers.bin").write_bytes(b"\1\0" * 10)
    (data / "other.txt").write_text("text")
    (data / ".hidden.py").write_text("text")
    (data / ".git").mkdir()
    text = train(tmp_path / "run", "--data", data, "--extension", ".py", ".bin")
    assert fingerprint(tmp_path / "run") == fingerprint(plain)
    (line,) = (line for line in text.splitlines() if line.startswith("data: skipped "))
    kinds = ["1 .bin files without --vocab-size", "1 binary files", "1 broken links", "1 empty files"]
    kinds += ["1 files of other extensions", "1 hidden files", "1 hidden or installed folders"]
    kinds += ["1 links to files of the folder", "1 links to folders", "1 special files"]
    assert line.removeprefix("data: skipped ").split(", ") == kinds


def numbers(texts, width):
    """Each document as the byte tokenizer has it."""
    kind = {2: "H", 4: "I"}[width]
    return [array.array(kind, [256, *text.encode(), 256]) for text in texts.values()]


def write_numbers(folder, texts, width):
    """Files of nanoGPT's format, one a document, every second one packed, and the same as text for --ids."""
    (folder / "data").mkdir()
    documents = numbers(texts, width)
    for i, (name, tokens) in enumerate(zip(texts, documents, strict=True)):
        content = tokens.tobytes()
        file = folder / "data" / f"{name}.bin{'.gz' if i % 2 else ''}"
        file.write_bytes(gzip.compress(content) if i % 2 else content)
    (folder / "ids.txt").write_text("\n".join(" ".join(map(str, tokens)) for tokens in documents))
    return sum(map(len, documents))


def test_token_numbers(tmp_path, texts):
    """Both forms lead to the same run, which resumes and is evaluated without a tokenizer."""
    total = write_numbers(tmp_path, texts, 2)
    (tmp_path / "data" / "readme.txt").write_text("text")
    given = ("--vocab-size", 257)
    text = train(tmp_path / "bin", "--data", tmp_path / "data", *given)
    assert f"data: {total} tokens, " in text and "skipped 1 files not named .bin" in text
    train(tmp_path / "ids", "--ids", tmp_path / "ids.txt", *given)
    assert fingerprint(tmp_path / "bin") == fingerprint(tmp_path / "ids")
    assert same_weights(tmp_path / "bin", tmp_path / "ids")
    assert_resumes(tmp_path / "bin", "--data", tmp_path / "data", *given)
    assert_resumes(tmp_path / "ids", "--ids", tmp_path / "ids.txt", *given)
    nsa("eval", tmp_path / "bin", "--json", tmp_path / "eval.json")
    evaluation = json.loads((tmp_path / "eval.json").read_text())
    assert evaluation["loss"] == pytest.approx(metrics(tmp_path / "bin", "eval")[-1]["loss"], rel=1e-5)
    assert evaluation.get("bits_per_byte") is None
    for data in (["--data", tmp_path / "data"], ["--ids", tmp_path / "ids.txt"]):
        nsa("eval", tmp_path / "bin", *data, "--json", tmp_path / "eval.json")
        assert json.loads((tmp_path / "eval.json").read_text())["documents"] == len(texts)
    nsa("generate", tmp_path / "bin", "--ids", tmp_path / "ids.txt", "--tokens", 1)
    assert "no tokenizer: give token numbers with --ids" in refused("generate", tmp_path / "bin", "--prompt", "x")
    assert "no tokenizer: needles and texts are made of its tokens" in refused("needle", tmp_path / "bin")


def test_token_numbers_of_a_large_vocabulary(tmp_path, texts):
    """Are uint32."""
    total = write_numbers(tmp_path, dict(list(texts.items())[:4]), 4)
    options = [*TINY, "--context", 32, "--steps", 1, "--vocab-size", 65537]
    text = nsa("train", "--out", tmp_path / "bin", "--data", tmp_path / "data", *options).text
    assert f"data: {total} tokens, " in text
    nsa("train", "--out", tmp_path / "ids", "--ids", tmp_path / "ids.txt", *options)
    assert fingerprint(tmp_path / "bin") == fingerprint(tmp_path / "ids")
    assert config_of(tmp_path / "bin")["model"]["vocab_size"] == 65537


def test_numbers_of_a_text_train_what_the_text_trains(tmp_path, texts, plain):
    """Where the order of the documents and their split, which is by content, are the same."""
    documents = [" ".join(map(str, tokens)) for tokens in numbers(texts, 2)]
    (tmp_path / "ids.txt").write_text("\n".join(documents))
    train(tmp_path / "ids", "--ids", tmp_path / "ids.txt", "--vocab-size", 257, "--held-out-percent", 0)
    nsa(
        "train",
        "--out",
        tmp_path / "text",
        "--data",
        *config_of(plain)["data"]["paths"],
        *STEPS,
        "--held-out-percent",
        0,
    )
    assert same_weights(tmp_path / "ids", tmp_path / "text")


LINE = json.dumps({"text": "some text " * 40})


@pytest.mark.parametrize(
    ("name", "content", "options", "expected"),
    [
        ("a.jsonl", f"{LINE}\n{{", [], "a.jsonl:2: must be a JSON object with a string"),
        ("a.jsonl", f"{LINE}\n[1]", [], "a.jsonl:2: must be a JSON object"),
        ("a.jsonl", '{"text": 3}', [], "a.jsonl:1: must be a JSON object"),
        ("a.jsonl", '{"title": "x"}', [], "a.jsonl:1: must be a JSON object"),
        ("a.jsonl", '{"text": "x", "text": "y"}', [], "a.jsonl:1: must be a JSON object"),
        ("a.jsonl", '{"text": ' + "[" * 100_000, [], "a.jsonl:1: must be a JSON object"),
        ("a.jsonl", b'{"text": "\xff"}', [], "a.jsonl:1: must be a JSON object"),
        ("a.jsonl", '{"text": ""}\n\n', [], "no text found in"),
        ("a.txt", "", [], "; skipped: 1 empty files"),
        ("a.bin", b"\1\0\2\0", [], "1 .bin files without --vocab-size"),
        ("a.bin", b"\1\0\2", ["--vocab-size", 300], "a.bin: 3 bytes: must be a multiple of 2"),
        ("a.bin", b"\1\0\2\0\3\0", ["--vocab-size", 65537], "a.bin: 6 bytes: must be a multiple of 4"),
        ("a.bin", b"\1\0\2\0\3\1", ["--vocab-size", 259], "a.bin: token 2 = 259: must be 0 ... 258"),
        ("a.bin", b"\xff\xff\xff\xff", ["--vocab-size", 2**20], "a.bin: token 0 = 4294967295: must be"),
        ("a.txt", "text", ["--vocab-size", 300], "1 files not named .bin"),
        ("a.txt.gz", b"text", [], "a.txt.gz: no gzip, or damaged"),
        ("a.txt.gz", gzip.compress(b"text" * 999, mtime=0)[:-9], [], "a.txt.gz: gzip that ends too early"),
        ("a.txt.gz", gzip.compress(b"text", mtime=0) + b"more", [], "a.txt.gz: no gzip, or damaged"),
        ("a.txt.gz", gzip.compress(b"text", mtime=0)[:-8] + bytes(8), [], "a.txt.gz: no gzip, or damaged"),
        ("a.txt.gz", b"", [], "a.txt.gz: no gzip, or damaged"),
    ],
)
def test_refused_data(tmp_path, name, content, options, expected):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert expected in refusal(tmp_path, "--data", tmp_path / name, *options)


def test_a_gzip_bomb_is_refused(tmp_path):
    """Of 130 KB, which are 128 MiB; a file that shrinks as much but is small is fine."""
    with gzip.open(tmp_path / "bomb.gz", "wb") as file:
        for _ in range(128):
            file.write(b"a" * 2**20)
    assert "must unpack to at most 67108864" in refusal(tmp_path, "--data", tmp_path / "bomb.gz")
    (tmp_path / "small.gz").write_bytes(gzip.compress(b"a" * 2**20))
    train(tmp_path / "run", "--data", tmp_path / "small.gz")


def test_options_that_exclude_each_other(tmp_path, corpus):
    (tmp_path / "ids.txt").write_text("1 2 3\n")
    ids = ("--ids", tmp_path / "ids.txt")
    assert "--ids: needs --vocab-size or --init" in refusal(tmp_path, *ids)
    assert "excludes" in refused("train", "--out", tmp_path / "run", *ids, "--data", corpus)
    fraction = ("--vocab-size", 9, "--retrieval-fraction", 0.1)
    assert "retrieval_fraction = 0.1: must be 0 where" in refusal(tmp_path, *ids, *fraction)
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/zero"):
        assert "not a regular file" in refusal(tmp_path, "--ids", path, "--vocab-size", 9)


@settings(
    max_examples=600 if ADVERSARIAL else 12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_damaged_files_are_refused_or_read(tmp_path, data):
    name = data.draw(st.sampled_from(["a.jsonl", "a.jsonl.gz", "a.bin", "a.toml"]))
    whole = {"a.bin": b"\1\0" * 99, "a.toml": b'lr = 0.1\nextension = [".py", ""]\nrecompute = true\n'}
    content = bytearray(whole.get(name, LINE.encode()))
    if name.endswith(".gz"):
        content = bytearray(gzip.compress(content))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    file = tmp_path / name
    file.write_bytes(content)
    given = ["--config", file, "--ids", tmp_path / "none", "--vocab-size", 99] if name == "a.toml" else ["--data", file]
    given += ["--vocab-size", 300] if name == "a.bin" else []
    command = [PROGRAM, "train", "--out", tmp_path / "run", "--overwrite", *given, *STEPS]
    done = subprocess.run([*map(str, command)], capture_output=True, timeout=60)
    assert done.returncode in (0, 2), done.stderr
    if done.returncode == 2:
        assert done.stderr.startswith(b"nsa: ") and done.stderr.count(b"\n") <= 2, done.stderr


# ------------------------------------------------------------------------------------------------------------- --config


def test_a_file_of_options(tmp_path, corpus):
    """Gives what the command line gives, which overrides it; the run folder has the options as they were used."""
    arguments = ["--data", corpus, "--lr", 0.002, "--dense-layers", "0", "--seed", 2**64 - 1, "--separate-kv", *STEPS]
    arguments += ["--extension", ".py", ""]
    nsa("train", "--out", tmp_path / "one", *arguments)
    (tmp_path / "given.toml").write_text((tmp_path / "one" / "config.toml").read_text())
    nsa("train", "--out", tmp_path / "two", "--config", tmp_path / "given.toml")
    assert config_of(tmp_path / "two") == config_of(tmp_path / "one")
    assert same_weights(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "two" / "config.toml").read_bytes() == (tmp_path / "one" / "config.toml").read_bytes()
    more = ["--lr", 0.004, "--tokens", 300, "--data", corpus / "file00.py", "--share-kv"]
    nsa("train", f"--config={tmp_path / 'given.toml'}", *more, "-o", tmp_path / "three")
    config = config_of(tmp_path / "three")
    assert (config["train"]["lr"], config["train"]["steps"], config["train"]["tokens"]) == (0.004, 0, 300)
    assert config["data"]["paths"] == [str(corpus / "file00.py")] and config["model"]["share_kv"]
    assert config["train"]["seed"] == 2**64 - 1 and config["model"]["dense_layers"] == [0]
    nsa("train", "--resume", "--config", tmp_path / "three" / "config.toml", "--out", tmp_path / "three")


def test_a_folder_with_options_alone_is_one_of_a_run_that_ended_early(tmp_path, corpus):
    """If they are the program's; a file of the user's own stays."""
    train(tmp_path / "run", "--data", corpus)
    for name, refuses in (("own", False), ("foreign", True)):
        (tmp_path / name).mkdir()
        text = (tmp_path / "run" / "config.toml").read_text()
        (tmp_path / name / "config.toml").write_text(text.replace("# nsa", "# mine") if refuses else text)
        command = ["train", "--out", tmp_path / name, "--config", tmp_path / name / "config.toml"]
        if refuses:
            assert "holds no run of this program, but 'config.toml'" in refused(*command)
        else:
            nsa(*command)
            assert (tmp_path / name / "config.toml").read_text() == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lr = ", "a.toml: line 1: "),
        ("lr = 1\nlr = 2", "a.toml: line 2: "),
        ("learning-rate = 1", "a.toml: learning-rate: is no option of nsa train in a file"),
        ("config = 'b.toml'", "a.toml: config: is no option"),
        ("help = true", "a.toml: help: is no option"),
        ("[train]\nlr = 1", "a.toml: train: is no option"),
        ("lr = {}", "a.toml: lr: must be a string, a number, true, false or a list of these"),
        ("lr = 1979-05-27", "a.toml: lr: must be a string"),
        ("data = [['x']]", "a.toml: data: must be a string"),
        ("lr = nan", "--lr: "),
        ("lr = true", "--lr: "),
        ("steps = 1.5", "--steps: 1.5: must be an integer"),
        ("data = ['x', '']", "--data: must not be empty"),
        ("[" * 100_000, "a.toml: line 1: "),
    ],
)
def test_refused_files_of_options(tmp_path, text, expected):
    (tmp_path / "a.toml").write_text(text)
    message = refused("train", "--out", tmp_path / "run", "--config", tmp_path / "a.toml")
    assert expected in message and message.count("\n") <= 2, message


def test_a_file_of_options_is_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/zero", tmp_path):
        assert "not a regular file" in refused("train", "--out", tmp_path / "run", "--config", path)
    assert "No such file" in refused("train", "--out", tmp_path / "run", "--config", tmp_path / "none")


# ------------------------------------------------------------------------------------------------------- tokenizer.json


def in_python(*arguments, code=0):
    done = subprocess.run([*map(str, (*IN_PYTHON, *arguments))], env=ENVIRONMENT, capture_output=True, timeout=300)
    assert done.returncode == code, done.stderr.decode()
    return done


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, texts):
    """Byte-level BPE of 300 tokens with an end of text, as transformers' folders have it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts.values(), trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.fixture(scope="module")
def by_json(tmp_path_factory, corpus, tokenizer):
    out = tmp_path_factory.mktemp("json") / "run"
    in_python("train", "--out", out, "--data", corpus, "--tokenizer", tokenizer, *STEPS)
    return out


def test_a_run_by_tokenizer_json(tmp_path, by_json, tokenizer, texts):
    """The tokens are those of the package, with an own one for the end of a document; text comes back as its bytes."""
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(tokenizer))
    size = library.get_vocab_size()
    assert config_of(by_json)["model"]["vocab_size"] == size + 1
    ids = [[size, *library.encode(text).ids, size] for text in texts.values()]
    (tmp_path / "ids.txt").write_text("\n".join(" ".join(map(str, tokens)) for tokens in ids))
    texts_file = tmp_path / "text.jsonl"
    texts_file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts.values()))
    found = {}
    for name, data in (("ids", ["--ids", tmp_path / "ids.txt"]), ("text", ["--data", texts_file])):
        in_python("eval", by_json, *data, "--tokens", 0, "--json", tmp_path / "eval.json")
        found[name] = json.loads((tmp_path / "eval.json").read_text())
    assert found["text"]["loss"] == found["ids"]["loss"]
    nats, size_of_texts = (
        found["text"]["loss"] * found["text"]["eval_tokens"],
        sum(len(t.encode()) for t in texts.values()),
    )
    assert nats / np.log(2) / found["text"]["bits_per_byte"] == pytest.approx(size_of_texts + len(texts), rel=1e-6)
    prompt = "def value é\n"
    done = in_python("generate", by_json, "--prompt", prompt, "--tokens", 20, "--temperature", 2, "--ignore-end")
    assert done.stdout.startswith(prompt.encode())
    assert_resumes(by_json, "--data", *config_of(by_json)["data"]["paths"], "--tokenizer", tokenizer, program=IN_PYTHON)


def test_a_changed_tokenizer_is_refused(tmp_path, by_json, tokenizer):
    """Also where the number of its tokens is the same."""
    original = tokenizer.read_text()
    changed = json.loads(original)
    merges = changed["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]
    try:
        tokenizer.write_text(json.dumps(changed))
        shutil.copytree(by_json, tmp_path / "run")
        done = in_python("train", "--resume", "--out", tmp_path / "run", code=2)
        assert b"the data changed: fingerprint" in done.stderr
        del changed["added_tokens"], changed["model"]["vocab"]["<end>"]
        changed["model"]["vocab"] = {token: i for i, token in enumerate(changed["model"]["vocab"])}
        tokenizer.write_text(json.dumps({**changed, "added_tokens": []}))
        done = in_python("generate", by_json, "--prompt", "x", code=2)
        assert b"has 300 tokens, the model was trained with 301; must be bytes" in done.stderr
    finally:
        tokenizer.write_text(original)


def test_wrong_tokenizers_have_one_text(tmp_path, corpus, by_json):
    (tmp_path / "tokenizer.json").write_text('{"version": 1}')
    (tmp_path / "tokenizer.model").write_text("none")
    where = ["train", "--out", tmp_path / "run", "--data", corpus, *STEPS, "--tokenizer"]
    expected = "; must be bytes, a SentencePiece model or, with python -m nsa, a tokenizer.json"
    for message in (
        refused(*where, tmp_path / "tokenizer.json"),
        refused(*where, tmp_path / "tokenizer.model"),
        refused("generate", by_json, "--tokens", 1),
        in_python(*where, tmp_path / "tokenizer.json", code=2).stderr.decode(),
    ):
        assert message.startswith("nsa: tokenizer /") and message.count("\n") == 1
        assert message.endswith(expected + "\n"), message
    for path in ("/dev/zero", tmp_path):
        assert "not a regular file" in in_python(*where, path, code=2).stderr.decode()


def test_a_folder_of_transformers_with_tokenizer_json(tmp_path, tokenizer, corpus):
    """Its own token ends a text; without one, and in the program alone, it is refused."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 304, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=256)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    shutil.copy(tokenizer, tmp_path / "model")
    options = ["--context", 64, "--batch-size", 1, "--steps", 2, "--dtype", "float32", "--threads", 2]
    command = ["train", "--init", tmp_path / "model", "--data", corpus, "--out", tmp_path / "run", *options]
    assert b"has no token for the end of a text (eos)" in in_python(*command, code=2).stderr
    assert "is read by python -m nsa alone, and --ids takes token numbers" in refused(*command)
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    in_python(*command)
    assert config_of(tmp_path / "run")["model"]["vocab_size"] == 304
    in_python("generate", tmp_path / "run", "--prompt", "def", "--tokens", 2)
    (tmp_path / "ids.txt").write_text("1 2 3 4 5\n" * 20)
    ids = ["--ids", tmp_path / "ids.txt", "--held-out-percent", 0]
    nsa("train", "--init", tmp_path / "model", *ids, "--out", tmp_path / "ids", *options)
    assert config_of(tmp_path / "ids")["data"]["vocab_size"] == 304


@pytest.mark.parametrize("begins", [None, "named", "added"])
def test_a_prompt_begins_as_by_the_folders_tokenizer(tmp_path, tokenizer, begins):
    """The start of a text is first where the tokenizer puts it there, not where it is only named."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, processors

    sizes = {"vocab_size": 304, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    own = Tokenizer.from_file(str(tokenizer))
    if begins == "added":
        own.post_processor = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    ends = {"eos_token": "<end>"} | ({"bos_token": "<end>"} if begins else {})
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=own, **ends)
    own.save_pretrained(tmp_path / "model")
    for prompt in ("def value", ""):
        report = tmp_path / "out.json"
        in_python("generate", tmp_path / "model", "--prompt", prompt, "--tokens", 1, "--json", report)
        (sequence,) = json.loads(report.read_text())["sequences"]
        assert sequence["prompt_tokens"] == (len(own(prompt).input_ids) or 1)
