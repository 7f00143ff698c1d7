"""Tiny models, their answers by nsa.hf, and vLLM's engine in this process.

Both are kept in the folder NSA_VLLM_MODELS, if that is given: some versions of vLLM want a transformers that is too old
for the models of nsa.hf, and find there what another version's tests have left.
"""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "passive",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "TRITON_F32_DEFAULT": "ieee",  # or the dense layers' kernel on a GPU rounds to TF32
    }
)
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # parts of vLLM compile even with enforce_eager

import torch
from vllm.platforms import current_platform

import nsa.hf
import nsa.vllm

DEVICE = "cuda" if current_platform.is_cuda() else "cpu"
ON_GPU = {"kv_cache_memory_bytes": 1 << 28, "gpu_memory_utilization": 0.05}  # the latter only has to be free
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
}
PAPER = {"topk": 4, "window_size": 64, "share_kv": True}
RECIPE = {"kernel_size": 8, "kernel_stride": 8, "block_size": 32, "topk": 6, "window_size": 64, "share_kv": True}
PARTIAL = {"rope_type": "proportional", "rope_theta": 500000.0, "partial_rotary_factor": 0.5}
MODELS: dict[str, dict[str, Any]] = {
    "paper": {"nsa": PAPER, "head_dim": 128},
    "recipe": {"nsa": RECIPE},
    "partial": {"nsa": RECIPE, "rope_parameters": PARTIAL, "dense_layers": [0]},
    "dense": {"nsa": PAPER, "dense_layers": [1]},
    "qwen3": {"nsa": {**RECIPE, "phi_per_kv_head": True}, "dense_layers": [1]},
    "mistral": {"nsa": RECIPE, "sliding_window": None, "dense_layers": [2]},
    "qwen2": {"nsa": RECIPE, "dense_layers": [1]},
    "echo": {"nsa": RECIPE, "initializer_range": 0.06},  # repeats itself
    "fp8": {"nsa": RECIPE, "initializer_range": 0.1},  # its answers have caches in fp8, where last bits change more
    "separate": {"nsa": {**RECIPE, "share_kv": False}},
}


def save_model(name: str, root: Path) -> Path:
    """Folder of a random model whose gates and φ are not at their start; made if it is missing."""
    folder = root / name
    if (folder / "model.safetensors").exists():
        return folder
    if name not in MODELS:
        from vllm_serve import make_model

        make_model(str(folder))
        return folder
    family = name.capitalize() if name in ("mistral", "qwen2", "qwen3") else "Llama"
    torch.manual_seed(0)
    config = getattr(nsa.hf, f"Nsa{family}Config")(**{**SIZES, **MODELS[name]})
    model = getattr(nsa.hf, f"Nsa{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if ".gate.2." in key:
                parameter.normal_(0, 0.5)
            elif key.endswith("_proj.bias"):
                parameter.normal_(0, 0.5)
            elif ".phi_" in key:
                parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


class Answer(NamedTuple):
    """Greedy tokens behind a prompt, the log-probabilities of the first one's position, and the selected blocks."""

    tokens: list[int]
    logprobs: torch.Tensor
    selections: torch.Tensor


def answers(folder: Path, prompts: list[list[int]], new: int) -> list[Answer]:
    """By nsa.hf, each prompt alone."""
    file = folder / f"{hashlib.sha256(repr((prompts, new, Answer._fields)).encode()).hexdigest()[:16]}.pt"
    if not file.exists():
        torch.save([tuple(answer) for answer in _answers(folder, prompts, new)], file)
    return [Answer(*answer) for answer in torch.load(file)]


def _answers(folder: Path, prompts: list[list[int]], new: int) -> Iterator[Answer]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).to(DEVICE).eval()
    model.generation_config.eos_token_id = None
    with patch.object(nsa.hf.cache, "KVCache", _fp8_cache if folder.name == "fp8" else nsa.KVCache):
        for prompt in prompts:
            ids = torch.tensor([prompt], device=DEVICE)
            with nsa.replay.record(model):
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),  # or a token that is pad_token_id would count as padding
                    max_new_tokens=new,
                    do_sample=False,
                    pad_token_id=0,
                    output_logits=True,
                    return_dict_in_generate=True,
                )
            (record,) = nsa.replay.collect(out.cache)
            logprobs = out.logits[0][0].log_softmax(-1).cpu()
            yield Answer(out.sequences[0, len(prompt) :].tolist(), logprobs, record.indices.cpu())


def _fp8_cache(*arguments: Any, dtype: torch.dtype, **options: Any) -> nsa.KVCache:
    return nsa.KVCache(*arguments, dtype=torch.float8_e4m3fn, raw_dtype=dtype, **options)


def prompts_of(lengths: list[int], shared: int = 0, seed: int = 1) -> list[list[int]]:
    """Random tokens; the first `shared` ones are the same in all prompts."""
    draw = torch.Generator().manual_seed(seed)
    begin = torch.randint(SIZES["vocab_size"], (shared,), generator=draw).tolist()
    return [begin + torch.randint(SIZES["vocab_size"], (n,), generator=draw).tolist() for n in lengths]


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Any]:
    """vllm.LLM of a folder, in float32."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    defaults = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "block_size": 64,
        "disable_log_stats": False,
        **(ON_GPU if DEVICE == "cuda" else {}),
    }
    llm = LLM(model=str(folder), **{**defaults, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
        type(current_platform)._global_graph_pool = None  # torch refuses another graph in a pool whose graphs are gone


def generate(llm: Any, prompts: list[list[int]], new: int, **sampling: Any) -> list[Any]:
    """Greedy outputs with the 20 best log-probabilities of every token."""
    from vllm import SamplingParams

    options = {"temperature": 0, "max_tokens": new, "logprobs": 20, "ignore_eos": True, "detokenize": False}
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(given, SamplingParams(**{**options, **sampling}), use_tqdm=False)


def assert_equal(outputs: list[Any], expected: list[Answer], within: float = 2e-3) -> None:
    """The tokens, and the log-probabilities of the first one within rounding; E4M3: tokens up to the first tie."""
    for output, answer in zip(outputs, expected, strict=True):
        completion = output.outputs[0]
        pairs = zip(completion.token_ids, answer.tokens, completion.logprobs, strict=True)
        differ = next(((given, found, truth) for found, truth, given in pairs if found != truth), None)
        if differ is not None:
            given, found, truth = differ
            tie = truth in given and given[found].logprob - given[truth].logprob < within
            assert within == E4M3 and tie, (len(output.prompt_token_ids), found, truth)
        for token, given in completion.logprobs[0].items():
            assert abs(given.logprob - float(answer.logprobs[token])) < within, (len(output.prompt_token_ids), token)


E4M3 = 1e-2
"""`within` of caches in fp8: where a last bit differs, an element may be stored 1/16 apart."""

RECORDING = {"additional_config": {"record_selections": True}}


def assert_selections_equal(llm: Any, outputs: list[Any], expected: list[Answer]) -> None:
    """The recorded blocks of an engine with RECORDING."""
    for output, answer in zip(outputs, expected, strict=True):
        (record,) = nsa.vllm.selections(llm, output)
        assert torch.equal(record.indices, answer.selections), len(output.prompt_token_ids)


def assert_training_agrees(folder: Path, llm: Any, outputs: list[Any]) -> None:
    """With the recorded blocks a training forward of nsa.hf has the engine's log-probabilities."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).to(DEVICE).train()
    for output in outputs:
        prompt, completion = output.prompt_token_ids, output.outputs[0]
        ids = torch.tensor([[*prompt, *completion.token_ids]], device=DEVICE)
        with nsa.replay.replay(model, nsa.vllm.selections(llm, output), compare=True) as found:
            logprobs = model(ids[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :].log_softmax(-1)
        assert [different for different, _ in found.by_layer()] == [0] * len(found.by_layer())
        sampled = [given[token].logprob for token, given in zip(completion.token_ids, completion.logprobs, strict=True)]
        torch.testing.assert_close(
            logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu(), torch.tensor(sampled), atol=1e-5, rtol=0
        )


def metric(llm: Any, name: str) -> float:
    """A counter of the engine."""
    return sum(found.value for found in llm.get_metrics() if found.name == f"vllm:{name}")
