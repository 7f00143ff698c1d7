"""The program `nsa` as a user runs it: a process with arguments, its output and its exit code."""

import json
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("NSA_PROGRAM", ROOT / "build" / "bin" / "nsa"))

TINY_MODEL = "--layers 1 --hidden-size 32 --heads 2 --kv-heads 1 --head-dim 16 --dtype float32".split()
TINY_NSA = "--kernel-size 8 --kernel-stride 4 --block-size 16 --topk 4 --window-size 32 --separate-kv".split()
TINY_RUN = "--context 256 --batch-size 1 --held-out-percent 20 --log-every 4 --eval-every 8 --threads 2".split()
TINY = TINY_MODEL + TINY_NSA + TINY_RUN


# Under nohup SIGHUP is ignored, in a job in the background SIGINT; a program that inherits this must ignore them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests that do not name a device are about the CPU, on a machine with a GPU too.
os.environ["NSA_DEVICE"] = "cpu"


def nsa(*arguments, code=0, timeout=300, device="cpu"):
    """Runs the program and returns the finished process; its exit code must be `code`. `device`: the default one."""
    environment = {**os.environ, "NSA_DEVICE": device}
    done = subprocess.run(
        [PROGRAM, *map(str, arguments)],
        capture_output=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        env=environment,
    )
    output = f"{done.stdout.decode(errors='replace')}\n{done.stderr.decode(errors='replace')}"
    assert done.returncode == code, f"nsa {' '.join(map(str, arguments))}: exit code {done.returncode}\n{output}"
    done.text = output
    return done


def refused(*arguments, device="cpu"):
    """The one-line message with which the program refuses; exit code 2, no trace."""
    done = nsa(*arguments, code=2, device=device)
    message = done.stderr.decode()
    assert message.startswith("nsa: "), message
    assert "terminate" not in message and "frame #" not in message, message
    return message


def open_checkpoint(path):
    """Tensors and metadata of a file of the program's, without its checksum: to be changed and written again."""
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, {
            key: value for key, value in file.metadata().items() if key != "nsa-checksum"
        }


def same_weights(run, expected):
    """Weights and optimizer of two runs have the same bits; else what differs, by how much and since which step."""
    (optimizer,) = (path.name for path in expected.glob("optimizer-*.safetensors"))
    for name in ("model.safetensors", optimizer):
        found, wanted = load_file(run / name), load_file(expected / name)
        assert found.keys() == wanted.keys()
        differ = [key for key in wanted if found[key].tobytes() != wanted[key].tobytes()]
        by = {key: float(abs(found[key].astype("f8") - wanted[key].astype("f8")).max()) for key in differ}
        losses = zip(metrics(run, "train"), metrics(expected, "train"), strict=False)
        steps = [a["step"] for a, b in losses if a["loss"] != b["loss"]]
        assert not differ, f"{name}: {len(differ)} of {len(wanted)} tensors differ, losses at steps {steps[:3]}: {by}"


def metrics(run, kind):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder of small texts, the same on every machine, some longer than the tiny context."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(7)
    words = ["def", "return", "self", "value", "for", "in", "import", "class", "None", "(", ")", ":", "\n    ", "="]
    for i in range(20):
        text = " ".join(draw.choice(words) for _ in range(draw.randrange(20, 300)))
        (folder / f"file{i:02}.py").write_text(text)
    return folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory, corpus):
    """One small finished run of each kind of attention."""
    runs = {}
    for attention in ("nsa", "full", "window"):
        out = tmp_path_factory.mktemp("runs") / attention
        nsa("train", "--out", out, "--data", corpus, "--attention", attention, "--steps", 24, *TINY)
        runs[attention] = out
    return runs
