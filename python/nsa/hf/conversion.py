"""Dense decoders made sparse: the weights stay, gates are added.

phi is the mean, and all gates but that of the selected branch start almost closed. While the selected blocks and the
window cover the text, the logits are almost those of the dense model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .._arguments import check_type
from ..config import NSAConfig
from ..layer import BRANCHES
from .configuration import LAYER_TYPE
from .models import CAUSAL_MODELS, initial_phi

ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    model.__name__.removeprefix("Nsa"): (config.__bases__[1], config) for config, model in CAUSAL_MODELS.items()
}
"""Dense and sparse configuration of each architecture that can be converted."""

GATE_BIASES = {"cmp": -6.0, "slc": 4.0, "swa": -4.0}
"""Before the sigmoid. Those of selection and window add up to one, and over short texts both are dense attention."""

PRESETS = {"recipe": (NSAConfig.recipe(), "mlp"), "paper": (NSAConfig(), "mean")}


def convert(
    model: PreTrainedModel,
    *,
    nsa: dict[str, Any] | None = None,
    separate_kv: bool = False,
    dense_layers: Sequence[int] = (),
    phi: str | None = None,
    seed: int = 0,
    preset: str = "paper",
) -> PreTrainedModel:
    """A sparse model with the weights of a dense one, which stays as it is.

    Args:
        model: a LlamaForCausalLM, or that of Mistral, Qwen2 (and 2.5), Qwen3 or Qwen3Moe, or a
            Qwen3VLForConditionalGeneration, whose decoder becomes sparse.
        nsa: hyperparameters that differ from the preset's, by the names of NSAConfig.
        separate_kv: each branch gets a copy of the key and value projections; else the branches share one.
        dense_layers: numbers of the layers that keep full attention.
        phi: "mean", or "linear" or "mlp", which start as the mean and learn; None: the preset's.
        seed: of the gates' first layer and of what phi has beyond the mean.
        preset: "recipe", to train the result: the hyperparameters of `nsa.NSAConfig.recipe` and phi = "mlp". "paper":
            those of `nsa.NSAConfig` and phi = "mean". The model keeps its RoPE.

    Raises:
        ValueError: another architecture, or an option that does not fit it.
    """
    check_type("model", model, PreTrainedModel)
    check_type("separate_kv", separate_kv, bool)
    check_type("dense_layers", dense_layers, Sequence[int])
    check_type("seed", seed, int)
    if not -(2**32) < seed < 2**32:
        raise ValueError(f"seed = {seed}: must be above -2^32 and below 2^32")
    if not isinstance(nsa, dict | None):
        raise TypeError(f"nsa: {type(nsa).__name__}: must be a dict or None")
    for name, option in (("share_kv", "separate_kv"), ("phi", "phi")):
        if nsa and name in nsa:
            raise ValueError(f"nsa: {name} = {nsa[name]!r}: must be given as the argument {option}")
    options = preset_options(preset, nsa or {}, phi) | {"share_kv": not separate_kv}
    if getattr(model.config, "quantization_config", None):
        raise ValueError("quantization_config: must be absent")
    config = sparse_config(model.config, type(model).__name__, options, dense_layers)
    weights = model.state_dict()
    for name, tensor in weights.items():
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
            what = "on meta, as offloaded" if getattr(tensor, "is_meta", False) else type(tensor).__name__
            raise ValueError(f"model: {name}: {what}: must be a plain tensor in memory; nsa.convert takes a folder")
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            what = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"model: {name}: dtype {what}: must be float32, bfloat16, float16 or float64")
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"model: {name}: holds values that are not finite")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if config.tie_word_embeddings and head.weight is not embedding.weight:  # the checkpoint had a head of its own
        config.tie_word_embeddings = False
    with torch.device(model.device):
        result = CAUSAL_MODELS[type(config)]._from_config(config, dtype=model.dtype)
    parameters = dict(result.named_parameters(remove_duplicate=False))
    missing = set(parameters)

    def take(name: str, value: Tensor) -> None:
        parameters[name].data = value.to(parameters[name].device, copy=True)
        missing.discard(name)

    for name, tensor in weights.items():
        for target, value in targets(config, name, tensor):
            if target not in parameters or value.shape != parameters[target].shape:
                raise ValueError(f"model: {name}: {tuple(tensor.shape)}: not a tensor of the architecture")
            take(target, value)
    for name, tensor in added_tensors(result, seed):
        take(name, tensor.to(result.dtype))
    if missing:
        raise ValueError(f"model: {sorted(missing)[0]}: missing")
    result.generation_config = copy.deepcopy(model.generation_config)
    return result.train(model.training)


def preset_options(preset: str, nsa: dict[str, Any], phi: str | None) -> dict[str, Any]:
    """Fields of a configuration's `nsa` in a converted model, without share_kv; what is given replaces the preset's."""
    if preset not in PRESETS:
        raise ValueError(f"preset = {preset!r}: must be {' or '.join(PRESETS)}")
    made, default_phi = PRESETS[preset]
    return {**made.__dict__, **nsa, "phi": default_phi if phi is None else phi}


def sparse_config(config: PreTrainedConfig, architecture: str, nsa: dict[str, Any], dense_layers: Iterable[int]) -> Any:
    """The configuration of the converted model. Raises ValueError for what cannot be converted."""
    if architecture not in ARCHITECTURES or type(config) is not ARCHITECTURES[architecture][0]:
        raise ValueError(f"architecture = {architecture}: must be {' or '.join(ARCHITECTURES)}")
    kept = config.to_dict()
    decoder = kept["text_config"] if "text_config" in kept else kept
    for made in ("model_type", "architectures", "layer_types", "transformers_version"):
        kept.pop(made, None)
        decoder.pop(made, None)
    decoder |= {"nsa": nsa, "dense_layers": list(dense_layers)}
    return ARCHITECTURES[architecture][1](**kept)


def layers_prefix(config: PreTrainedConfig) -> str:
    """What the names of the decoder's layers begin with."""
    return "model.layers." if config.get_text_config() is config else "model.language_model.layers."


def targets(config: PreTrainedConfig, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Targets of a tensor of the dense model: itself, or a copy per branch."""
    decoder, prefix, parts = config.get_text_config(), layers_prefix(config), name.split(".")
    if not name.startswith(prefix) or decoder.nsa["share_kv"] or parts[-2] not in ("k_proj", "v_proj", "k_norm"):
        return [(name, tensor)]
    if decoder.layer_types[int(parts[prefix.count(".")])] != LAYER_TYPE:
        return [(name, tensor)]
    return [(".".join((*parts[:-1], branch, parts[-1])), tensor.clone()) for branch in BRANCHES]


@torch.no_grad()
def added_tensors(
    model: PreTrainedModel, seed: int, layers: Iterable[int] | None = None
) -> Iterable[tuple[str, Tensor]]:
    """Gates and phi of the sparse layers (default: all), float32; `model` may be on the meta device."""
    config: Any = model.config.get_text_config()
    for i in range(config.num_hidden_layers) if layers is None else layers:
        if config.layer_types[i] != LAYER_TYPE:
            continue
        prefix = f"{layers_prefix(model.config)}{i}.self_attn."
        attention: Any = model.get_submodule(prefix[:-1])
        with torch.device("cpu"), torch.random.fork_rng(devices=()):
            torch.manual_seed(seed * config.num_hidden_layers + i)
            first, last = attention.gate[0].weight.shape, attention.gate[2].weight.shape
            yield f"{prefix}gate.0.weight", torch.randn(first) * config.initializer_range
            yield f"{prefix}gate.0.bias", torch.zeros(first[0])
            yield f"{prefix}gate.2.weight", torch.zeros(last)
            biases = torch.tensor([GATE_BIASES[branch] for branch in BRANCHES])
            yield f"{prefix}gate.2.bias", biases.repeat(config.num_attention_heads)
            for which in ("phi_k", "phi_v"):
                for part, value in initial_phi(getattr(attention, which)):
                    yield f"{prefix}{which}.{part}", value


def on_a_cpu(model: PreTrainedModel) -> PreTrainedModel:
    """The model, cast to float32 if it is float16, which the operators on a CPU do not take."""
    return model.float() if model.dtype == torch.float16 else model


def compare_logits(expected: Tensor, given: Tensor) -> dict[str, float]:
    """Largest difference, mean KL divergence and share of equal best tokens of logits (..., vocabulary)."""
    p, q = expected.log_softmax(-1), given.log_softmax(-1)
    return {
        "max_difference": (expected - given).abs().max().item(),
        "kl": (p.exp() * (p - q)).sum(-1).mean().item(),
        "top1": (expected.argmax(-1) == given.argmax(-1)).float().mean().item(),
    }
