"""What training needs beyond transformers' Trainer: learning rates of phi, and the selector loss."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from .._arguments import check_type
from ..layer import NativeSparseAttention
from ..optimizer import learning_rate_scales
from ..selector import selector_loss
from .configuration import Mixin


def lora_fields(model: nn.Module) -> dict[str, Any]:
    """Fields of PEFT's LoraConfig that adapt the linear layers of a sparse model and train its phi.

    Give them to it as keywords::

        peft.get_peft_model(model, peft.LoraConfig(r=16, **nsa.hf.lora_fields(model)))

    phi has no linear layers, so that adapters alone leave it, and the block selector, as they are.
    """
    check_type("model", model, nn.Module)
    sparse = [module for module in model.modules() if isinstance(module, NativeSparseAttention)]
    learns = any(True for module in sparse for _ in module.phi_k.parameters())
    return {"target_modules": "all-linear", "modules_to_save": ["phi_k", "phi_v"] if learns else None}


class NsaTrainerMixin(Mixin):
    """Trains sparse models in a Trainer of transformers or TRL: class SparseTrainer(NsaTrainerMixin, Trainer): pass.

    phi learns at the rates of `nsa.parameter_groups` and without weight decay; an optimizer given to the Trainer stays
    as it is. In training, the selector loss is added to the loss of the Trainer.

    Attributes:
        selector_loss_weight: factor of the selector loss; 0: none.
        selector_queries: `selector_queries` of the layers that have 0.
    """

    selector_loss_weight: float = 0.1
    selector_queries: int = 128

    def create_optimizer(self, *arguments: Any, **options: Any) -> torch.optim.Optimizer:
        """The Trainer's optimizer, with groups for phi."""
        given = self.optimizer is not None
        optimizer: torch.optim.Optimizer = super().create_optimizer(*arguments, **options)
        if given:
            return optimizer
        model = next(iter((*arguments, *options.values())), None)
        scales = learning_rate_scales((self.model if model is None else model).modules())
        for group in list(optimizer.param_groups):
            parts: dict[float, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                parts.setdefault(scales.get(id(parameter), 0.0), []).append(parameter)
            group["params"] = parts.pop(0.0, [])
            for scale, phi in parts.items():
                optimizer.add_param_group({**group, "params": phi, "lr": group["lr"] * scale, "weight_decay": 0.0})
        return optimizer

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The Trainer's loss, plus that of the selector in training."""
        layers = self._selectors(model) if model.training and self.selector_loss_weight else []
        for layer in layers:
            layer.selector_queries = layer.selector_queries or self.selector_queries
            layer.keep_selector_loss, layer.selector_loss = True, None
        # Outputs may cost another forward.
        result = super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        loss, outputs = result if return_outputs else (result, None)
        if layers:
            weight = self.selector_loss_weight
            scaled = self.loss_is_scaled_for_ga
            if scaled is None:  # as Trainer.training_step decides whether to divide
                normalized = self.model_accepts_loss_kwargs and num_items_in_batch is not None
                scaled = normalized or self.compute_loss_func is not None
            if scaled:
                weight /= self.current_gradient_accumulation_steps
            loss = loss + weight * selector_loss(model).to(loss.device)
        return (loss, outputs) if return_outputs else loss

    @staticmethod
    def _selectors(model: nn.Module) -> list[NativeSparseAttention]:
        """The layers whose selector has weights to train."""
        sparse = [module for module in model.modules() if isinstance(module, NativeSparseAttention)]
        trained = [m for m in sparse if m.phi_k.kind != "mean" or isinstance(m.k_proj, nn.ModuleDict)]
        if sparse and not trained:
            warnings.warn(
                "model: no selector loss, as phi = 'mean' with share_kv has no weights to train: convert with "
                "phi='mlp', or set selector_loss_weight = 0",
                stacklevel=3,
            )
        return trained
