"""The run folder: one writer, foreign files untouched, checkpoints that are refused when they are not what they say."""

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from conftest import PROGRAM, TINY, metrics, nsa, open_checkpoint, refused


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and not path.is_symlink()}


def failed(*arguments):
    """The one-line message of a failure that is not the user's; exit code 1."""
    message = nsa(*arguments, code=1).stderr.decode().splitlines()[-1]
    assert message.startswith("nsa: ") and "internal error" not in message, message
    return message


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained["nsa"], tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def start(corpus):
    """Starts a training that runs until it is stopped; returns when its first checkpoint is there."""
    processes = []

    def begin(out, *options):
        command = [PROGRAM, "train", "--out", out, "--data", corpus, *TINY, "--minutes", 5, "--save-every", 1, *options]
        processes.append(subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        while not (out / "model.safetensors").exists():
            assert processes[-1].poll() is None, processes[-1].communicate()
            time.sleep(0.01)
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("options", [["--resume"], ["--overwrite"], []])
def test_second_trainer_is_refused_and_names_the_first(tmp_path, corpus, start, options):
    first = start(tmp_path / "run")
    data = [] if options == ["--resume"] else ["--data", corpus, *TINY, "--steps", 1]
    message = refused("train", "--out", tmp_path / "run", *data, *options)
    assert f"is being trained in by process {first.pid} on {os.uname().nodename} since " in message
    assert message.count("\n") == 1 and first.poll() is None
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    steps = [line["step"] for line in metrics(tmp_path / "run", "train")]
    assert steps == sorted(set(steps))
    assert not (tmp_path / "run" / ".nsa-lock").exists()


def test_the_lock_dies_with_its_process(tmp_path, start):
    first = start(tmp_path / "run")
    first.kill()
    first.communicate()
    assert (tmp_path / "run" / ".nsa-lock").exists()
    second = subprocess.Popen([PROGRAM, "train", "--out", tmp_path / "run", "--resume"], stderr=subprocess.PIPE)
    second.stderr.readline()  # the first step is done
    second.send_signal(signal.SIGINT)
    second.communicate(timeout=60)
    assert second.returncode == 128 + signal.SIGINT


def test_a_lock_held_by_somebody_who_wrote_nothing(run):
    with open(run / ".nsa-lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "a process that has just begun" in refused("train", "--out", run, "--resume")


def test_a_start_that_fails_leaves_no_folder(tmp_path):
    refused("train", "--out", tmp_path / "run", "--data", tmp_path / "nowhere")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
@pytest.mark.parametrize(
    "names", [["model.safetensors"], ["metrics.jsonl"], ["notes.txt"], ["config.json"], ["optimizer-3.safetensors"]]
)
def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path, corpus, names, options):
    for name in names:
        (tmp_path / name).write_text('{"model_type": "other"}')
    before = content(tmp_path)
    assert names[0] in refused("train", "--out", tmp_path, "--data", corpus, *TINY, "--steps", 1, *options)
    assert content(tmp_path) == before


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_a_run_without_its_configuration_is_left_alone(run, corpus, options):
    (run / "config.json").rename(run.parent / "config.json")
    before = content(run)
    refused("train", "--out", run, "--data", corpus, *TINY, "--steps", 1, *options)
    assert content(run) == before


def test_another_programs_weights_in_a_run_are_left_alone(run, corpus):
    save_file({"weight": np.zeros(3, np.float32)}, run / "model.safetensors")
    before = content(run)
    for arguments in (["--overwrite", "--data", corpus, *TINY, "--steps", 1], ["--resume"]):
        assert "not a checkpoint of this program" in refused("train", "--out", run, *arguments)
    assert content(run) == before


def test_a_training_touches_only_its_own_files(tmp_path, corpus):
    out, victim = tmp_path / "run", tmp_path / "victim"
    nsa("train", "--out", out, "--data", corpus, *TINY, "--steps", 2)
    victim.write_text("mine")
    own = ["notes.tmp", "model.safetensors.tmp", "optimizer-notes.txt", "optimizer-007.safetensors", ".nsa-x.tmp"]
    for name in own:
        (out / name).write_text("mine")
    for name in ("optimizer-5.safetensors", ".nsa-model.safetensors.1.tmp", "optimizer-folder"):
        (out / name).mkdir()
    (out / "optimizer-6.safetensors").symlink_to(victim)
    (out / "optimizer-1.safetensors").write_text("left by a kill")
    (out / ".nsa-model.safetensors.77.tmp").write_text("left by a kill")
    nsa("train", "--out", out, "--resume")
    nsa("train", "--out", out, "--data", corpus, *TINY, "--steps", 3, "--save-every", 1, "--overwrite")
    assert all((out / name).read_text() == "mine" for name in own) and victim.read_text() == "mine"
    assert (out / "optimizer-5.safetensors").is_dir() and (out / "optimizer-6.safetensors").is_symlink()
    assert not (out / "optimizer-1.safetensors").exists() and not (out / ".nsa-model.safetensors.77.tmp").exists()


def test_a_link_at_the_temporary_name_is_not_followed(run):
    """exec keeps the process id, so the name that this process takes first is known."""
    victim = run.parent / "victim"
    victim.write_text("mine")
    script = f"ln -s {victim} {run}/.nsa-metrics.jsonl.$$.tmp; exec {PROGRAM} train --out {run} --resume"
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 10')  # truncated: the resume rewrites it
    subprocess.run(["sh", "-c", script], check=True, capture_output=True)
    assert victim.read_text() == "mine"
    assert all(json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())


def test_overwrite_keeps_the_old_run_until_the_new_one_can_begin(run, corpus, tmp_path):
    before = content(run)
    refused("train", "--out", run, "--overwrite", "--data", tmp_path / "nowhere", *TINY, "--steps", 1)
    odd = os.fsencode(tmp_path) + b"/\xff.py"
    shutil.copy(corpus / "file00.py", odd)
    done = subprocess.run([PROGRAM, "train", "--out", run, "--overwrite", "--data", odd, "--threads", "2", *TINY,
                           "--steps", "1"], capture_output=True)  # fmt: skip
    assert done.returncode == 2 and b"not UTF-8" in done.stderr, done.stderr
    assert content(run) == before


def test_lost_checkpoint_is_not_overwritten(run):
    (run / "model.safetensors").unlink()
    before = content(run)
    message = refused("train", "--out", run, "--resume")
    assert "model.safetensors: missing" in message and "--overwrite" in message
    (run / "metrics.jsonl").unlink()
    assert "optimizer-24.safetensors exists" in refused("train", "--out", run, "--resume")
    assert before.keys() - content(run).keys() == {"metrics.jsonl"}


def test_a_run_killed_before_its_first_checkpoint_begins(run, trained):
    for path in run.iterdir():
        if path.name != "config.json":
            path.unlink()
    (run / "optimizer-0.safetensors").write_bytes(b"whole or not: nothing names it")
    nsa("train", "--out", run, "--resume")
    before, after = (load_file(folder / "model.safetensors") for folder in (trained["nsa"], run))
    assert all((before[name] == after[name]).all() for name in before)


MODEL_CHANGES = {
    "rope_theta": 5000.0, "norm_eps": 0.1, "topk": 5, "window_size": 16, "block_size": 32, "kernel_stride": 8,
    "init_blocks": 0, "local_blocks": 1, "attention": "full", "phi": "mean", "num_heads": 1, "share_kv": True,
    "partial_rotary_factor": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "field"),
    [("eval", "topk"), ("inspect", "topk"), ("needle", "topk"), *(("generate", field) for field in MODEL_CHANGES)],
)
def test_a_configuration_of_another_model_is_refused_by_name(run, command, field):
    config = json.loads((run / "config.json").read_text())
    config["model"][field] = MODEL_CHANGES[field]
    (run / "config.json").write_text(json.dumps(config))
    message = refused(command, run)
    assert f"config.json: model.{field} = " in message and "were trained with" in message and "--set" in message


@pytest.mark.parametrize("command", [["generate", "--tokens", 1], ["eval"], ["inspect"], ["needle", "--lengths", 64]])
def test_a_deliberate_change_is_made_and_said(run, tmp_path, command):
    out = tmp_path / "out.json"
    done = nsa(command[0], run, *command[1:], "--set", "topk=3", "--set", "window_size=20", "--json", out)
    assert "note: topk = 3 by --set, trained with 4" in done.text
    assert "note: window_size = 20 by --set, trained with 32" in done.text
    assert json.loads(out.read_text())["set"] == ["topk=3", "window_size=20"]


@pytest.mark.bits
def test_a_deliberate_change_changes_the_result(run, tmp_path):
    losses = []
    for options in ([], ["--set", "topk=4"], ["--set", "rope_theta=100"]):
        nsa("eval", run, "--json", tmp_path / "out.json", *options)
        losses.append(json.loads((tmp_path / "out.json").read_text())["loss"])
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize(
    ("change", "expected"),
    [("topk=2", "topk = 2"), ("topk", "topk"), ("tokens=3", "FIELD one of"), ("topk=x", "topk"), ("=", "FIELD one of"),
     ("partial_rotary_factor=1.5", "partial_rotary_factor = 1.5: must be 0 ... 1"),
     ("rope_theta=inf", "rope_theta"), ("hidden_size=64", "tensor"), ("attention=none", "attention = 'none'")],
)  # fmt: skip
def test_changes_are_checked(run, change, expected):
    assert expected in refused("generate", run, "--set", change)


@pytest.mark.parametrize("option", [["--rope-theta", "inf"], ["--norm-eps", "inf"], ["--rope-theta", "nan"]])
def test_what_config_json_cannot_hold_is_refused(tmp_path, corpus, option):
    message = refused("train", "--out", tmp_path / "run", "--data", corpus, *TINY, *option)
    assert f"{option[0]}: {option[1]}: must be a finite number" in message


@pytest.mark.parametrize("threads", [100000, -1, 2**32])
@pytest.mark.parametrize("command", ["train", "eval", "bench"])
def test_threads_have_a_bound(run, command, threads):
    where = {"train": ["--out", run, "--overwrite"], "eval": [run], "bench": []}[command]
    message = refused(command, *where, "--threads", threads)
    assert "threads" in message and str(threads) in message
    assert "1024" in message or threads == 2**32


def change_state(run, **fields):
    weights, metadata = open_checkpoint(run / "model.safetensors")
    metadata["state"] = json.dumps(json.loads(metadata["state"]) | fields)
    save_file(weights, run / "model.safetensors", metadata)


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", 2**62), ("step", 2**63 - 1), ("step", -1), ("step", 25), ("planned_steps", 25), ("planned_steps", 0),
     ("tokens", -1), ("tokens", 2**62), ("seconds", -1e308), ("seconds", -1), ("loss_tokens", 2**62),
     ("logged_seconds", 1e300), ("flops", -1), ("step", 2**64)],
)  # fmt: skip
def test_a_state_that_cannot_be_is_refused_by_name(run, field, value):
    change_state(run, **{field: value})
    message = refused("train", "--out", run, "--resume")
    assert "model.safetensors: state: field" in message and f"'{field}'" in message


def test_steps_of_a_run_by_time_are_bounded(tmp_path, corpus, start):
    process = start(tmp_path / "run")
    process.send_signal(signal.SIGHUP)  # of a terminal that is gone: saves as SIGTERM does
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGHUP
    for step in (2**62, 2**63 - 1, 2**56):
        change_state(tmp_path / "run", step=step)
        assert "field 'step'" in refused("train", "--out", tmp_path / "run", "--resume")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGHUP])
def test_an_ignored_signal_stays_ignored(tmp_path, corpus, how):
    process = subprocess.Popen(
        [PROGRAM, "train", "--out", tmp_path / "run", "--data", corpus, *TINY, "--steps", "40"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=lambda: signal.signal(how, signal.SIG_IGN),
    )  # fmt: skip
    process.stderr.readline()  # the first step is done
    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode == 0 and metrics(tmp_path / "run", "end")[-1]["step"] == 40


def test_weights_that_are_not_finite_are_said_to_be(run):
    weights, metadata = open_checkpoint(run / "model.safetensors")
    weights["norm.weight"][3] = np.nan
    save_file(weights, run / "model.safetensors", metadata)
    for arguments in (["generate", run], ["eval", run], ["train", "--out", run, "--resume"]):
        assert "tensor 'norm.weight' holds values that are not finite" in refused(*arguments)


def test_logits_that_are_not_finite_are_said_to_be(run):
    weights, metadata = open_checkpoint(run / "model.safetensors")
    weights["norm.weight"][:] = 3e38
    save_file(weights, run / "model.safetensors", metadata)
    assert "are not finite" in failed("generate", run)
    assert "loss on held-out documents is not finite" in failed("eval", run)


def test_a_training_that_diverges_keeps_its_last_checkpoint(tmp_path, corpus):
    out = tmp_path / "run"
    arguments = ["--steps", 40, "--lr", 1e30, "--warmup-steps", 0, "--clip", 0, "--save-every", 1]
    message = failed("train", "--out", out, "--data", corpus, *TINY, *arguments)
    assert "not finite" in message
    assert all(np.isfinite(tensor).all() for tensor in load_file(out / "model.safetensors").values())


def test_an_optimizer_of_another_run_is_refused(trained, run):
    name = "optimizer-24.safetensors"
    shutil.copy(trained["full"] / name, run / name)
    assert "not what" in refused("train", "--out", run, "--resume")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer-24.safetensors"])
def test_a_flipped_bit_is_noticed(run, name):
    damaged = bytearray((run / name).read_bytes())
    damaged[-200] ^= 1
    (run / name).write_bytes(damaged)
    assert f"{name}: damaged" in refused("train", "--out", run, "--resume")


def test_checkpoints_from_before_the_checksums_are_resumed(run):
    """They have the configuration, and neither checksum."""
    for name in ("model.safetensors", "optimizer-24.safetensors"):
        tensors, metadata = open_checkpoint(run / name)
        metadata.pop("optimizer_checksum", None)
        save_file(tensors, run / name, metadata)
    (run / "model.safetensors.tmp").write_bytes(b"left by an older version")
    nsa("train", "--out", run, "--resume")
    nsa("generate", run, "--tokens", 1)


def test_metrics_with_a_damaged_line_are_resumed(run):
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": "x"}\n[]\n{"kind": 3, "step": 2}\n{"ki')
    nsa("train", "--out", run, "--resume")
    assert all(isinstance(json.loads(line)["step"], int) for line in (run / "metrics.jsonl").read_text().splitlines())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_what_is_no_file_is_refused(run, name, kind):
    (run / name).unlink()
    (os.mkfifo if kind == "fifo" else os.mkdir)(run / name)
    for arguments in (["generate", run], ["train", "--out", run, "--resume"]):
        assert f"{name}: not a regular file" in refused(*arguments)


def test_folders_that_cannot_be_are_refused(tmp_path, corpus):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / ("x" * 300), tmp_path / "file" / "run", tmp_path / "file"):
        refused("train", "--out", out, "--data", corpus, *TINY, "--steps", 1)
    refused("train", "--out", tmp_path / "run", "--data", "x" * 300, *TINY, "--steps", 1)
    assert not (tmp_path / "run").exists()


def test_a_write_that_fails_is_one_line_and_leaves_the_checkpoint(tmp_path, corpus, start):
    out = tmp_path / "run"
    first = start(out)
    first.kill()
    first.communicate()

    def small_files():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = subprocess.run([PROGRAM, "train", "--out", out, "--resume"], capture_output=True, preexec_fn=small_files)
    lines = done.stderr.decode().splitlines()
    assert done.returncode == 1 and lines[-1].endswith(".tmp: cannot write: File too large"), lines
    assert len([path for path in out.iterdir() if path.name.startswith("optimizer-")]) == 1
    assert not [path for path in out.iterdir() if path.name.startswith(".nsa-")]
    nsa("generate", out, "--tokens", 1)
