"""A run that is stopped or killed and resumed ends with the same bits as one that never was."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from itertools import pairwise

import numpy as np
import pytest
from safetensors.numpy import load_file

from conftest import PROGRAM, TINY, metrics, nsa, refused, same_weights

# Noise, accumulation and several epochs: everything that could depend on how far the run was. --steps is long enough
# that a kill at a random moment falls into the training.
OPTIONS = [*TINY, "--steps", 60, "--grad-accum", 2, "--noise", 0.5, "--gate-balance", 0.05, "--selector-loss", 0.1]
OPTIONS += ["--save-every", 7]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, corpus):
    out = tmp_path_factory.mktemp("resume") / "reference"
    start = time.monotonic()
    nsa("train", "--out", out, "--data", corpus, *OPTIONS)
    return out, time.monotonic() - start


def same_bits(a, b):
    same_weights(b, a)
    timing = {"seconds", "tokens_per_second", "model_tflops"}
    for kind in ("train", "eval"):
        lines = [[{k: v for k, v in line.items() if k not in timing} for line in metrics(run, kind)] for run in (a, b)]
        assert lines[0] == lines[1]


def interrupt(out, arguments, seconds, how):
    process = subprocess.Popen([PROGRAM, "train", "--out", out, *map(str, arguments)], stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(how)
    return process.wait(60)


@pytest.mark.slow
@pytest.mark.bits
def test_kills_at_any_moment_leave_no_trace(tmp_path, corpus, uninterrupted):
    reference, seconds = uninterrupted
    draw = random.Random(time.time_ns())
    out, arguments, kills = tmp_path / "killed", ["--data", corpus, *OPTIONS], 0
    longest = 0.6 * seconds
    while kills < 8:
        code = interrupt(out, arguments, draw.uniform(0, longest), signal.SIGKILL)
        if code == 0 and kills == 0:  # the reference ran while the machine was busier
            shutil.rmtree(out)
            longest /= 2
            continue
        if code == 0:
            break
        assert code == -signal.SIGKILL
        kills += 1
        if (out / "config.json").exists():
            arguments = ["--resume"]
    if (out / "config.json").exists():
        nsa("train", "--out", out, "--resume")
    else:
        nsa("train", "--out", out, *arguments)
    same_bits(reference, out)


@pytest.mark.bits
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_and_ends_cleanly(tmp_path, corpus, uninterrupted, how):
    reference, _ = uninterrupted
    out = tmp_path / "run"
    process = subprocess.Popen([PROGRAM, "train", "--out", out, "--data", corpus, *map(str, OPTIONS)],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
    process.stderr.readline()  # the first step is done
    process.send_signal(how)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + how, errors
    assert "resume with --resume" in output
    end = metrics(out, "end")[-1]
    assert end["reason"] == "interrupted" and 0 < end["step"] < 60
    nsa("train", "--out", out, "--resume")
    same_bits(reference, out)


@pytest.mark.bits
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this process has one core")
def test_a_run_resumed_on_one_core_keeps_its_threads_and_bits(tmp_path, corpus):
    """Sums of torch depend on the number of threads, which config.json records."""
    cores, options = os.sched_getaffinity(0), ["--data", corpus, *OPTIONS, "--threads", 0]
    reference, out = tmp_path / "reference", tmp_path / "run"
    nsa("train", "--out", reference, *options)
    process = subprocess.Popen([PROGRAM, "train", "--out", out, *map(str, options)], stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    process.stderr.readline()  # the first step is done
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    threads = json.loads((out / "config.json").read_text())["train"]["threads"]
    os.sched_setaffinity(0, {min(cores)})
    try:
        nsa("train", "--out", out, "--resume")
    finally:
        os.sched_setaffinity(0, cores)
    assert json.loads((out / "config.json").read_text())["train"]["threads"] == threads
    same_bits(reference, out)
    assert "train.threads" in refused("train", "--out", out, "--resume", "--threads", threads + 1)


@pytest.mark.slow
@pytest.mark.bits
def test_old_run_resumes_without_newer_options(tmp_path, corpus):
    fan_in_256 = [16 if before == "--kernel-size" else option for before, option in pairwise(["", *TINY])]
    options = [*fan_in_256, "--data", corpus, "--steps", 200, "--phi-lr-scale", 1]
    nsa("train", "--out", tmp_path / "reference", *options)
    out = tmp_path / "run"
    process = subprocess.Popen([PROGRAM, "train", "--out", out, *map(str, options)], stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    process.stderr.readline()  # the first step is done
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 128 + signal.SIGINT
    config = json.loads((out / "config.json").read_text())
    assert config["train"].pop("phi_lr_scale") == 1
    assert config["train"].pop("selector_loss") == 0
    assert config["train"].pop("selector_queries") == 0
    assert config["train"].pop("context_warmup") == 0
    (out / "config.json").write_text(json.dumps(config))
    nsa("train", "--out", out, "--resume")
    same_bits(tmp_path / "reference", out)


@pytest.mark.bits
def test_resuming_a_finished_run_changes_nothing(tmp_path, uninterrupted):
    reference, _ = uninterrupted
    shutil.copytree(reference, tmp_path / "run")
    nsa("train", "--out", tmp_path / "run", "--resume")
    same_bits(reference, tmp_path / "run")


@pytest.mark.parametrize(
    ("option", "expected"),
    [(["--lr", 0.1], "train.lr"), (["--layers", 2], "model.num_layers"), (["--noise", 0], "train.noise"),
     (["--attention", "full"], "model.attention"), (["--held-out-percent", 50], "data.held_out_percent")],
)  # fmt: skip
def test_other_options_are_refused_by_name(uninterrupted, option, expected):
    assert expected in refused("train", "--out", uninterrupted[0], "--resume", *option)


@pytest.mark.slow
@pytest.mark.bits
def test_other_intervals_are_taken_over(tmp_path, corpus, uninterrupted):
    """How often a run logs, evaluates and saves changes what it tells, not what it learns."""
    out, options = tmp_path / "run", [*OPTIONS, "--log-every", 1]
    process = subprocess.Popen([PROGRAM, "train", "--out", out, "--data", corpus, *map(str, options)],
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)  # fmt: skip
    process.stderr.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    stopped = metrics(out, "end")[-1]["step"]
    before = (out / "config.json").read_text()
    assert "eval_every = -1: must be" in refused("train", "--out", out, "--resume", "--eval-every", -1)
    assert (out / "config.json").read_text() == before and stopped < 50
    nsa("train", "--out", out, "--resume", "--eval-every", 25, "--save-every", 0, "--log-every", 30)
    train = json.loads((out / "config.json").read_text())["train"]
    assert (train["eval_every"], train["save_every"], train["log_every"]) == (25, 0, 30)
    assert [line["step"] for line in metrics(out, "eval")][-2:] == [50, 60]
    assert [line["step"] for line in metrics(out, "train") if line["step"] > stopped] == [30, 60][stopped >= 30 :]
    assert all(np.array_equal(x, load_file(out / "model.safetensors")[name])
               for name, x in load_file(uninterrupted[0] / "model.safetensors").items())  # fmt: skip
    nsa("train", "--out", out, "--resume", "--save-every", 5)  # the checkpoint has another one


def test_equal_parameters_are_those_of_the_run(tmp_path, corpus):
    """--equal-parameters uses the run's own model, not this command line's defaults."""
    out = tmp_path / "run"
    nsa("train", "--out", out, "--data", corpus, *TINY, "--steps", 1, "--attention", "full", "--equal-parameters")
    nsa("train", "--out", out, "--resume", "--equal-parameters")
    assert "model.ffn_size" in refused("train", "--out", out, "--resume", "--equal-parameters", "--ffn-size", 500)
    nsa("train", "--out", out, "--data", corpus, *TINY, "--steps", 1, "--attention", "full", "--overwrite")
    assert "model.ffn_size" in refused("train", "--out", out, "--resume", "--equal-parameters")


def test_a_changed_config_is_refused_by_name(tmp_path, uninterrupted):
    shutil.copytree(uninterrupted[0], tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    config["train"]["lr"] *= 2
    path.write_text(json.dumps(config))
    assert "train.lr" in refused("train", "--out", tmp_path / "run", "--resume")


def test_a_run_is_opened_from_any_folder(tmp_path, corpus, monkeypatch):
    """It knows its data by their whole path, and takes a relative one for the same."""
    out = tmp_path / "run"
    monkeypatch.chdir(corpus.parent)
    nsa("train", "--out", out, "--data", corpus.name, "--steps", 1, *TINY)
    nsa("train", "--out", out, "--resume", "--data", corpus.name)
    monkeypatch.chdir(tmp_path)
    nsa("eval", out)
    nsa("train", "--out", out, "--resume")
    assert "data.paths" in refused("train", "--out", out, "--resume", "--data", corpus.name)


def test_missing_texts_are_named_with_extensions(tmp_path, corpus):
    message = refused("train", "--out", tmp_path / "run", "--data", corpus, "--extension", "py", "--steps", 1)
    assert f"no text found in {corpus} with the extensions py" in message


def test_changed_data_are_refused(tmp_path, corpus):
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    nsa("train", "--out", tmp_path / "run", "--data", data, *TINY, "--steps", 1)
    (data / "file03.py").write_text("changed")
    assert "fingerprint" in refused("train", "--out", tmp_path / "run", "--resume")


def test_there_must_be_something_to_resume(tmp_path):
    assert "config.json" in refused("train", "--out", tmp_path / "none", "--resume")
