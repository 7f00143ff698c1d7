"""Help and refusals common to all subcommands."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
from itertools import pairwise

import pytest

from conftest import PROGRAM, ROOT, nsa, refused


def subcommands():
    text = nsa("--help").stdout.decode().split("Subcommands:")[1]
    return re.findall(r"^  (\w+)", text, re.MULTILINE)


def test_the_command_of_the_package_runs_a_program_or_says_how_to_get_one(tmp_path):
    def command(program):
        given = [sys.executable, ROOT / "python" / "launcher.py", "--version"]
        environment = {**os.environ, "NSA_PROGRAM": str(program)}
        return subprocess.run(given, env=environment, cwd=tmp_path, capture_output=True, text=True)

    assert command(PROGRAM).stdout == nsa("--version").stdout.decode()
    for done in (command(tmp_path / "none"), command("")):  # make installs the package without the program
        assert done.returncode == 1 and done.stderr.count("\n") == 1
        assert done.stderr.startswith("nsa: /") and "NSA_LM=1 pip install" in done.stderr


def test_train_and_generate_exist():
    assert {"train", "generate"} <= set(subcommands())


EVERY_SUBCOMMAND = [[], ["debug", "compare"], *([name] for name in subcommands())]
HELP_COLUMN = 40  # of the formatter in src/cli/program.cpp
NO_OPENING = re.compile(
    r"(of|what|whether|where|how|which|a|an|the|no|without|beyond|only|0|[a-z]'?):?\b", re.IGNORECASE
)


def option_help(*subcommand):
    """{option: help} of a subcommand, its positional arguments included."""
    text = nsa(*subcommand, "--help").stdout.decode()
    assert "Usage: nsa" in text
    lines, found = text.partition("Usage:")[2].splitlines()[1:], {}
    for line, following in pairwise([*lines, ""]):
        if named := re.match(r"  (\S+)", line):  # the help begins at the column, or on the line after a long name
            found[named[1]] = following.strip() if following.startswith(" " * HELP_COLUMN) else line[HELP_COLUMN:]
    return found


def faults_of_help(text):
    """What is wrong with the help of an option."""
    text = re.sub(r"(\[.*?\]|\{[^}]*,[^}]*\})", "", text)  # defaults and allowed values
    if not re.match(r"[A-Z]", text) or NO_OPENING.match(text):
        yield "opening: must be a noun or a verb, capitalised"
    for sentence in re.split(r"[.;] ", text):
        if len(sentence.split()) > 25:
            yield f"length: {len(sentence.split())} words in a sentence, must be at most 25"


@pytest.mark.parametrize("name", EVERY_SUBCOMMAND, ids=" ".join)
def test_option_help_opens_with_a_noun_or_a_verb(name):
    found = option_help(*name)
    assert "-h,--help" in found
    faults = [f"{option}: {fault}" for option, text in found.items() for fault in faults_of_help(text)]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "text",
    ["Of the matrices", "What is asked", "0: one for each core", "l: tokens", "nsa, full", "A dtype", "Word " * 26],
)
def test_bad_help_is_found(text):
    assert list(faults_of_help(text))


@pytest.mark.parametrize("name", subcommands())
def test_every_subcommand_refuses_unknown_options(name):
    message = refused(name, "--no-such-option", "1")
    assert "--no-such-option" in message or "required" in message  # CLI11 names a missing argument first


def test_version():
    assert re.match(r"nsa \d+\.\d+\.\d+", nsa("--version").stdout.decode())


@pytest.mark.parametrize("arguments", [[], ["nonsense"]])
def test_a_subcommand_is_needed(arguments):
    refused(*arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "--out", "x", "--steps", 2**64], f"must be an integer {-(2**63)} ... {2**63 - 1}"),
        (["train", "--out", "x", "--steps", "9" * 40], "must be an integer"),
        (["train", "--out", "x", "--seed", -1], f"must be an integer 0 ... {2**64 - 1}"),
        (["train", "--out", "x", "--seed", 2**64], "must be an integer"),
        (["train", "--out", "x", "--lr", "nan"], "must be a finite number"),
        (["train", "--out", "x", "--rope-theta", "inf"], "must be a finite number"),
        (["train", "--out", "x", "--grad-accum", 2**40], "grad_accum"),
        (["train", "--out", "x", "--document-bytes", 0], "--document-bytes"),
        (["generate", "x", "--seed", -1], "must be an integer"),
        (["generate", "x", "--temperature", "inf"], "must be a finite number"),
        *(
            (["generate", "x", "--max-memory", size], f"{size}: must be bytes, or a number with a unit: kB, MB, GB")
            for size in ("2XB", "-1GiB", "nan", "1e30", "8EiB", "GiB", "1iB", "1kmB", "0x1GiB")
        ),
        (["needle", "x", "--depths", "0.5,nan"], "must be a finite number"),
        (["needle", "x", "--lengths", 2**40], "--lengths"),
        (["bench", "--lengths", 2**40], "--lengths"),
        (["bench", "--budget", "nan"], "must be a finite number"),
        (["recall", "--lr", -1], "--lr"),
        (["eval", "x", "--tokens", -1], "--tokens"),
    ],
)
def test_numbers_that_are_none_are_refused(arguments, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refused(*arguments)
    assert expected in message and arguments[-2].lstrip("-") in message.replace("_", "-"), message


@pytest.mark.parametrize("arguments", [["--version"], ["info"], *([*name, "--help"] for name in EVERY_SUBCOMMAND)])
@pytest.mark.parametrize("redirection", [">/dev/full", ">&-"])
def test_output_that_is_lost_is_an_error(arguments, redirection):
    command = " ".join([str(PROGRAM), *arguments])
    done = subprocess.run(["sh", "-c", f"{command} {redirection}"], stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith(b"nsa: standard output: cannot write"), done
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
def test_messages_that_are_lost_end_nothing(redirection, trained, tmp_path):
    (tmp_path / "text.txt").write_text("alpha beta gamma\n" * 50)
    training = f"train --out {tmp_path}/run --data {tmp_path}/text.txt --steps 1 --layers 1 --context 64 --device cpu"
    for command, code in [(training, 0), (f"generate {trained['nsa']} --tokens 2", 0), ("eval nowhere", 2), ("no", 2)]:
        done = subprocess.run(["sh", "-c", f"{PROGRAM} {command} {redirection}"], stdout=subprocess.PIPE, timeout=60)
        assert done.returncode == code, (command, done)


def test_results_that_are_lost_are_an_error(trained):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [PROGRAM, "generate", trained["nsa"], "--tokens", "3"], stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert done.returncode == 1 and b"nsa: standard output: cannot write" in done.stderr, done
    done = nsa("generate", trained["nsa"], "--tokens", 3, "--json", "/dev/full", code=1)
    assert "/dev/full: cannot write: No space left" in done.text


def generate(trained, json_path, **keywords):
    return nsa("generate", trained["nsa"], "--tokens", 3, "--json", json_path, **keywords)


def test_json_dash_is_standard_output(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = generate(trained, "-").stdout.decode(errors="replace").splitlines()
    assert json.loads(lines[-1])["kind"] == "nsa-generate" and not os.listdir(tmp_path)


def test_json_replaces_regular_files_alone(trained, tmp_path):
    target, link = tmp_path / "out.json", tmp_path / "link.json"
    target.write_text("before")
    target.chmod(0o600)
    link.symlink_to(target)
    generate(trained, link)
    assert link.is_symlink() and json.loads(target.read_text())["kind"] == "nsa-generate"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    generate(trained, "/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    dangling = tmp_path / "dangling.json"
    dangling.symlink_to(tmp_path / "new.json")
    generate(trained, dangling)
    assert dangling.is_symlink() and json.loads((tmp_path / "new.json").read_text())["kind"] == "nsa-generate"
    assert sorted(os.listdir(tmp_path)) == ["dangling.json", "link.json", "new.json", "out.json"]


def test_json_is_written_to_a_fifo(trained, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = subprocess.Popen(["cat", fifo], stdout=subprocess.PIPE)
    generate(trained, fifo)
    assert json.loads(reader.communicate(timeout=60)[0])["kind"] == "nsa-generate"
    assert stat.S_ISFIFO(fifo.stat().st_mode)


@pytest.mark.parametrize("command", ["generate", "eval", "needle", "inspect", "bench", "recall"])
def test_json_is_checked_before_the_work(command, tmp_path):
    arguments = [] if command in ("bench", "recall") else ["no-checkpoint"]
    for path in (tmp_path, tmp_path / "nowhere" / "out.json", tmp_path / ("x" * 300)):
        assert f"--json {path}: cannot write" in refused(command, *arguments, "--json", path)


def test_names_that_are_not_utf8(trained, tmp_path):
    name = os.fsencode(tmp_path) + b"/r\xff\x1b"
    os.symlink(trained["nsa"], name)
    done = subprocess.run([PROGRAM, "generate", name, "--tokens", "1", "--json", "-"], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "r\ufffd\x1b" in json.loads(done.stdout.splitlines()[-1])["checkpoint"]
    done = subprocess.run([PROGRAM, "generate", name + b"\n-"], capture_output=True, timeout=60)
    assert done.returncode == 2 and b"\\x1b\\x0a" in done.stderr and done.stderr.count(b"\n") == 1, done.stderr


@pytest.mark.parametrize("arguments", [["{}", "--prompt-file", "/"], ["x" * 300], ["{}", "--prompt-file", "x" * 300]])
def test_files_that_cannot_be_read(trained, arguments):
    message = refused("generate", *(word.format(trained["nsa"]) for word in arguments))
    assert arguments[-1] in message and "internal" not in message


@pytest.mark.parametrize(
    ("name", "value"), [("NSA_CPU_ISA", "sse9"), ("NSA_DUMP", "/no/such/folder"), ("NSA_BACKEND", "gpu")]
)
def test_environment(trained, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert f"{name} = '{value}'" in refused("generate", trained["nsa"])


def test_generate_says_that_it_was_interrupted(trained):
    done = subprocess.Popen(
        [PROGRAM, "generate", trained["nsa"], "--tokens", str(10**6), "--ignore-end"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert done.stdout.read(3)
    done.send_signal(signal.SIGINT)
    done.communicate(timeout=60)
    assert done.returncode == 128 + signal.SIGINT
