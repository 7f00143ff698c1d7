"""Damaged and foreign checkpoints and configurations are refused with a message and exit code 2, or harmless."""

import json
import math
import shutil
import struct
import subprocess

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from conftest import PROGRAM, TINY, nsa, open_checkpoint, refused

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


DEEP = [("[" * 100_000, "]" * 100_000), ("[" * 1_000_000, ""), ('{"a":' * 100_000, "0" + "}" * 100_000)]


@pytest.mark.parametrize("brackets", DEEP, ids=["lists", "open", "objects"])
@pytest.mark.parametrize("field", [None, "model", "vocab_size"])
def test_deep_nesting_is_refused(run, brackets, field):
    nested = "1".join(brackets)
    text = (run / "config.json").read_text()
    if field is not None:
        nested = text.replace(f'"{field}":', f'"{field}": {nested}, "x":')
    (run / "config.json").write_text(nested)
    message = refused("generate", run)
    assert "nested deeper than 64 levels" in message and message.count("\n") == 1


def test_deep_nesting_in_a_checkpoint_is_refused(run):
    header = b'{"__metadata__":' + b"[" * 1_000_000
    (run / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert "nested deeper than 64 levels" in refused("generate", run)


def test_deep_nesting_in_peers_is_refused(tmp_path):
    (tmp_path / "peers.json").write_text("[" * 100_000)
    assert "nested deeper than 64 levels" in refused("bench", "--lengths", 64, "--peers", tmp_path / "peers.json")


def test_fields_given_twice_are_refused(run):
    text = (run / "config.json").read_text()
    (run / "config.json").write_text(text.replace('"norm_eps":', '"norm_eps": 1, "norm_eps":'))
    assert "field 'norm_eps' is there twice" in refused("generate", run)


def test_metrics_that_are_damaged_are_cut(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step":"x"}\n' + "[" * 100_000 + '\n{"step":1e999}\nnull\n{"step":1,"kind":[]}\n\xff\n')
    nsa("train", "--out", run, "--resume")


@pytest.fixture(scope="module")
def dumps(corpus, tmp_path_factory):
    """A dump of each operation of a training step and of a generation."""
    folder = tmp_path_factory.mktemp("dumps")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSA_DUMP", str(folder))
        nsa("train", "--out", folder.parent / "dumped", "--data", corpus, "--steps", 1, *TINY)
        nsa("generate", folder.parent / "dumped", "--prompt", "def value(self): return", "--tokens", 2)
    return {path.stem.split("-", 2)[2]: path for path in sorted(folder.iterdir())}


def damaged(dump, path, change):
    """Writes the dump with its header changed by change(header)."""
    content = dump.read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:end])
    change(header)
    data = b""
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        size = math.prod(entry["shape"]) * {"F32": 4, "I32": 4}[entry["dtype"]]
        entry["data_offsets"] = [len(data), len(data) + size]
        data += bytes(size)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


OPERATIONS = ["native_sparse_attention", "native_sparse_attention_backward", "prefill", "decode"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_damaged_dumps_are_refused(dumps, tmp_path, operation):
    dump = dumps[operation]
    path = tmp_path / "damaged.safetensors"
    for name in ["q", "v_slc", "gates", "cache.k_c" if operation in ("prefill", "decode") else "k_cmp"]:
        for rank in (0, 1, 2, 5, 6, 9, 40, 1000):
            shape = [1] * rank
            message = refused("debug", "compare", damaged(dump, path, lambda h, n=name, s=shape: h[n].update(shape=s)))
            assert name in message and len(message) < 500, message
        message = refused("debug", "compare", damaged(dump, path, lambda h, n=name: h.pop(n)))
        assert name in message
    for field, value in [("kernel_stride", "0"), ("kernel_stride", "-4"), ("topk", "-1"), ("topk", "2147483647"),
                         ("topk", str(2**70)), ("kernel_size", "0"), ("block_size", "-16"), ("window_size", "0"),
                         ("window_size", "x"), ("kernel_size", None)]:  # fmt: skip

        def change(header, field=field, value=value):
            scalars = header["__metadata__"]
            scalars.pop(field) if value is None else scalars.update({field: value})

        message = refused("debug", "compare", damaged(dump, path, change))
        assert field in message or "output 'indices'" in message, message
    message = refused("debug", "compare", damaged(dump, path, lambda h: h["q"].update(shape=[0, 2**40, 2**40])))
    assert "'q' has a size of" in message
    assert "q" in refused("debug", "compare", damaged(dump, path, lambda h: h["q"].update(dtype="I32")))
