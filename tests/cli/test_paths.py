"""Links, FIFOs, devices, endless and empty files: the program opens regular files, and each in its own folder."""

import os
import re
import shutil
import subprocess

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
