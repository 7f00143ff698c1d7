"""Plug-in for vLLM (extra `vllm`): sparse models of `nsa.hf` in its engine and its server.

vLLM finds it by the entry point `vllm.general_plugins`. Nothing has to be imported.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ..decoding import MAX_DECODE_TOKENS
from ..replay import SelectionRecord

__all__ = ["selections"]

MODELS = tuple(f"Nsa{family}ForCausalLM" for family in ("Llama", "Mistral", "Qwen2", "Qwen3"))
FP8 = ("fp8", "fp8_e4m3")
"""Names of vLLM's option for pages in float8_e4m3fn."""
VERSIONS = (0, 26), (0, 32)
"""The oldest and the newest version of vLLM in the tests. What differs between them is in `_attention.NsaBackend`."""


def register() -> None:
    """Registers configurations and models. vLLM calls it in each of its processes, possibly more than once."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    try:
        import nsa.hf  # noqa: F401  # registers the configurations with transformers
    except ImportError as error:  # vLLM would start with no model at all
        warnings.warn(f"nsa.vllm registers no models: {error}", stacklevel=2)
        return
    # vLLM imports a model before it asks EngineConfig, which refuses versions in which ours cannot be imported.
    place = "vllm.model_executor.models.llama:LlamaForCausalLM" if unsupported_version() else "nsa.vllm._models:{}"
    for name in MODELS:
        ModelRegistry.register_model(name, place.format(name))
        MODELS_CONFIG_MAP[name] = EngineConfig


def unsupported_version() -> str | None:
    """Why this version of vLLM is refused."""
    from vllm import __version__, __version_tuple__

    oldest, newest = (".".join(map(str, version)) for version in VERSIONS)
    supported = VERSIONS[0] <= __version_tuple__[:2] <= VERSIONS[1]
    return None if supported else f"vllm = {__version__}: must be {oldest} to {newest}"


def records_selections(vllm_config: Any) -> bool:
    """Whether the engine returns the selected blocks of requests. Raises ValueError for another value than a bool."""
    given = vllm_config.additional_config  # of another plug-in it need not be a dict
    value = given.get("record_selections", False) if isinstance(given, dict) else False
    if not isinstance(value, bool):
        raise ValueError(f"additional_config: record_selections = {value!r}: must be True or False")
    return value


def selections(engine: Any, output: Any) -> list[SelectionRecord]:
    """The blocks that the tokens of a finished request selected, for `nsa.replay.replay`.

    A record lacks the last token that was sampled, which was not fed back: give `replay` the lengths.

    Args:
        engine: `vllm.LLM` or `AsyncLLM` with `additional_config={"record_selections": True}`.
        output: a `RequestOutput`.

    Returns:
        A record for each completion.

    Raises:
        ValueError: the output has no selections, or the engine no sparse model.
        TypeError: several outputs.
    """
    config, records = engine.model_config.hf_config, []
    if not hasattr(config, "nsa_config"):
        raise ValueError(f"engine: model_type = {config.model_type}: must be a sparse model of nsa.hf")
    if not hasattr(output, "outputs"):
        raise TypeError(f"output: {type(output).__name__}: must be one RequestOutput")
    cfg = config.nsa_config()
    for i, completion in enumerate(output.outputs):
        indices = completion.routed_experts  # the field in which vLLM sends what a token was routed to
        if indices is None:
            rule = 'must be finished, of an engine with additional_config={"record_selections": True}'
            raise ValueError(f"output.outputs[{i}]: has no selections: {rule}")
        records.append(SelectionRecord(torch.tensor(indices).transpose(0, 1).contiguous(), cfg))
    return records


class EngineConfig:
    """What vLLM calls with the engine's configuration before it starts."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Refuses what is not supported and chooses the scheduler."""
        check_supported(vllm_config)
        scheduler = vllm_config.scheduler_config
        scheduler.scheduler_cls = "nsa.vllm._scheduler.make_scheduler"
        if records_selections(vllm_config):
            scheduler.async_scheduling = False  # or vLLM would choose True on a GPU

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Refuses other versions of vLLM."""
        if reason := unsupported_version():
            raise ValueError(f"{reason} with {model_config.hf_config.model_type}")


def check_supported(vllm_config: Any) -> None:
    """Raises ValueError for a model or an option of the engine that the plug-in does not support.

    vLLM chooses a block_size that is not given after this call. The model calls it once more.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    config, drafts = model.hf_config, vllm_config.speculative_config
    config._check_fields({})  # hf_overrides sets fields of a configuration that has been checked
    config._complete()
    kv_heads, ranks, scheduler = (
        config.num_key_value_heads,
        parallel.tensor_parallel_size,
        vllm_config.scheduler_config.scheduler_cls,
    )
    stride, page_size = config.nsa["kernel_stride"], cache.block_size or 0
    bias = getattr(config, "attention_bias", False)
    dense_bias = bool(config.dense_layers) and config.model_type == "nsa_qwen3" and bias
    method = getattr(drafts, "method", None)
    scales, skipped = (getattr(cache, name, None) for name in ("calculate_kv_scales", "kv_cache_dtype_skip_layers"))
    recording, asynchronous = records_selections(vllm_config), bool(vllm_config.scheduler_config.async_scheduling)
    num_drafts = getattr(drafts, "num_speculative_tokens", None) or 0
    for name, given, supported, rule in (
        ("nsa: share_kv", config.nsa["share_kv"], config.nsa["share_kv"], "True"),
        ("attention_bias", bias, not dense_bias, "False for Qwen3 with dense_layers"),
        ("kv_cache_dtype", cache.cache_dtype, cache.cache_dtype in ("auto", *FP8), "auto, fp8 or fp8_e4m3"),
        ("calculate_kv_scales", scales, not scales, "False, as scales are 1,"),
        ("kv_cache_dtype_skip_layers", skipped, not skipped, "empty"),
        ("block_size", page_size, page_size % 16 == 0, "a multiple of 16"),
        ("block_size", page_size, page_size % stride == 0, f"a multiple of kernel_stride = {stride}"),
        ("tensor_parallel_size", ranks, kv_heads % ranks == 0, f"a divisor of the number of KV heads, {kv_heads}"),
        *(
            (f"{kind}_size", given, given == 1, "1")
            for kind in ("pipeline_parallel", "decode_context_parallel", "prefill_context_parallel")
            for given in (getattr(parallel, f"{kind}_size"),)
        ),
        ("quantization", model.quantization, model.quantization is None, "None"),
        ("enable_lora", True, vllm_config.lora_config is None, "False"),
        ("kv_transfer_config", "given", vllm_config.kv_transfer_config is None, "None"),
        ("scheduler_cls", scheduler, scheduler is None or "nsa.vllm" in str(scheduler), "None"),
        ("async_scheduling", asynchronous, not (recording and asynchronous), "False with record_selections"),
        ("speculative_config: method", method, method in (None, "ngram"), "ngram"),
        ("num_speculative_tokens", num_drafts, num_drafts < MAX_DECODE_TOKENS, f"below {MAX_DECODE_TOKENS}"),
    ):
        if not supported:
            raise ValueError(f"{name} = {given}: must be {rule} with {config.model_type} in vLLM")
