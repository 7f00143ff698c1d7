"""vLLM's engine and server with the plug-in give every request the tokens that nsa.hf gives it alone."""

import http.client
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
import transformers
from packaging.version import Version

import nsa.vllm
from engine import (
    DEVICE,
    E4M3,
    ON_GPU,
    RECORDING,
    answers,
    assert_equal,
    assert_selections_equal,
    assert_training_agrees,
    engine,
    generate,
    metric,
    prompts_of,
    save_model,
)

nsa.vllm.register()
sys.path.append(str(Path(__file__).parents[2] / "examples"))

LENGTHS = [5, 33, 70, 130, 301, 520]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Folder of a model by its name."""
    root = Path(os.environ.get("NSA_VLLM_MODELS") or tmp_path_factory.mktemp("models"))
    return lambda name: save_model(name, root)


def test_tables_of_chunks():
    """They end with the longest sequence, but have room for more tokens than are selected: else bits would change."""
    from nsa.vllm import _attention

    cfg = nsa.NSAConfig(8, 4, 16, 4, window_size=32)
    layer = SimpleNamespace(layout=_attention.PageLayout(cfg, 16, 1, 32, torch.float32))
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        additional_config={},
    )
    builder = _attention.NsaMetadataBuilder(SimpleNamespace(block_size=16), ["layer"], config, torch.device("cpu"))

    def columns(*lengths: tuple[int, int]) -> list[int]:
        new, seen = zip(*lengths, strict=True)
        starts = torch.tensor([0, *new]).cumsum(0).int()
        step = SimpleNamespace(
            num_reqs=len(lengths),
            query_start_loc_cpu=starts,
            query_start_loc=starts,
            block_table_tensor=torch.zeros(len(lengths), 40, dtype=torch.int32),
            max_query_len=max(new),
            max_seq_len=max(seen),
            seq_lens=torch.tensor(seen),
            slot_mapping=torch.zeros(sum(new)),
        )
        return [part.block_table.shape[1] for part in builder.build(0, step).parts]

    assert columns((1, 300), (20, 20), (30, 200)) == [40, 19]
    assert columns((20, 20)) == [5]  # 65 tokens
    assert columns((1, 20)) == [40]


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo"])
def test_recorded_rows_are_in_a_file_of_their_own(tmp_path, monkeypatch, kind):
    """Everybody may write to the folder of shared memory."""
    from nsa.vllm import _attention

    place, outside = tmp_path / "rows", tmp_path / "outside"
    if kind == "link":
        outside.write_text("other")
    os.mkfifo(place) if kind == "fifo" else place.symlink_to(outside)
    monkeypatch.setattr(_attention, "selections_file", lambda config: place)
    cfg = nsa.NSAConfig(8, 4, 16, 4, window_size=32)
    model = SimpleNamespace(num_hidden_layers=1, dense_layers=[], num_key_value_heads=1, nsa_config=lambda: cfg)
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=model, max_model_len=64), cache_config=SimpleNamespace(block_size=16)
    )
    signal.alarm(30)
    with pytest.raises(ValueError, match="rows: "):
        _attention.map_selections(config, 4)
    signal.alarm(0)
    assert outside.read_text() == "other" if kind == "link" else not outside.exists()
    place.unlink()
    assert _attention.map_selections(config, 4).shape == (65, 1, 1, 4) and place.stat().st_mode & 0o777 == 0o600


CASES = {
    "side by side": ("paper", {}, 0),
    "chunks of 64, 3 slots": ("paper", {"max_num_batched_tokens": 64, "max_num_seqs": 3, **RECORDING}, 0),
    "dense layer": ("dense", {"block_size": 32, "max_num_batched_tokens": 200, **RECORDING}, 64),
    "partial RoPE": ("partial", {"block_size": 128, "max_num_batched_tokens": 128}, 150),
    "Mistral": ("mistral", {}, 0),
    "Qwen2": ("qwen2", {"max_num_batched_tokens": 200}, 64),
    "Qwen3": ("qwen3", {"block_size": 64, "max_num_batched_tokens": 128}, 64),
    "small pages": ("recipe", {"block_size": 16, "max_num_batched_tokens": 50}, 150),
    "large pages": ("paper", {"block_size": 256, "max_num_batched_tokens": 300}, 300),
    "fp8": ("fp8", {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 128}, 64),
    "two ranks": ("qwen3", {"tensor_parallel_size": 2, **RECORDING}, 64),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_those_of_hf(case, folder):
    name, options, shared = CASES[case]
    if DEVICE == "cuda" and options.get("tensor_parallel_size", 1) > torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    prompts = prompts_of(LENGTHS, shared)
    truth = answers(folder(name), prompts, 40)
    with engine(folder(name), **options) as llm:
        within = E4M3 if name == "fp8" else 2e-3
        assert_equal(generate(llm, prompts, 40), truth, within)
        again = generate(llm, prompts, 40)
        assert_equal(again, truth, within)
        if "additional_config" in options:
            assert_selections_equal(llm, again, truth)
    page = options.get("block_size", 64)
    assert all(out.num_cached_tokens >= (len(out.prompt_token_ids) - 1) // page * page for out in again)


GRAPHS = {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
"""Whole decode steps as CUDA graphs."""


@pytest.fixture
def replays(monkeypatch):
    """A list of the CUDA graphs that are replayed."""
    found, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (found.append(graph), replay(graph))[1])
    return found


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize(("name", "options"), (("paper", RECORDING), ("qwen3", {}), ("fp8", {"kv_cache_dtype": "fp8"})))
def test_cuda_graphs(name, options, folder, replays):
    prompts = prompts_of(LENGTHS, 64)
    truth = answers(folder(name), prompts, 40)
    with engine(folder(name), max_num_batched_tokens=128, **GRAPHS, **options) as llm:
        for _ in range(2):
            replays.clear()
            outputs = generate(llm, prompts, 40)
            assert_equal(outputs, truth, E4M3 if name == "fp8" else 2e-3)
            assert len(replays) >= 38  # the last prompt's decode steps, and no fewer graphs than steps
        if options == RECORDING:
            assert_selections_equal(llm, outputs, truth)


def test_preempted_requests(folder):
    prompts = prompts_of([100, 101, 102, 103])
    truth = answers(folder("echo"), prompts, 150)
    options = {"num_gpu_blocks_override": 21, "max_model_len": 512, "max_num_batched_tokens": 64, **RECORDING}
    with engine(folder("echo"), block_size=32, **options) as llm:
        outputs = generate(llm, prompts, 150)
        assert_equal(outputs, truth)
        assert metric(llm, "num_preemptions") > 0
        outputs += generate(llm, prompts[:1], 150) + generate(llm, prompts[:1], 150)
        assert outputs[-1].num_cached_tokens > 64
        assert_selections_equal(llm, outputs, [*truth, truth[0], truth[0]])
        if Version(transformers.__version__) >= Version("5.24"):
            assert_training_agrees(folder("echo"), llm, outputs)
        with pytest.raises(ValueError, match=r"outputs\[0\]: has no selections"):
            outputs[0].outputs[0].routed_experts = None
            nsa.vllm.selections(llm, outputs[0])
        name = f"nsa-{llm.llm_engine.vllm_config.instance_id}-*"
    assert not list(Path("/dev/shm").glob(name))


def row_by_row(function):
    """The function for each row alone: libraries take other instructions for more rows, or for a tensor's end."""
    return lambda x, *others, **named: torch.cat([function(row, *others, **named) for row in x.split(1)])


def make_linear_layers_invariant(model):
    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            module.cpu_linear = row_by_row(module.cpu_linear)
        elif DEVICE == "cuda" and hasattr(module, "quant_method"):
            module.quant_method.apply = row_by_row_of_layer(module.quant_method.apply)


def row_by_row_of_layer(apply):
    return lambda layer, x, *others, **named: row_by_row(partial(apply, layer))(x, *others, **named)


def test_bits_do_not_depend_on_the_batch(folder, monkeypatch):
    """Where nothing but the linear layers and the sigmoid depends on other rows: both are taken row by row here.

    On a GPU this holds for steps of up to 16 tokens by the kernels for Hopper, so prompts come from the prefix cache.
    """
    monkeypatch.setattr(torch, "sigmoid", row_by_row(torch.sigmoid))
    monkeypatch.setenv("NSA_BATCH_INVARIANT", "1")

    def numbers(outputs):
        return [(out.prompt_logprobs, out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs]

    prompts = prompts_of([5, 33, 130, 301])
    options, sampling = {"enable_prefix_caching": False, "max_num_batched_tokens": 128}, {"prompt_logprobs": 3}
    if DEVICE == "cuda":
        options, sampling = {"dtype": "bfloat16", "block_size": 16}, {}
    with engine(folder("recipe"), **options) as llm:
        llm.apply_model(make_linear_layers_invariant)
        if DEVICE == "cuda":
            generate(llm, prompts, 16)
        together = numbers(generate(llm, prompts, 16, **sampling))
        assert together == [number for prompt in prompts for number in numbers(generate(llm, [prompt], 16, **sampling))]


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    (
        ("separate", {}, "nsa: share_kv = False: must be True with nsa_llama in vLLM"),
        ("recipe", {"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype = fp8_e5m2: must be auto, fp8 or fp8_e4m3"),
        ("recipe", {"hf_overrides": {"nsa": {"topk": 4}}}, "nsa: share_kv = False: must be True with nsa_llama"),
        ("recipe", {"hf_overrides": {"rope_parameters": DYNAMIC}}, "rope_type = 'dynamic': must be default, "),
        ("recipe", {"hf_overrides": {"dense_layers": [7]}}, "dense_layers: 7: must be 0 ... 2"),
        ("mistral", {"hf_overrides": {"sliding_window": 64}}, "sliding_window = 64: must be None"),
    ),
)
def test_an_engine_that_does_not_start(name, options, message, folder):
    with pytest.raises(ValueError, match=message), engine(folder(name), **options):
        pass


def test_a_checkpoint_without_a_weight_is_refused(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder("recipe"), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        del weights[f"model.layers.{layer}.self_attn.gate.2.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    missing = r"weights: model\.layers\.0\.self_attn\.gate\.2\.weight and 1 others: must be in the checkpoint"
    with pytest.raises(ValueError, match=missing), engine(tmp_path):
        pass


def test_a_trainer_sends_weights_in_parts(folder, tmp_path, monkeypatch):
    """Also after a loader that writes the parameters itself, and so does not call `load_weights`."""
    from vllm.model_executor.model_loader import ShardedStateLoader, base_loader

    process = base_loader.process_weights_after_loading

    def save(model, *rest):  # before a CPU's linear layers pack their weights
        ShardedStateLoader.save_model(model, str(tmp_path))
        process(model, *rest)

    def send(model):
        return model.load_weights([(name, model.get_parameter(name).detach() + 1)])

    shutil.copy(folder("recipe") / "config.json", tmp_path)
    name = "model.layers.1.self_attn.phi_k.w1"
    monkeypatch.setattr(base_loader, "process_weights_after_loading", save)
    with engine(folder("recipe")) as llm:
        assert llm.apply_model(send) == [{name}]
    monkeypatch.undo()
    with engine(tmp_path, load_format="sharded_state") as llm:
        assert llm.apply_model(send) == [{name}]


@pytest.mark.parametrize("version", [(0, 25, 1), (0, 33, 0)])
def test_a_version_that_was_not_tested(version, folder, monkeypatch):
    monkeypatch.setattr("vllm.__version_tuple__", version)
    monkeypatch.setattr("vllm.__version__", ".".join(map(str, version)))
    nsa.vllm.register()
    message = rf"vllm = 0\.{version[1]}\.{version[2]}: must be 0\.26 to 0\.32 with nsa_llama"
    try:
        with pytest.raises(ValueError, match=message), engine(folder("recipe")):
            pass
    finally:
        monkeypatch.undo()
        nsa.vllm.register()


def test_other_models_are_served_where_transformers_is_too_old(monkeypatch):
    monkeypatch.setitem(sys.modules, "nsa.hf", None)
    with pytest.warns(UserWarning, match=r"nsa\.vllm registers no models: "):
        nsa.vllm.register()


def test_soak(folder):
    """Requests that come at any time, share prefixes, are cancelled and preempted. NSA_SOAK: how many, default 60."""
    from vllm import SamplingParams

    draw, total = random.Random(5), int(os.environ.get("NSA_SOAK", "60"))
    prompts = [
        prompt
        for shared in (0, 40, 130, 300)
        for prompt in prompts_of([draw.randint(1, 250) for _ in range(max(3, total // 20))], shared, seed=shared)
    ]
    truth = answers(folder("recipe"), prompts, 48)
    options = {"max_num_batched_tokens": 160, "max_num_seqs": 6, "num_gpu_blocks_override": 34, "max_model_len": 640}
    with engine(folder("recipe"), block_size=32, **options) as llm:
        core = llm.llm_engine
        pool = core.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        free, running, begun, cancelled, finished = pool.get_num_free_blocks(), {}, 0, 0, 0
        while begun < total or running:
            while begun < total and len(running) < 12 and draw.random() < 0.4:
                which, wanted = draw.randrange(len(prompts)), draw.randint(1, 48)
                sampling = SamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True, detokenize=False)
                core.add_request(str(begun), {"prompt_token_ids": prompts[which]}, sampling)
                running[str(begun)] = which, wanted
                begun += 1
            if running and draw.random() < 0.02:
                core.abort_request([gone := draw.choice(sorted(running))])
                del running[gone]
                cancelled += 1
            for output in core.step():
                if output.finished and output.request_id in running:
                    which, wanted = running.pop(output.request_id)
                    assert list(output.outputs[0].token_ids) == truth[which].tokens[:wanted], output.request_id
                    finished += 1
        assert pool.get_num_free_blocks() == free and finished + cancelled == total
        assert min(cancelled, metric(llm, "num_preemptions"), metric(llm, "prefix_cache_hits")) > 0
        print(f"{finished} finished, {cancelled} cancelled, {metric(llm, 'num_preemptions')} preemptions")


COMPILED = """
from test_engine import *
from vllm.platforms import current_platform

kind = current_platform.get_cpu_architecture()  # reads platform.uname, which dynamo cannot trace
type(current_platform).get_cpu_architecture = classmethod(lambda _: kind)
prompts, path = prompts_of(LENGTHS, 64), Path(sys.argv[1])
truth = answers(path, prompts, 40)
with engine(path, enforce_eager=False, max_num_batched_tokens=128) as llm:
    compiled = llm.llm_engine.vllm_config.compilation_config
    assert compiled.mode != 0 and (DEVICE == "cpu" or compiled.cudagraph_mode.name == "FULL_AND_PIECEWISE")
    assert_equal(generate(llm, prompts, 40), truth)
"""


def test_compiled(folder):
    """The model as vLLM traces and compiles it, with its attention as one operator; on a GPU with its graphs."""
    answers(folder("qwen3"), prompts_of(LENGTHS, 64), 40)
    command = [sys.executable, "-c", COMPILED, str(folder("qwen3"))]
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "0", "VLLM_DISABLE_COMPILE_CACHE": "1"}
    subprocess.run(command, check=True, cwd=Path(__file__).parent, env=environment)


@pytest.mark.parametrize("options", [{}, *([GRAPHS] if DEVICE == "cuda" else [])], ids=str)
def test_rejected_drafts(options, folder):
    """The last engine of this process: numba, which proposes these drafts, keeps vLLM 0.32 from starting another."""
    prompts = [prompt * 2 for prompt in prompts_of([20, 65, 120])]
    truth = answers(folder("echo"), prompts, 60)
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with engine(folder("echo"), speculative_config=drafts, **RECORDING, **options) as llm:
        outputs = generate(llm, prompts, 60)
        assert_equal(outputs, truth)
        assert_selections_equal(llm, outputs, truth)
        drafted, accepted = (metric(llm, f"spec_decode_num_{what}_tokens") for what in ("draft", "accepted"))
    assert drafted - accepted > 50 and accepted > 50


def test_server(folder, monkeypatch):
    """The example's server: streaming, several clients, a prompt that is too long, a client that hangs up."""
    from openai import BadRequestError, OpenAI
    from vllm_serve import serve

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    prompts = prompts_of([40, 150, 300, 7], seed=3)
    truth = answers(folder("served"), prompts, 24)
    options = "--dtype float32 --max-model-len 1024 --enforce-eager --block-size 32 --max-num-seqs 4".split()
    if DEVICE == "cuda":
        options += [f"--{name.replace('_', '-')}={value}" for name, value in ON_GPU.items()]
    with serve(str(folder("served")), *options) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none")

        def complete(prompt, new=24, **more):
            given = {"model": "nsa", "prompt": prompt, "max_tokens": new, "temperature": 0, **more}
            extra = {"ignore_eos": True, "skip_special_tokens": False}  # t0 is one
            return client.completions.create(**given, extra_body=extra)

        def words(text):
            return [int(word.removeprefix("t")) for word in text.split()]

        def stream(which, found):
            parts = [part.choices[0].text for part in complete(prompts[which], stream=True)]
            found[which] = len([part for part in parts if part]), words("".join(parts))

        found = {}
        clients = [threading.Thread(target=stream, args=(which, found)) for which in range(len(prompts))]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        assert {which: tokens for which, (_, tokens) in found.items()} == dict(enumerate(a.tokens for a in truth))
        assert all(parts > 1 for parts, _ in found.values())

        with pytest.raises(BadRequestError, match="1024"):
            complete([1] * 1025, new=1)
        with complete(prompts[0], new=900, stream=True) as cancelled:
            next(iter(cancelled))
        server = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
        body = {"model": "nsa", "prompt": prompts[1], "max_tokens": 800, "stream": True, "ignore_eos": True}
        server.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        server.getresponse().readline()
        server.sock and server.sock.close()  # hangs up
        server.close()
        end = time.monotonic() + 60
        while running(url) > 0 and time.monotonic() < end:
            time.sleep(0.2)
        assert running(url) == 0
        assert words(complete(prompts[2]).choices[0].text) == truth[2].tokens


def running(url):
    """Requests that the server works on, by its own count."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:num_requests_running"))


@pytest.mark.skipif(DEVICE == "cuda", reason="--tiny is for the CPU")
def test_speed_program(tmp_path):
    """On a GPU it measures; here a tiny model runs through all of its parts."""
    pytest.importorskip("transformers", minversion="5.24")
    program, result = Path(__file__).parents[2] / "bench/models/vllm_speed.py", tmp_path / "speed.json"
    subprocess.run([sys.executable, str(program), "--tiny", "--json", str(result)], check=True)
    found = json.loads(result.read_text())
    for part in ("tokens", "tokens_float32", "tokens_dense"):
        assert found["parts"][part] == {"prompts": 3, "equal": 3, "differences": []}
    assert len(found["ratios"]) == 9 and min(found["ratios"].values()) > 0
    assert found["nsa"] == vars(nsa.NSAConfig.recipe()) | {"topk": 6, "window_size": 64}
    fit = 2 / (2.5 + 2 / found["nsa"]["kernel_stride"])  # pages of 64 tokens with 32 raw keys
    assert found["ratios"]["tokens that fit, sparse over dense"] == pytest.approx(fit, rel=0.01)
