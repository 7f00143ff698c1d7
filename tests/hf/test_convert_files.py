"""nsa.convert on folders of others and on full disks: one line, an exit code, nothing left."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import SMALL, dense, move_to_hub
from nsa.convert import main

SIZES = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
SECONDS = 60  # a test that waits for a FIFO or reads a device without end fails then
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
RUN = {"model": {"attention": "nsa", "vocab_size": 257, "num_layers": 1}, "train": {"context": 64}}


@pytest.fixture(autouse=True)
def deadline():
    def stop(*_):
        raise AssertionError(f"no end after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def src(tmp_path):
    dense("llama").save_pretrained(tmp_path / "in" / "src")
    return tmp_path / "in" / "src"


def message_of(capsys, src, code):
    """What a failed conversion says in one line; it leaves no folder."""
    assert main([str(src), str(src.parent / "out"), *SIZES, "--lengths=0"]) == code
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and len(message) < 2200
    assert message[:-1].isprintable()
    assert [path.name for path in src.parent.iterdir()] == ["src"]
    return message


def refused(capsys, src):
    return message_of(capsys, src, 2)


@pytest.mark.parametrize("empty", [("", "out"), ("src", "")])
def test_an_empty_path_is_refused(tmp_path, monkeypatch, capsys, empty):
    monkeypatch.chdir(tmp_path)  # which an empty path would be
    with pytest.raises(SystemExit) as end:
        main([*empty])
    name = "SRC" if not empty[0] else "OUT"
    assert end.value.code == 2 and f"argument {name}: must not be empty" in capsys.readouterr().err


def converted(src):
    assert main([str(src), str(src.parent / "out"), *SIZES, "--lengths=0"]) == 0
    return src.parent / "out"


def change(src, **fields):
    config = json.loads((src / CONFIG).read_text())
    (src / CONFIG).write_text(json.dumps({**config, **fields}))


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "dangling"])
@pytest.mark.parametrize("name", [CONFIG, INDEX, WEIGHTS, "tokenizer.json", "LICENSE.txt"])
def test_what_is_no_regular_file_is_refused_at_once(src, capsys, name, kind):
    path = src / name
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        if name not in (CONFIG, INDEX, WEIGHTS):
            return  # folders next to the weights are skipped
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else src.parent.parent / "outside")
    assert f"{path}: " in refused(capsys, src)


def test_no_file_elsewhere_is_copied(src, capsys):
    secret = src.parent.parent / "secret"
    secret.write_text("secret")
    (src / "LICENSE.txt").symlink_to(secret)
    assert "LICENSE.txt: a link out of the folder: must be a file of its own" in refused(capsys, src)
    (src / "LICENSE.txt").unlink()
    (src / "loop.txt").symlink_to(src / "loop.txt")
    assert "loop.txt: " in refused(capsys, src)
    (src / "loop.txt").unlink()
    (src / "TERMS.txt").write_text("terms")
    (src / "LICENSE.txt").symlink_to("TERMS.txt")
    copy = converted(src) / "LICENSE.txt"
    assert copy.read_text() == "terms" and not copy.is_symlink()


def test_licences_and_all_chat_templates_are_copied(src, capsys):
    templates = src / "additional_chat_templates"
    templates.mkdir()
    files = ("LICENSE", "NOTICE", "chat_template.jinja", "additional_chat_templates/tool_use.jinja")
    for name in files:
        (src / name).write_text(name)
    out = converted(src)
    assert [(out / name).read_text() for name in files] == [*files]
    shutil.rmtree(out)
    templates.rename(src.parent.parent / "elsewhere")
    templates.symlink_to(src.parent.parent / "elsewhere")
    assert "additional_chat_templates: a link out of the folder" in refused(capsys, src)


@pytest.mark.parametrize("below", ["", "dense", "checkpoints/snapshots/last"])
def test_a_folder_of_the_hub_has_links_into_its_cache(tmp_path, capsys, below):
    hub, out, other = tmp_path / "models--a--b", tmp_path / "out", tmp_path / "other"
    dense("llama").save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "tokenizer.json").write_text("{}")
    snapshot = move_to_hub(tmp_path / "plain", hub, below)
    assert main([str(snapshot), str(out), *SIZES, "--lengths=0"]) == 0
    assert (out / "tokenizer.json").read_text() == "{}" and not any(file.is_symlink() for file in out.iterdir())
    for outside in (tmp_path / "secret", hub / "refs" / "secret", hub / "blobs" / "more" / "secret"):
        outside.parent.mkdir(exist_ok=True)
        outside.write_text("{}")
        (snapshot / "tokenizer.json").unlink()
        (snapshot / "tokenizer.json").symlink_to(outside)
        assert main([str(snapshot), str(other), *SIZES, "--lengths=0"]) == 2
        assert f"{snapshot / 'tokenizer.json'}: a link out of the folder" in capsys.readouterr().err
        assert not other.exists()


@pytest.mark.parametrize("name", [CONFIG, "generation_config.json", INDEX])
def test_objects_nested_deep_are_refused(src, capsys, name):
    for levels in (65, 1000, 100_000):
        (src / name).write_text('{"a": ' + "[" * levels + "]" * levels + "}")
        assert f"{src / name}: nested deeper than 64 levels" in refused(capsys, src)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff", "not UTF-8"), (b"[]", "must be an object"), (b'{"a": NaN}', "NaN is no number"), (b"{", "line 1"),
     (b'{"a": 1, "a": 2}', "field 'a' is given twice"), (b'{"a": ' + b"1" * 5000 + b"}", "digits")],
)  # fmt: skip
@pytest.mark.parametrize("name", [CONFIG, "generation_config.json", INDEX])
def test_objects_that_are_damaged_are_refused(src, capsys, name, content, message):
    (src / name).write_bytes(content)
    text = refused(capsys, src)
    assert f"{src / name}: " in text and message in text


def test_a_file_too_large_to_be_read_is_refused(src, capsys):
    for name in (CONFIG, "tokenizer.json"):
        with open(src / name, "ab") as file:
            file.truncate(2**40)
        assert f"{src / name}: too large: must be at most 100000000 bytes" in refused(capsys, src)
        (src / name).unlink()
        dense("llama").save_pretrained(src)


@pytest.mark.parametrize("value", [1 << 20, 1024, 3, 0, -1, "many", 2.5, None, [2]])
def test_layers_that_the_files_do_not_have_are_refused(src, capsys, value):
    change(src, num_hidden_layers=value)
    assert "num_hidden_layers" in refused(capsys, src)


@pytest.mark.parametrize(
    "field",
    ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"],
)
@pytest.mark.parametrize("value", [0, -(2**70), 2**31, 2**70])
def test_sizes_beyond_those_of_the_program_are_refused(src, capsys, field, value):
    change(src, **{field: value})
    assert f"{src / CONFIG}: {field} = {value}: must be " in refused(capsys, src)


def test_runs_have_the_same_limits(tmp_path, capsys):
    src = tmp_path / "in" / "src"
    src.mkdir(parents=True)
    save_file({"norm.weight": torch.ones(4)}, src / WEIGHTS)
    (src / CONFIG).write_text(json.dumps({**RUN, "model": {**RUN["model"], "num_layers": 1 << 20}}))
    assert f"{src / CONFIG}: num_layers = 1048576: must be 1 ... 1024" in refused(capsys, src)
    for content in ({"model": 3}, {"model": {}}, {"model": None, "train": 1}, {"model": {"num_layers": "x"}}):
        (src / CONFIG).write_text(json.dumps(content))
        assert f"{src / CONFIG}: " in refused(capsys, src)
    (tmp_path / "config").write_text(json.dumps(RUN))
    (src / CONFIG).unlink()
    (src / CONFIG).symlink_to(tmp_path / "config")
    assert f"{src / CONFIG}: a link out of the folder" in refused(capsys, src)
    (src / CONFIG).unlink()
    (src / CONFIG).write_text(json.dumps(RUN))
    (src / WEIGHTS).rename(tmp_path / "weights")
    (src / WEIGHTS).symlink_to(tmp_path / "weights")
    assert f"{src / WEIGHTS}: a link out of the folder" in refused(capsys, src)


NAMES = ["a\x1b[2J\x07\x00b", "n" * 100_000, "\u009b2J\u202ex", "two\nlines"]


@pytest.mark.parametrize("name", NAMES)
def test_names_reach_the_terminal_in_one_short_line(src, capsys, name):
    weights = load_file(src / WEIGHTS)
    save_file({**weights, name: torch.ones(1)}, src / WEIGHTS)
    assert "not a tensor of the architecture" in refused(capsys, src)
    save_file(weights, src / WEIGHTS)
    for field in ({"architectures": [name]}, {"model_type": name}, {"hidden_act": name}, {"rope_parameters": name}):
        before = (src / CONFIG).read_bytes()
        change(src, **field)
        refused(capsys, src)
        (src / CONFIG).write_bytes(before)
    (src / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {name: f"{name}.safetensors"}}))
    refused(capsys, src)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(src, capsys, value):
    weights = load_file(src / WEIGHTS)
    weights["model.norm.weight"][3] = value
    save_file(weights, src / WEIGHTS)
    assert "model.norm.weight: holds values that are not finite" in refused(capsys, src)


@pytest.mark.parametrize("size", [100, 40_000])  # within the first file that is written, within the weights
def test_a_limit_on_the_size_of_files_is_one_line(src, capsys, size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        message = message_of(capsys, src, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"{src.parent / 'out'}: " in message and "File too large" in message


def test_output_that_cannot_be_printed_is_one_line(src, capsys, monkeypatch):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", Full())
        assert main([str(src), str(src.parent / "out"), *SIZES, "--lengths=0"]) == 1
    assert capsys.readouterr().err == "error: standard output: No space left on device\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting wants root")
def test_a_full_disk_is_one_line(tmp_path, capsys):
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "none", tmp_path], capture_output=True)
    if done.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        dense("llama").save_pretrained(tmp_path / "in" / "src")
        assert "No space left on device" in message_of(capsys, tmp_path / "in" / "src", 1)
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)
