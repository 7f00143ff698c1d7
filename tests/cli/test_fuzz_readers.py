"""Damaged and foreign checkpoints and configurations are refused with a message and exit code 2, or harmless."""

import json
import math
import shutil
import struct
import subprocess

import numpy as np
import pytest
from faults import ADVERSARIAL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from conftest import PROGRAM, TINY, nsa, open_checkpoint, refused

# Each example is a process. tests/cpp/readers_test.cpp reads 500 damaged files of each kind in one.
FUZZ = settings(
    max_examples=600 if ADVERSARIAL else 24,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
FUZZ_LESS = settings(FUZZ, max_examples=FUZZ.max_examples // 2)


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained["nsa"], tmp_path / "run")
    return tmp_path / "run"


def survives(*arguments):
    """Exit code 0 or 2; neither a crash nor an internal error."""
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, timeout=60)
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
    survives("generate", run, "--tokens", 1, "--prompt", "x")


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
    survives("generate", run, "--tokens", 1, "--prompt", "x")


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
    assert "field 'norm_eps' is given twice" in refused("generate", run)


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
        for rank in (0, 1, 2, 5, 6, 9, 40, 1000) if name == "q" or ADVERSARIAL else (2, 9):
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


def rand(shape, dtype=np.float32):
    return np.random.default_rng(math.prod(shape)).standard_normal(shape).astype(dtype) * 0.1


PRETRAINED = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 40, "hidden_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 64, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}  # fmt: skip
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (40, 16), "lm_head.weight": (40, 16), "model.norm.weight": (16,),
    LAYER + "input_layernorm.weight": (16,), LAYER + "post_attention_layernorm.weight": (16,),
    LAYER + "self_attn.q_proj.weight": (16, 16), LAYER + "self_attn.k_proj.weight": (8, 16),
    LAYER + "self_attn.v_proj.weight": (8, 16), LAYER + "self_attn.o_proj.weight": (16, 16),
    LAYER + "self_attn.q_norm.weight": (8,), LAYER + "self_attn.k_norm.weight": (8,),
    LAYER + "mlp.gate_proj.weight": (24, 16), LAYER + "mlp.up_proj.weight": (24, 16),
    LAYER + "mlp.down_proj.weight": (16, 24),
}  # fmt: skip
INDEX, SHARDS = "model.safetensors.index.json", ["model-1-of-2.safetensors", "model-2-of-2.safetensors"]


@pytest.fixture
def pretrained(tmp_path):
    """A folder as transformers writes it, in two shards."""
    folder = tmp_path / "pretrained"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PRETRAINED))
    places = {name: SHARDS[i % 2] for i, name in enumerate(SHAPES)}
    for shard in SHARDS:
        save_file({name: rand(SHAPES[name]) for name, place in places.items() if place == shard}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    (tmp_path / "ids.txt").write_text("1 2 3\n")
    return folder


def of_pretrained(folder):
    return ("generate", folder, "--ids", folder.parent / "ids.txt", "--tokens", 1)


def without(*names):
    return {name: value for name, value in PRETRAINED.items() if name not in names}


def test_a_folder_of_transformers_is_read(pretrained):
    before = {file: file.read_bytes() for file in pretrained.iterdir()}
    nsa(*of_pretrained(pretrained))
    message = refused("generate", pretrained, "--prompt", "x")
    assert "no tokenizer" in message and "--ids" in message
    assert "--ids" in refused("eval", pretrained)
    assert "--tokenizer" in refused("train", "--init", pretrained, "--out", pretrained.parent / "run")
    assert "exclude" in refused("train", "--init", pretrained, "--layers", 3, "--out", pretrained.parent / "run")
    assert "exclude" in refused("train", "--init", pretrained, "--attention", "nsa", "--out", pretrained.parent / "run")
    (pretrained / "tokenizer.model").write_text("none")
    inside = ("train", "--init", pretrained, "--out", pretrained)
    assert "tokenizer" in refused(*inside)
    (pretrained / "tokenizer.model").unlink()
    assert {file: file.read_bytes() for file in pretrained.iterdir()} == before


@pytest.mark.parametrize("text", ["", "1 x", "1 40", "-1", "99999999999999999999", "1.5"])
def test_damaged_ids_are_refused(pretrained, text):
    (pretrained.parent / "ids.txt").write_text(text)
    assert "ids.txt" in refused(*of_pretrained(pretrained))


ROPE = PRETRAINED["rope_parameters"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [({**PRETRAINED, "architectures": ["MistralForCausalLM"]}, "architectures"),
     ({**PRETRAINED, "architectures": []}, "architectures"),
     ({**PRETRAINED, "architectures": 3}, "architectures"),
     (without("architectures"), "architectures"),
     (without("vocab_size"), "vocab_size"),
     ({**PRETRAINED, "head_dim": 12}, "head_dim = 12"),
     ({**PRETRAINED, "head_dim": 2**40}, "head_dim"),
     ({**PRETRAINED, "num_hidden_layers": 1024}, "describes a model of"),
     ({**PRETRAINED, "num_hidden_layers": 2}, "model.layers.1.input_layernorm.weight' is missing"),
     ({**PRETRAINED, "num_attention_heads": 0}, "num_heads = 0"),
     ({**PRETRAINED, "tie_word_embeddings": 1}, "tie_word_embeddings"),
     ({**PRETRAINED, "hidden_act": "gelu"}, "hidden_act"),
     ({**PRETRAINED, "attention_bias": True}, "attention_bias"),
     ({**PRETRAINED, "use_sliding_window": True}, "use_sliding_window"),
     ({**PRETRAINED, "layer_types": ["sliding_attention"]}, "layer_types"),
     ({**PRETRAINED, "quantization_config": {}}, "quantization_config"),
     ({**PRETRAINED, "rope_parameters": {**ROPE, "rope_type": "yarn", "beta_slow": 40}}, "rope_beta_fast = 32"),
     ({**PRETRAINED, "rope_parameters": {**ROPE, "rope_type": "yarn", "attention_factor": 0}}, "rope_attention_factor"),
     ({**PRETRAINED, "rope_parameters": {**ROPE, "rope_type": "yarn", "truncate": 1}}, "truncate"),
     ({**PRETRAINED, "rope_parameters": {**ROPE, "rope_type": "dynamic"}}, "rope_type = 'dynamic'"),
     ({**PRETRAINED, "rope_parameters": {**ROPE, "factor": None}}, "factor"),
     ({**PRETRAINED, "rope_parameters": {**ROPE, "factor": 0.5}}, "rope_factor = 0.5"),
     ({**PRETRAINED, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
     ({**PRETRAINED, "rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 2}},
      "partial_rotary_factor = 2: must be 0 ... 1"),
     ({**PRETRAINED, "rope_parameters": 7}, "rope_parameters"),
     ({**without("rope_parameters"), "rope_scaling": {"type": "longrope"}}, "rope_type = 'longrope'"),
     ({**PRETRAINED, "max_position_embeddings": 0}, "max_position_embeddings"),
     ({**PRETRAINED, "architectures": ["NsaQwen3ForCausalLM"], "nsa": {"topk": "4"}}, "topk"),
     ({**PRETRAINED, "architectures": ["NsaQwen3ForCausalLM"], "nsa": {"window": 4}}, "window"),
     *(({**PRETRAINED, "architectures": ["NsaQwen3ForCausalLM"], "dense_layers": layers}, "dense_layers")
       for layers in ([-1], [99], [1, 0], [0, 0], ["0"], [0.5], [2**31], {}, 3, True))],
)  # fmt: skip
def test_configurations_of_transformers_that_are_refused(pretrained, config, expected):
    (pretrained / "config.json").write_text(json.dumps(config))
    message = refused(*of_pretrained(pretrained))
    assert expected in message and str(pretrained) in message and message.count("\n") == 1, message


@pytest.mark.parametrize(
    "change",
    [lambda m: "x", lambda m: {}, lambda m: {"weight_map": 3},
     *(lambda m, file=file: {"weight_map": {**m, "lm_head.weight": file}}
       for file in ("../model-1-of-2.safetensors", "/etc/passwd", "config.json", "", 3, "a\x00.safetensors",
                    "none.safetensors", SHARDS[0]))],
)  # fmt: skip
def test_damaged_indices_are_refused(pretrained, change):
    places = json.loads((pretrained / INDEX).read_text())["weight_map"]
    (pretrained / INDEX).write_text(json.dumps(change(places)))
    message = refused(*of_pretrained(pretrained))
    assert str(pretrained) in message and message.count("\n") == 1, message


def test_shards_that_are_lost_cut_or_damaged_are_refused(pretrained):
    shard = pretrained / SHARDS[1]
    whole = shard.read_bytes()
    for content in (b"", whole[:100], whole[:-1], whole + b"x"):
        shard.write_bytes(content)
        assert SHARDS[1] in refused(*of_pretrained(pretrained))
    shard.unlink()
    assert SHARDS[1] in refused(*of_pretrained(pretrained))


@pytest.mark.parametrize(
    ("change", "expected"),
    [(lambda w: w.pop("lm_head.weight"), "lm_head.weight"),
     (lambda w: w.update(extra=rand((2,))), "extra"),
     (lambda w: w.update({"lm_head.weight": rand((40, 15))}), "lm_head.weight' is F32 (40, 15)"),
     (lambda w: w.update({"lm_head.weight": rand((40, 16), np.float64)}), "lm_head.weight' is F64 (40, 16)"),
     (lambda w: w.update({"lm_head.weight": rand((40, 16)).astype(np.int32)}), "lm_head.weight' is I32 (40, 16)")],
)  # fmt: skip
@pytest.mark.parametrize("single", [False, True])
def test_other_tensors_of_transformers_are_refused_by_name(pretrained, single, change, expected):
    weights = {name: rand(shape) for name, shape in SHAPES.items()}
    change(weights)
    places = {name: SHARDS[0] for name in weights if name != "extra" or single}
    if single:
        (pretrained / INDEX).unlink()
        save_file(weights, pretrained / "model.safetensors")
    else:
        save_file(weights, pretrained / SHARDS[0])
        (pretrained / INDEX).write_text(json.dumps({"weight_map": places}))
    message = refused(*of_pretrained(pretrained))
    assert expected in message and str(pretrained) in message and message.count("\n") == 1, message


def test_weights_that_are_not_finite_are_named(pretrained):
    save_file({**{n: rand(s) for n, s in SHAPES.items()}, "model.norm.weight": np.full(16, np.nan, np.float32)},
              pretrained / "model.safetensors")  # fmt: skip
    (pretrained / INDEX).unlink()
    assert "'model.norm.weight' holds values that are not finite" in refused(*of_pretrained(pretrained))


VALUES = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5),
                   st.lists(st.integers(), max_size=2), st.integers(-3, 3),
                   st.dictionaries(st.sampled_from([*ROPE, "type"]), st.integers(-3, 9), max_size=3))  # fmt: skip


@FUZZ_LESS
@given(data=st.data())
def test_configurations_of_transformers_with_other_values(pretrained, data):
    config = json.loads(json.dumps(PRETRAINED))
    target = config if data.draw(st.booleans()) else config["rope_parameters"]
    target[data.draw(st.sampled_from(sorted(target)))] = data.draw(VALUES)
    (pretrained / "config.json").write_text(json.dumps(config))
    survives(*of_pretrained(pretrained))


@FUZZ_LESS
@given(data=st.data())
def test_flipped_and_cut_files_of_transformers(pretrained, data):
    file = pretrained / data.draw(st.sampled_from(["config.json", INDEX, SHARDS[0]]))
    whole = file.read_bytes()
    content = bytearray(whole)
    header = 8 + struct.unpack("<Q", content[:8])[0] if file.name == SHARDS[0] else len(content)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    file.write_bytes(content)
    survives(*of_pretrained(pretrained))
    file.write_bytes(whole)
