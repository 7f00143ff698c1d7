"""Links, FIFOs, devices, endless and empty files: the program opens regular files, and each in its own folder."""

import os
import re
import shutil
import subprocess
import time

import pytest
from safetensors.numpy import save_file

from conftest import PROGRAM, TINY, nsa, open_checkpoint

SECONDS = 30  # a process that waits for a FIFO or reads a device is stopped then, and fails


def one_refusal(*arguments, cwd=None):
    """The message of a program that refuses at once: exit code 2, one line, no trace."""
    done = subprocess.run(
        [PROGRAM, *map(str, arguments)], capture_output=True, timeout=SECONDS, stdin=subprocess.DEVNULL, cwd=cwd
    )
    message = done.stderr.decode()
    assert done.returncode == 2 and message.startswith("nsa: "), (done.returncode, message[-2000:])
    assert "frame #" not in message and len(message) < 2500 and message.count("\n") <= 2, message
    return message


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained["nsa"], tmp_path / "run")
    return tmp_path / "run"


def replace(path, kind):
    """Puts something else in the place of a file."""
    outside = path.parent.parent / "outside"
    moved = path.read_bytes() if path.exists() else b""
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.symlink_to(outside)
    if kind == "link":
        outside.write_bytes(moved)
    return outside


OWN = ["config.json", "model.safetensors", "metrics.jsonl", "optimizer-24.safetensors", "config.toml", ".nsa-lock"]
KINDS = ["dangling", "link", "fifo", "folder", "device"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OWN)
def test_resume_opens_regular_files_of_the_run_folder_alone(run, name, kind):
    outside = replace(run / name, kind)
    before = outside.read_bytes() if kind == "link" else None
    message = one_refusal("train", "--out", run, "--resume")
    assert f"{name}: not a regular file" in message, message
    assert (outside.read_bytes() if outside.exists() else None) == before
    assert name == ".nsa-lock" or not (run / ".nsa-lock").exists()


@pytest.mark.parametrize("kind", ["dangling", "fifo"])
@pytest.mark.parametrize("name", OWN[1:3])
def test_overwrite_leaves_what_is_no_regular_file(run, corpus, name, kind):
    outside = replace(run / name, kind)
    options = ["--data", corpus, *TINY, "--steps", 1]
    assert f"{name}: not a regular file" in one_refusal("train", "--out", run, "--overwrite", *options)
    assert os.path.lexists(run / name) and not outside.exists()


@pytest.mark.parametrize("kind", ["dangling", "link", "fifo", "device"])
@pytest.mark.parametrize("name", OWN[:2])
def test_commands_that_read_a_run_follow_no_link_in_it(run, name, kind):
    replace(run / name, kind)
    assert f"{name}: not a regular file" in one_refusal("generate", run, "--tokens", 1)


def test_metrics_with_a_second_name_are_not_written_through_it(run):
    os.link(run / "metrics.jsonl", run.parent / "backup.jsonl")
    before = (run / "metrics.jsonl").read_text()
    nsa("train", "--out", run, "--resume")
    assert (run.parent / "backup.jsonl").read_text() == before
    os.link(run.parent / "backup.jsonl", run / ".nsa-lock")
    assert ".nsa-lock: has 2 names" in one_refusal("train", "--out", run, "--resume")
    assert (run.parent / "backup.jsonl").read_text() == before


def test_a_backup_by_hard_links_does_not_end_a_run(corpus, tmp_path):
    out, backup = tmp_path / "run", tmp_path / "backup.jsonl"
    command = [PROGRAM, "train", "--out", out, "--data", corpus, *TINY, "--steps", 100]
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + SECONDS
    while not (out / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.link(out / "metrics.jsonl", backup)
    lines = len(backup.read_text().splitlines())
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert len((out / "metrics.jsonl").read_text().splitlines()) > lines, "the run was not over"


def test_a_run_folder_may_be_named_by_a_link(run, tmp_path):
    (tmp_path / "link").symlink_to(run)
    nsa("train", "--out", tmp_path / "link", "--resume")
    nsa("generate", tmp_path / "link", "--tokens", 1)


@pytest.mark.parametrize("kind", ["fifo", "device", "dangling"])
def test_the_run_folder_is_a_folder(tmp_path, corpus, kind):
    run = tmp_path / "in" / "run"
    run.parent.mkdir()
    outside = replace(run, kind)
    for options in ([], ["--overwrite"]):
        assert str(run) in one_refusal("train", "--out", run, "--data", corpus, "--steps", 1, *options)
    assert not outside.exists()


MODULES = ["sysconfig", "sys", "encodings", "site", "sitecustomize", "usercustomize", "os"]


@pytest.mark.parametrize("variables", [{}, {"PYTHONPATH": "."}, {"PYTHONPATH": ""}])
def test_default_data_run_no_file_of_the_working_directory(tmp_path, variables):
    """Also where PYTHONPATH names it; the run is refused after its data were found, which takes seconds otherwise."""
    for module in MODULES:
        (tmp_path / f"{module}.py").write_text("open('ran', 'w')\nraise SystemExit(1)\n")
    for program in ("python", "python3", "sh", "env"):
        (tmp_path / program).write_text("#!/bin/sh\ntouch ran\n")
        (tmp_path / program).chmod(0o755)
    environment = {**os.environ, **variables, "PATH": f":.:{os.environ['PATH']}:", "NSA_DEVICE": "cpu"}
    command = [PROGRAM, "train", "--out", "run", "--tokenizer", "none", "--steps", "1"]
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, env=environment, timeout=60)
    assert done.returncode == 2 and not (tmp_path / "ran").exists(), done.stderr


def test_no_library_comes_from_the_working_directory(tmp_path):
    """Nor where the program has empty folders in its library path, which the dynamic linker takes for this one."""
    listing = subprocess.run(["ldd", PROGRAM], capture_output=True, text=True, check=True).stdout
    libraries = re.findall(r"^\s*(\S+) => /", listing, re.MULTILINE)
    assert len(libraries) > 5
    for library in libraries:
        (tmp_path / library).write_text("no library")
    done = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_training_on_ranks_loads_no_library_of_the_working_directory(tmp_path, monkeypatch):
    import nsa.train

    for file in ("bin/nsa", "lib/libnsa_program.so"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text("no library")
        (tmp_path / file).chmod(0o755)
    monkeypatch.chdir(tmp_path / "bin")
    monkeypatch.delenv("NSA_PROGRAM", raising=False)
    monkeypatch.setattr(nsa.train, "__file__", "/nowhere/python/nsa/train.py")  # no build next to it
    for path in (".", "", "../bin", ":/nowhere"):
        monkeypatch.setenv("PATH", path)
        with pytest.raises(SystemExit, match="name it in NSA_PROGRAM") as refusal:
            nsa.train.load_program()
        assert str(tmp_path) not in str(refusal.value)


def test_empty_arguments_are_refused_by_name():
    """All that take a text, but for a new document (--prompt) and names without an extension."""
    where = {"train": ["--out", "x"], "bench": [], "recall": [], "info": []}
    seen = 0
    for command in re.findall(r"^  (\w+)", nsa("--help").stdout.decode().split("Subcommands:")[1], re.MULTILINE):
        text = nsa(command, "--help").stdout.decode()
        for option in re.findall(r"^  (?:-\w,)?(--[\w-]+) TEXT", text, re.MULTILINE):
            if option in ("--prompt", "--extension"):
                continue
            before = [] if option == "--out" else where.get(command, ["x"])
            message = one_refusal(command, *before, option, "")
            one_of = f"{option}:  not in {{"  # for the options that have a list of values
            assert f"{option}: must not be empty" in message or one_of in message, message
            seen += 1
    assert seen > 10


@pytest.mark.parametrize("command", ["generate", "eval", "needle", "inspect", "debug compare"])
def test_an_empty_checkpoint_is_refused_by_name(command):
    assert re.search(r"(checkpoint|dump): must not be empty", one_refusal(*command.split(), ""))


ENDLESS = [
    ("generate", "--prompt-file", "too large"),
    ("generate", "--prompts", "too large"),
    ("generate", "--ids", "too large"),
    ("bench", "--peers", "too large"),
    ("train", "--tokenizer", "not a regular file"),
    ("train", "--data", "must be a regular file or a folder"),
    ("train", "--init", "/dev/zero"),
]


@pytest.mark.parametrize(("command", "option", "expected"), ENDLESS)
def test_a_device_without_end_is_refused(trained, corpus, tmp_path, command, option, expected):
    where = {"generate": [trained["nsa"]], "bench": ["--lengths", 64, "--threads", 1]}.get(command, [])
    if command == "train":
        where = ["--out", tmp_path / "run", "--steps", 1]
        where += [] if option == "--data" else ["--data", corpus]
        where += [] if option == "--init" else TINY
    message = one_refusal(command, *where, option, "/dev/zero")
    assert expected in message and "/dev/zero" in message, message


def test_a_prompt_comes_through_a_fifo(trained, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with subprocess.Popen(["sh", "-c", f"printf def > {tmp_path}/fifo"]):
        done = nsa("generate", trained["nsa"], "--prompt-file", tmp_path / "fifo", "--tokens", 1)
    assert done.stdout.startswith(b"def")


def test_binary_files_are_passed_over_whatever_their_size(tmp_path, corpus):
    """A sparse file of 16 TiB begins with zeros, and no memory could hold it."""
    shutil.copytree(corpus, tmp_path / "data")
    with open(tmp_path / "data" / "sparse.py", "wb") as file:
        os.truncate(file.name, 2**44 - 2**20)
    nsa("train", "--out", tmp_path / "run", "--data", tmp_path / "data", *TINY, "--steps", 1)
    (tmp_path / "run" / "config.json").unlink()
    with open(tmp_path / "run" / "config.json", "wb") as file:
        os.truncate(file.name, 2**40)
    assert "config.json: too large" in one_refusal("generate", tmp_path / "run")


@pytest.mark.parametrize("name", ["a\x1b[2J\x07\x00b", "n" * 100_000, "\u009b2J\u202ex"])
def test_names_from_files_reach_the_terminal_in_one_short_line(run, name):
    weights, metadata = open_checkpoint(run / "model.safetensors")
    save_file({**weights, name: weights["norm.weight"]}, run / "model.safetensors", metadata)
    message = one_refusal("generate", run, "--tokens", 1)
    assert "is not in the configured model" in message
    assert all(character.isprintable() for character in message.rstrip("\n")), message


def test_a_dump_with_a_name_that_no_terminal_shows(tmp_path, trained):
    weights, _ = open_checkpoint(trained["nsa"] / "model.safetensors")
    save_file({"q": weights["norm.weight"]}, tmp_path / "dump", {"operation": "\x1b[2J" * 50_000})
    done = subprocess.run([PROGRAM, "debug", "compare", tmp_path / "dump"], capture_output=True, timeout=SECONDS)
    assert done.returncode == 2 and b"\x1b" not in done.stdout + done.stderr
    assert len(done.stdout) + len(done.stderr) < 5000
