"""Damaged and foreign checkpoints and configurations are refused with a message and exit code 2, or harmless."""

import json
import shutil
import struct
import subprocess

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from conftest import PROGRAM, open_checkpoint, refused

FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained["nsa"], tmp_path / "run")
    return tmp_path / "run"


def survives(run):
    """Exit code 0 or 2; neither a crash nor an internal error."""
    done = subprocess.run([PROGRAM, "generate", run, "--tokens", "1", "--prompt", "x"], capture_output=True, timeout=60)
    assert done.returncode in (0, 2), (done.returncode, done.stderr)
    if done.returncode == 2:
        assert done.stderr.startswith(b"nsa: ") and done.stderr.count(b"\n") <= 2, done.stderr


@FUZZ
@given(data=st.data())
def test_flipped_and_cut_checkpoints(run, trained, data):
    content = bytearray((trained["nsa"] / "model.safetensors").read_bytes())
    header = 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    (run / "model.safetensors").write_bytes(content)
    survives(run)


@FUZZ
@given(data=st.data())
def test_configurations_with_other_values(run, trained, data):
    config = json.loads((trained["nsa"] / "config.json").read_text())
    values = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5),
                       st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=3), st.none(), max_size=2),
                       st.integers(-3, 3))  # fmt: skip
    section = data.draw(st.sampled_from(["model", "train", "data", None]))
    target = config if section is None else config[section]
    key = data.draw(st.sampled_from(sorted(target)))
    if data.draw(st.booleans()):
        target[key] = data.draw(values)
    else:
        del target[key]
    (run / "config.json").write_text(json.dumps(config))
    survives(run)


@FUZZ
@given(text=st.binary(max_size=200))
def test_arbitrary_bytes(run, text):
    (run / "config.json").write_bytes(text)
    refused("generate", run)
    (run / "model.safetensors").write_bytes(text)
    refused("generate", run)


@pytest.mark.parametrize("share", [0, 0.001, 0.3, 0.999])
def test_a_truncated_checkpoint_is_called_so(run, share):
    content = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").write_bytes(content[: int(share * len(content))])
    assert "truncated" in refused("generate", run)


def test_a_truncated_checkpoint_cannot_be_resumed(run):
    optimizer = next(run.glob("optimizer-*"))
    optimizer.write_bytes(optimizer.read_bytes()[:-1])
    assert "truncated" in refused("train", "--out", run, "--resume")


def test_a_foreign_checkpoint_is_called_so(run):
    save_file({"weight": np.zeros((2, 3), np.float32)}, run / "model.safetensors")
    assert "not a checkpoint of this program" in refused("generate", run)


@pytest.mark.parametrize(
    ("change", "expected"),
    [(lambda w: w.pop("norm.weight"), "tensor 'norm.weight' is missing"),
     (lambda w: w.update(extra=np.zeros(1, np.float32)), "tensor 'extra' is not in the configured model"),
     (lambda w: w.update({"norm.weight": np.zeros(31, np.float32)}), "tensor 'norm.weight' is F32 (31)"),
     (lambda w: w.update({"norm.weight": np.zeros(32, np.float64)}), "tensor 'norm.weight' is F64 (32)")],
)  # fmt: skip
def test_other_tensors_are_refused_by_name(run, change, expected):
    weights, metadata = open_checkpoint(run / "model.safetensors")
    change(weights)
    save_file(weights, run / "model.safetensors", metadata)
    assert expected in refused("generate", run)
