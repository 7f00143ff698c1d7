"""A checkpoint of the program in Python: the same names, the same rotation and gates, the same next tokens."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import linear, rms_norm, silu

import nsa
from conftest import TINY_MODEL, TINY_RUN
from conftest import nsa as program

PROMPT = "def value(self): return self in None\n    import class for value in ( self )"
START = 256  # the token before a document


class Model:
    """The program's language model around nsa.NativeSparseAttention."""

    def __init__(self, run):
        config = json.loads((run / "config.json").read_text())["model"]
        self.weights, self.eps = load_file(run / "model.safetensors"), config["norm_eps"]
        names = ("kernel_size", "kernel_stride", "block_size", "topk", "init_blocks", "local_blocks", "window_size")
        self.layers = []
        for i in range(config["num_layers"]):
            layer = nsa.NativeSparseAttention(
                *(config[name] for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "v_head_dim")),
                nsa.NSAConfig(**{name: config[name] for name in names}),
                **{name: config[name] for name in ("share_kv", "phi", "phi_hidden", "phi_per_kv_head")},
                **{name: config[name] for name in ("rope_theta", "partial_rotary_factor")},
            )
            prefix = f"layers.{i}.attention."
            mine = {n.removeprefix(prefix): t for n, t in self.weights.items() if n.startswith(prefix)}
            layer.load_state_dict(mine, strict=True)
            self.layers.append(layer.eval())
        self.caches = [layer.make_cache(1, 1024) for layer in self.layers]

    def norm(self, x, name):
        weight = self.weights[f"{name}.weight"]
        return rms_norm(x, weight.shape, weight, self.eps)

    @torch.no_grad()
    def next_logits(self, tokens):
        """Of the token after `tokens`, which are appended to the cache."""
        x = self.weights["embedding.weight"][torch.tensor([tokens])]
        for i, (layer, cache) in enumerate(zip(self.layers, self.caches, strict=True)):
            x = x + layer(self.norm(x, f"layers.{i}.attention_norm"), cache=cache)
            y = self.norm(x, f"layers.{i}.ffn_norm")
            gate, up, down = (self.weights[f"layers.{i}.ffn.{name}_proj.weight"] for name in ("gate", "up", "down"))
            x = x + linear(silu(linear(y, gate)) * linear(y, up), down)
        return linear(self.norm(x[0, -1], "norm"), self.weights["embedding.weight"])


def compare(run, tmp_path):
    path = tmp_path / "out.json"
    options = ["--temperature", 0, "--tokens", 60, "--ignore-end", "--json", path]
    program("generate", run, "--prompt", PROMPT, *options)
    expected, model = json.loads(path.read_text())["sequences"][0], Model(run)
    tokens = [START, *PROMPT.encode()]
    assert len(tokens) == expected["prompt_tokens"]
    for token, margin in zip(expected["tokens"], expected["margins"], strict=True):
        best = model.next_logits(tokens).topk(2)
        assert float(best.values[0] - best.values[1]) == pytest.approx(margin, abs=1e-3)
        if margin > 1e-3:
            assert int(best.indices[0]) == token
        tokens = [token]


def test_the_recipe_is_what_the_program_trains_with(corpus, tmp_path):
    program("train", "--out", tmp_path / "run", "--data", corpus, "--steps", 1, *TINY_MODEL, *TINY_RUN)
    model = json.loads((tmp_path / "run" / "config.json").read_text())["model"]
    recipe = dataclasses.asdict(nsa.NSAConfig.recipe())
    assert {name: model[name] for name in recipe} == recipe
    others = {"share_kv": True, "rope_theta": 500000, "partial_rotary_factor": 0.5}  # as its docstring has it
    assert {name: model[name] for name in others} == others


def test_generates_what_the_program_generates(trained, tmp_path):
    compare(trained["nsa"], tmp_path)


def test_half_of_the_rotation(corpus, tmp_path):
    options = ["--partial-rotary-factor", 0.5, "--share-kv", "--steps", 20, *TINY_MODEL, *TINY_RUN]
    program("train", "--out", tmp_path / "run", "--data", corpus, *options)
    compare(tmp_path / "run", tmp_path)
    losses = []
    for factor in (0.5, 1, 0):
        program("eval", tmp_path / "run", "--set", f"partial_rotary_factor={factor}", "--json", tmp_path / "out.json")
        losses.append(json.loads((tmp_path / "out.json").read_text())["loss"])
    assert len(set(losses)) == 3


def test_debug_compare_repeats_a_step_in_fp8(tmp_path, monkeypatch):
    torch.manual_seed(0)  # with others a compressed number between two of e4m3 may be rounded to either
    cfg = nsa.NSAConfig(kernel_size=8, kernel_stride=4, block_size=16, topk=4, window_size=20)
    cache = nsa.KVCache(1, 2, 16, cfg=cfg, max_length=64, dtype=torch.float8_e4m3fn, k_scale=0.02, v_scale=0.5)
    new = [torch.randn(1, 40, heads, 16).bfloat16() for heads in (4, 2, 2)] + [torch.rand(1, 40, 4, 3).bfloat16()]
    monkeypatch.setenv("NSA_DUMP", str(tmp_path))
    nsa.prefill(*new, cache)
    nsa.decode(*(t[:, :3] for t in new), cache)
    monkeypatch.delenv("NSA_DUMP")
    dumps = sorted(tmp_path.iterdir())
    assert [path.stem.split("-", 2)[2] for path in dumps] == ["prefill", "decode"]
    for path in dumps:
        text = program("debug", "compare", path).text
        errors = {line.split()[0]: float(line.split()[3]) for line in text.splitlines() if "e-" in line or "e+" in line}
        assert errors["o"] < 1e-2 and errors["cache.k_slc"] == 0, text
        assert "not finite" not in text


def test_debug_compare_repeats_a_step_in_memory_that_branches_share(tmp_path, monkeypatch):
    cfg = nsa.NSAConfig(kernel_size=8, kernel_stride=4, block_size=16, topk=4, window_size=20)
    k, v, raw = (torch.zeros(3, 64, 2, 16) for _ in range(3))
    k_c, v_c = (torch.zeros(3, 16, 2, 16) for _ in range(2))
    layer = nsa.serving.LayerCache(k, v, k_c, v_c, None, None, raw.view(6, 32, 2, 16)[::2], None)
    new = [torch.randn(70, heads, 16) for heads in (4, 2, 2)] + [torch.rand(70, 4, 3)]
    table = torch.tensor([[2, 1]], dtype=torch.int32)
    tables = {"block_table": table, "block_table_cmp": table.repeat_interleave(2, 1)}
    starts, lengths = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, 70], [70]))
    monkeypatch.setenv("NSA_DUMP", str(tmp_path))
    rope = nsa.rotary_tables(torch.arange(70), 16)  # the call rotates
    nsa.serving.decode_paged(*new, layer, cfg=cfg, query_start_loc=starts, seq_lens=lengths, rope=rope, **tables)
    monkeypatch.delenv("NSA_DUMP")
    (dump,) = tmp_path.iterdir()
    text = program("debug", "compare", dump).text
    errors = {line.split()[0]: float(line.split()[3]) for line in text.splitlines() if "e-" in line or "e+" in line}
    assert errors["o"] < 1e-5 and errors["cache.k_slc"] < 1e-6, text
    assert errors["cache.k_cmp_ring"] == errors["cache.v_slc"] == 0, text
