"""Learning rates of a model with compression functions."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ._arguments import checked
from .compression import CompressionFunction

_FAN_IN = 128
"""Number of inputs up to which a matrix of phi learns at the full rate."""

_checked: WeakSet[torch.optim.Optimizer] = WeakSet()


def learning_rate_scales(modules: Iterable[nn.Module]) -> dict[int, float]:
    """Learning rate of each parameter of phi over the common one, by the id of the parameter."""
    scales: dict[int, float] = {}
    for module in modules:
        if "_flat_param" in module._parameters:
            raise ValueError("model: parameters flattened by FSDP: must have use_orig_params=True")
        if isinstance(module, CompressionFunction):
            for name, parameter in module.named_parameters():
                scales[id(parameter)] = min(1.0, _FAN_IN / module.inputs_of(name))
    return scales


@checked
def parameter_groups(model: nn.Module, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """Groups for an optimizer of Adam's kind: torch.optim.AdamW(parameter_groups(model, lr, weight_decay)).

    phi's matrices have l*D inputs and small initial values, so that a step of lr would undo the mean they start as:
    w1 with pe and b1, and w2 with b2, learn at lr * min(1, 128 / inputs). Only weights of two dimensions decay. These
    are the rules of `nsa train`. Parameters without requires_grad are left out; one used twice is in one group.

    The first step of another optimizer than SGD warns if phi learns faster than by these rules, or decays.

    Raises:
        ValueError: FullyShardedDataParallel has flattened the parameters, without use_orig_params.
        TypeError: an argument of another type.
    """
    scales = learning_rate_scales(model.modules())
    dense = (module for module in model.modules() if isinstance(module, (nn.Linear, nn.Embedding)))
    matrices = {id(module._parameters.get("weight")) for module in dense}  # also where sharding flattens them
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        kind = name.split(".")[-1]
        if parameter.requires_grad:
            decays = id(parameter) in matrices or (parameter.dim() == 2 and kind == "weight")
            key = scales.get(id(parameter), 1.0), weight_decay if decays else 0.0
            groups.setdefault(key, []).append(parameter)
    return [{"params": group, "lr": lr * scale, "weight_decay": decay} for (scale, decay), group in groups.items()]


def _check_groups(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Warns at an optimizer's first step if phi learns faster than `parameter_groups` has it, or decays."""
    if torch.compiler.is_compiling() or optimizer in _checked:
        return
    _checked.add(optimizer)
    if isinstance(optimizer, torch.optim.SGD):  # the rules are for steps that do not grow with the gradient
        return
    scales = learning_rate_scales(m for m in CompressionFunction._instances if "_flat_param" not in m._parameters)
    common, of_phi = 0.0, []
    for group in optimizer.param_groups:
        rate = float(group.get("initial_lr", group.get("lr")) or 0.0)  # a warm-up starts at lr = 0
        trained = [id(parameter) for parameter in group["params"] if parameter.requires_grad]
        if any(key not in scales for key in trained):
            common = max(common, rate)
        of_phi += [(rate, scales[key], float(group.get("weight_decay", 0.0))) for key in trained if key in scales]
    for rate, scale, decay in of_phi:
        if decay or (common and rate > 1.001 * scale * common):
            warnings.warn(
                f"phi has lr = {rate:g} and weight_decay = {decay:g} in the optimizer: must be at most "
                f"{scale * (common or rate):g} and 0. nsa.parameter_groups makes such groups, "
                "in a Trainer nsa.hf.NsaTrainerMixin",
                stacklevel=3,
            )
            return


register_optimizer_step_pre_hook(_check_groups)
