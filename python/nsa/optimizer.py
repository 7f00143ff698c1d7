"""Learning rates of a model with compression functions."""

from __future__ import annotations

from typing import Any

from torch import nn

from ._arguments import checked
from .compression import CompressionFunction

_FAN_IN = 128
"""Number of inputs up to which a matrix of phi learns at the full rate."""


@checked
def parameter_groups(model: nn.Module, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """Groups for an optimizer of Adam's kind: torch.optim.AdamW(parameter_groups(model, lr, weight_decay)).

    phi's matrices have l*D inputs and small initial values, so that a step of lr would undo the mean they start as:
    w1 with pe and b1, and w2 with b2, learn at lr * min(1, 128 / inputs). Only weights of two dimensions decay. These
    are the rules of `nsa train`. Parameters without requires_grad are left out; one used twice is in one group.
    """
    scales: dict[int, float] = {}
    for module in model.modules():
        if isinstance(module, CompressionFunction):
            for name, parameter in module.named_parameters(recurse=False):
                matrix = module.get_parameter("w2" if name.endswith("2") else "w1")
                scales[id(parameter)] = min(1.0, _FAN_IN / matrix.shape[1])
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = parameter.dim() == 2 and name.split(".")[-1] == "weight"
            key = scales.get(id(parameter), 1.0), weight_decay if decays else 0.0
            groups.setdefault(key, []).append(parameter)
    return [{"params": group, "lr": lr * scale, "weight_decay": decay} for (scale, decay), group in groups.items()]
