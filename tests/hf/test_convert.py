"""Dense models made sparse, in memory and folder by folder; runs of the program in transformers."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from models import (
    DECODERS,
    SMALL,
    convertible,
    dense,
    error,
    name_tied_head,
    padded,
    pictures,
    sparse,
    tokens,
    vision_language,
)
from nsa.convert import main
from nsa.hf import convert
from nsa.hf.conversion import compare_logits
from nsa.inspect import main as inspect

BOTH = pytest.mark.parametrize("name", ["llama", "qwen3"])
SIZES = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]


def only_selection(model):
    """Gates (0, 1, 0), exactly."""
    for layer in model.get_decoder().layers:
        if hasattr(layer.self_attn, "gate"):
            layer.self_attn.gate[2].bias.data = torch.tensor([-1e9, 1e9, -1e9]).repeat(8)
    return model


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("separate_kv", [False, True])
def test_with_the_selection_alone_a_short_text_gets_the_dense_logits(name, separate_kv, tmp_path):
    model = convertible(name, tie_word_embeddings=separate_kv, rope_parameters=YARN if separate_kv else LLAMA3)
    ids, mask = padded([tokens(64), tokens(50)], "left")  # n * l'
    labels = ids.masked_fill(mask.cumsum(1) <= 1, -100)
    more = {"output_router_logits": True, "labels": labels} if name == "qwen3_moe" else {}
    with torch.no_grad():
        converted = only_selection(convert(model, nsa=SMALL, separate_kv=separate_kv, dense_layers=[1]))
        converted.save_pretrained(tmp_path)
        converted = AutoModelForCausalLM.from_pretrained(tmp_path)
        given, expected = (one(ids, attention_mask=mask, **more) for one in (converted, model))
        assert error(given.logits[mask.bool()], expected.logits[mask.bool()]) < 1e-5
        if more:
            assert len(given.router_logits) == 1 and error(given.aux_loss, expected.aux_loss) < 1e-5
            assert error(given.loss, expected.loss) < 1e-5
        generated = [one.generate(ids[:1, :40], max_new_tokens=16, do_sample=False) for one in (converted, model)]
    assert torch.equal(*generated)
    assert type(model).__name__ == type(converted).__name__.removeprefix("Nsa")


@pytest.mark.parametrize("separate_kv", [False, True])
def test_with_the_selection_alone_a_short_text_with_an_image_gets_the_dense_logits(separate_kv, tmp_path, capsys):
    model = vision_language()
    model.save_pretrained(tmp_path / "dense", max_shard_size="60kB")
    options = ["--dense-layers", "1", "--lengths", "20", *(["--separate-kv"] if separate_kv else [])]
    assert main([str(tmp_path / "dense"), str(tmp_path / "sparse"), *SIZES, *options]) == 0
    converted = AutoModelForImageTextToText.from_pretrained(tmp_path / "sparse")
    expected = convert(model, nsa=SMALL, separate_kv=separate_kv, dense_layers=[1]).state_dict()
    assert converted.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in converted.state_dict().items())
    inputs = pictures((5, 4, 6, 9), (11, 2, 2, 20))
    mask = inputs["attention_mask"].bool()
    with torch.no_grad():
        given, expected = (one(**inputs).logits[mask] for one in (only_selection(converted), model))
        generated = [one.generate(**inputs, max_new_tokens=20, do_sample=False) for one in (converted, model)]
    assert error(given, expected) < 1e-5
    assert torch.equal(*generated)


@pytest.mark.parametrize("name", [name for name in DECODERS if name != "llama"])
def test_a_sliding_window_is_refused(name):
    message = r"^sliding_window = 16: must be None"
    switch = "" if name == "mistral" else r" \(use_sliding_window = False\)"
    with pytest.raises(ValueError, match=f"{message}{switch}$"):
        convert(dense(name, sliding_window=16, **({"use_sliding_window": True} if switch else {})))


@BOTH
def test_as_converted_a_short_text_is_almost_the_dense_models(name):
    model = dense(name)
    converted = convert(model, nsa={**SMALL, "window_size": 64})
    with torch.no_grad():
        short, long = (
            compare_logits(model(ids).logits, converted(ids).logits) for ids in (tokens(2, 64), tokens(2, 500))
        )
    assert short["kl"] <= 1e-3
    assert short["top1"] > 0.95
    assert long["kl"] > 100 * short["kl"]  # which is why a converted model has to be trained


@BOTH
def test_presets(name, tmp_path):
    model = dense(name)
    model.save_pretrained(tmp_path / "dense")
    for preset, (kernel, topk, phi) in {"recipe": (8, 32, "mlp"), "paper": (32, 16, "mean")}.items():
        config = convert(model, preset=preset, nsa={"window_size": 64}).config
        options = ["--preset", preset, "--window-size", "64", "--lengths", "0"]
        assert main([str(tmp_path / "dense"), str(tmp_path / preset), *options]) == 0
        saved = json.loads((tmp_path / preset / "config.json").read_text())
        assert saved["nsa"] == config.nsa
        chosen = [config.nsa[field] for field in ("kernel_size", "topk", "phi", "window_size", "share_kv")]
        assert chosen == [kernel, topk, phi, 64, True]
        assert config.rope_parameters == model.config.rope_parameters
    assert convert(model, preset="recipe", phi="mean").config.nsa["phi"] == "mean"
    with pytest.raises(ValueError, match=r"^preset = 'best': must be recipe or paper$"):
        convert(model, preset="best")


@pytest.mark.bits
@BOTH
@pytest.mark.parametrize("phi", ["mean", "linear", "mlp"])
def test_separate_equals_shared_in_bits(name, phi):
    model = dense(name)
    ids = tokens(2, 200)
    options = {"nsa": SMALL, "phi": phi, "dense_layers": [1]}
    with torch.no_grad():
        shared, separate = (convert(model, **options, separate_kv=s)(ids).logits for s in (False, True))
        assert torch.equal(shared, separate)


@BOTH
def test_training_a_converted_model_lowers_the_loss(name):
    model = convert(dense(name), nsa=SMALL, separate_kv=True, phi="mlp").train()
    ids = tokens(2, 150)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(50):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.bits
@pytest.mark.parametrize("name", DECODERS)
def test_a_folder_becomes_what_convert_makes(name, tmp_path, capsys):
    src, out = tmp_path / "src", tmp_path / "out"
    tied, dtype = name in ("mistral", "qwen3"), torch.bfloat16 if name in ("qwen2", "qwen3") else torch.float32
    model = convertible(name, tie_word_embeddings=tied).to(dtype)
    model.save_pretrained(src, max_shard_size="60kB")
    model = AutoModelForCausalLM.from_pretrained(src)  # with the rotation as it is loaded
    (src / "tokenizer.json").write_text("{}")
    before = {file.name: file.read_bytes() for file in src.iterdir()}
    assert main([str(src), str(out), *SIZES, "--dense-layers", "1", "--separate-kv", "--lengths", "50,200"]) == 0
    assert {file.name: file.read_bytes() for file in src.iterdir()} == before
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{out}: written"
    assert [line.split()[:3] for line in printed[1:]] == [["50", "random", "tokens:"], ["200", "random", "tokens:"]]
    assert len(list(out.glob("model-*.safetensors"))) == len(list(src.glob("model-*.safetensors"))) > 1
    assert (out / "tokenizer.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(out)
    expected = convert(model, nsa=SMALL, separate_kv=True, dense_layers=[1])
    assert type(loaded) is type(expected) and loaded.dtype == dtype
    assert loaded.config.nsa == expected.config.nsa and loaded.config.dense_layers == [1]
    ids = tokens(1, 150)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, expected(ids).logits)


def test_half_precision_is_compared_and_drawn_on_a_cpu(tmp_path, capsys):
    convertible("llama").half().save_pretrained(tmp_path / "src")
    assert main([str(tmp_path / "src"), str(tmp_path / "out"), *SIZES, "--lengths", "50"]) == 0
    assert "     50 random tokens: " in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float16
    (tmp_path / "ids").write_text("1 2 3")
    pytest.importorskip("matplotlib")
    assert inspect([str(tmp_path / "out"), "--ids", str(tmp_path / "ids"), "--out", str(tmp_path / "a.png")]) == 0


def test_a_tied_head_that_the_index_names(tmp_path, capsys):
    model = dense("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "src", max_shard_size="60kB")
    name_tied_head(tmp_path / "src")
    assert main([str(tmp_path / "src"), str(tmp_path / "out"), *SIZES, "--lengths", "50"]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]


def refused(capsys, *arguments):
    assert main([*map(str, arguments)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0].removeprefix("error: ")


def test_what_cannot_be_converted_is_named_in_one_line(tmp_path, capsys):
    src, out = tmp_path / "src", tmp_path / "out"
    dense("llama").save_pretrained(src)
    weights, config = load_file(src / "model.safetensors"), json.loads((src / "config.json").read_text())

    def message(tensors=None, **changes):
        save_file(weights if tensors is None else tensors, src / "model.safetensors", metadata={"format": "pt"})
        (src / "config.json").write_text(json.dumps({**config, **changes}))
        text = refused(capsys, src, out, *SIZES)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]  # nothing appeared, nothing was left
        return text

    key = "model.layers.1.mlp.up_proj.weight"
    assert message(architectures=["BertModel"]).startswith(f"{src}: architecture = BertModel: must be LlamaFor")
    assert "head_dim = 12: must be a multiple of 8" in message(head_dim=12)
    assert message(attention_dropout=0.1) == "attention_dropout = 0.1: must be 0"
    assert message(quantization_config={"quant_method": "fp8"}) == f"{src}: quantization_config: must be absent"
    assert "hidden_size" in message(hidden_size="64")
    assert message({n: t for n, t in weights.items() if n != key}) == f"{src}: {key}: missing"
    assert message({**weights, "more": torch.ones(1)}) == f"{src}: more: not a tensor of the architecture"
    assert message({**weights, key: torch.ones(3, 4)}) == f"{src}: {key}: (3, 4): must be (96, 64)"
    assert "dense_layers: 2: must be 0 ... 1" in refused(capsys, src, out, *SIZES, "--dense-layers=2")
    assert "topk = 0: must be >= 1" in refused(capsys, src, out, *SIZES, "--topk=0")
    (src / "model.safetensors").write_bytes(b"\0" * 5)
    assert refused(capsys, src, out, *SIZES).startswith(f"{src / 'model.safetensors'}: ")
    (src / "model.safetensors").unlink()
    assert refused(capsys, src, out).startswith(f"{src}: no model.safetensors and no model.safetensors.index.json")
    out.mkdir()
    save_file(weights, src / "model.safetensors", metadata={"format": "pt"})
    (src / "config.json").write_text(json.dumps(config))
    assert refused(capsys, src, out) == f"{out}: exists: must be a new folder"
    assert refused(capsys, tmp_path / "none", out).startswith(f"{tmp_path / 'none' / 'config.json'}: No such file")


def test_a_folder_that_fails_halfway_does_not_appear(tmp_path, monkeypatch):
    import nsa.convert

    dense("llama").save_pretrained(tmp_path / "src", max_shard_size="60kB")
    written = []

    def save(*arguments, **options):
        written.append(arguments)
        if len(written) == 3:
            raise OSError("No space left on device")
        save_file(*arguments, **options)

    monkeypatch.setattr(nsa.convert, "save_file", save)
    assert main([str(tmp_path / "src"), str(tmp_path / "out"), *SIZES]) == 1
    assert len(written) == 3 and [p.name for p in tmp_path.iterdir()] == ["src"]


def test_models_that_cannot_be_converted_in_memory():
    with pytest.raises(ValueError, match=r"^architecture = MiniMaxM3VLForCausalLM: must be LlamaForCausalLM or "):
        convert(dense("minimax"))
    with pytest.raises(ValueError, match=r"^architecture = NsaLlamaForCausalLM: must be"):
        convert(sparse("llama"))
    model = dense("llama")
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match=r"^quantization_config: must be absent"):
        convert(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nsa": []}, "nsa: list: must be a dict or None"),
        ({"nsa": {"share_kv": True}}, "nsa: share_kv = True: must be given as the argument separate_kv"),
        ({"nsa": {"phi": "mlp"}}, "nsa: phi = 'mlp': must be given as the argument phi"),
        ({"separate_kv": 1}, "separate_kv: int: must be "),
        ({"dense_layers": 0}, "dense_layers: int: must be a sequence of integers"),
        ({"dense_layers": "01"}, "dense_layers: str: must be a sequence of integers"),
        ({"dense_layers": [0.5]}, "dense_layers[0]: float: must be an integer"),
        ({"phi": ["mlp"]}, "nsa: phi = ['mlp']: must be of type str"),
        ({"seed": 0.5}, "seed: float: must be an integer"),
        ({"seed": 2**70}, "seed = 1180591620717411303424: must be above -2^32 and below 2^32"),
    ],
)
def test_options_that_a_conversion_does_not_take(options, message):
    with pytest.raises((TypeError, ValueError)) as raised:
        convert(dense("llama"), **options)
    assert str(raised.value).startswith(message)


def test_weights_that_a_conversion_does_not_take():
    with pytest.raises(TypeError, match=r"^model: str: must be "):
        convert("llama")
    for name, module in (("q_proj", torch.nn.Identity()), ("more", torch.nn.Linear(2, 2)), ("k_proj", SixteenBits())):
        model = dense("llama")
        setattr(model.model.layers[1].self_attn, name, module)
        with pytest.raises(ValueError, match=rf"^model: model.layers.1.self_attn.{name}.weight: "):
            convert(model)
    with torch.device("meta"), pytest.raises(ValueError, match=r"^model: model.embed_tokens.weight: on meta, as off"):
        convert(dense("llama"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weight: weight.to(torch.int8), "dtype int8: must be float32, bfloat16, float16 or float64"),
        (lambda weight: weight > 0, "dtype bool: must be float32"),
        (lambda weight: weight.to(torch.complex64), "dtype complex64: must be float32"),
        (lambda weight: weight.to(torch.float8_e4m3fn), "dtype float8_e4m3fn: must be float32"),
        (lambda weight: weight * torch.inf, "holds values that are not finite"),
    ],
)
def test_values_that_a_conversion_does_not_take(change, message):
    model = dense("llama")
    projection = model.model.layers[0].mlp.up_proj
    projection.weight = torch.nn.Parameter(change(projection.weight.detach()), requires_grad=False)
    with pytest.raises(ValueError, match=f"^model: model.layers.0.mlp.up_proj.weight: {message}"):
        convert(model)


class SixteenBits(torch.nn.Module):
    """With a weight of a tensor subclass, as torchao's."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(32, 64).as_subclass(type("Packed", (torch.Tensor,), {})))


def test_weights_keep_their_types_and_a_head_of_its_own():
    model = dense("llama", tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.bfloat16().model.norm.float()
    converted = convert(model, nsa=SMALL)
    assert not converted.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        given = converted.get_parameter(name)
        assert given.dtype == tensor.dtype and torch.equal(given, tensor), name


@pytest.mark.parametrize("option", ["--dense-layers=-1", "--dense-layers=0,x", "--lengths=2,-1", "--lengths=1,"])
def test_options_that_are_no_numbers(capsys, option):
    with pytest.raises(SystemExit) as ended:
        main(["src", "out", option])
    name, _, text = option.partition("=")
    message = f"argument {name}: {text}: must be numbers >= 0 with commas between them"
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_as_a_program(tmp_path):
    dense("llama").save_pretrained(tmp_path / "src")
    command = [sys.executable, "-m", "nsa.convert", str(tmp_path / "src"), str(tmp_path / "out"), "--lengths=0"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.splitlines()[-1] == f"{tmp_path / 'out'}: written"


def test_damaged_folders_are_refused_in_one_line_or_converted(tmp_path, capsys):
    """Bytes changed in what is parsed: no traceback, no half of a folder, and weights of the right shapes."""
    src, out = tmp_path / "src", tmp_path / "out"
    dense("llama").save_pretrained(src, max_shard_size="60kB")
    files = {file: file.read_bytes() for file in sorted(src.glob("*")) if file.name != "generation_config.json"}
    draw, outcomes = random.Random(12), []
    for _ in range(300):
        file = draw.choice(list(files))
        content = bytearray(files[file])
        parsed = len(content) if file.suffix == ".json" else 8 + int.from_bytes(content[:8], "little")
        for _ in range(draw.choice([1, 1, 4])):
            content[draw.randrange(parsed)] = draw.choice(b'0123456789{}[]",:xnt\0\xff')
        if draw.random() < 0.1:
            content = content[: draw.randrange(len(content))]
        file.write_bytes(bytes(content))
        code = main([str(src), str(out), *SIZES, "--lengths=0"])
        outcomes.append(code)
        errors = capsys.readouterr().err.splitlines()
        left = sorted(p.name for p in tmp_path.iterdir())
        if code:
            assert code == 2 and len(errors) == 1 and errors[0].startswith("error: ") and left == ["src"], errors
        else:
            assert left == ["out", "src"]
            shutil.rmtree(out)
        file.write_bytes(files[file])
    assert outcomes.count(2) > 50 and outcomes.count(0) > 5
