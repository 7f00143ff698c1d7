"""Layers whose KV heads are divided over several processes (tensor parallelism), by torch's own plans."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from .._arguments import check_type
from ..compression import CompressionFunction
from ..config import CompressionWeights
from .exchange import agree


def shard_heads(layer_or_model: nn.Module, mesh: DeviceMesh) -> None:
    """Divides the KV heads of nsa.NativeSparseAttention layers, and the query heads of each, over a mesh's ranks.

    Every rank calls it with a layer, or a model that has layers, whose parameters have their values: those of the
    mesh's first rank are taken. Afterwards a layer's parameters are DTensors on the mesh: q_proj, k_proj, v_proj,
    gate.2 and phi per KV head by rows, o_proj by columns; what all heads share (gate.0, q_norm, k_norm, one phi for
    all heads) is on every rank, and its gradient is the sum over the ranks. num_heads and num_kv_heads become the
    rank's. x and the output are replicated: forward and backward have one all-reduce each.
    indices, given or returned, are those of the rank's heads. A model's other parameters stay as they are.

    A layer with selector_queries > 0 then refuses to train. A rank has complete KV heads, because a block's
    importance is the sum over the query heads of one. Exploration noise draws by head within a rank, so otherwise
    than in one process.

    Args:
        layer_or_model: the layer, or a module with layers in it; changed in place. Before fully_shard and before the
            optimizer.
        mesh: of one dimension, whose size divides each layer's KV heads.

    Raises:
        ValueError: a mesh of several dimensions, no layer, a layer that is divided already or has another forward (as
            those of nsa.hf, whose models transformers divides by their tp_plan), KV heads that the mesh does not
            divide, or layers that differ between ranks. Every rank raises it; nothing has changed then.
        TypeError: an argument is of another type; on the other ranks ValueError.
    """
    from ..layer import NativeSparseAttention  # which is imported while this package is

    check_type("mesh", mesh, DeviceMesh)
    if mesh.ndim != 1:
        raise ValueError(f"mesh: {mesh.ndim} dimensions: must have one; take mesh[name]")
    layers: dict[str, NativeSparseAttention] = {}
    ranks = mesh.size()

    def describe() -> dict[str, Any]:
        check_type("layer_or_model", layer_or_model, nn.Module)
        found = {n: layer for n, layer in layer_or_model.named_modules() if isinstance(layer, NativeSparseAttention)}
        if not found:
            raise ValueError(f"layer_or_model: {type(layer_or_model).__name__}: has no nsa.NativeSparseAttention in it")
        layers.update(found)
        described: dict[str, Any] = {}
        for name, layer in layers.items():
            where = f"{name}.num_kv_heads" if name else "num_kv_heads"
            if any(isinstance(parameter, DTensor) for parameter in layer.parameters()):
                raise ValueError(f"layer_or_model: {name or 'its parameters'}: must not be divided already")
            if type(layer).forward is not NativeSparseAttention.forward:
                what = f"layer_or_model: {name or 'the layer'}: {type(layer).__name__}"
                raise ValueError(f"{what}: must not have a forward of its own (nsa.hf's have a tp_plan)")
            if layer.num_kv_heads % ranks:
                raise ValueError(f"{where} = {layer.num_kv_heads}: must be a multiple of the mesh's {ranks} ranks")
            described[where] = layer.num_kv_heads
            for parameter_name, p in layer.named_parameters(name):
                described[parameter_name] = (tuple(p.shape), p.dtype, p.device.type, p.requires_grad)
        return described

    agree(mesh.get_group(), describe)
    for layer in layers.values():
        plan: dict[str, ParallelStyle] = {
            "gate.0": _Replicated(),
            "gate.2": ColwiseParallel(),
            "o_proj": RowwiseParallel(),
        }
        for name, module in layer.named_modules():
            if name.startswith(("q_proj", "k_proj", "v_proj")) and isinstance(module, nn.Linear):
                plan[name] = ColwiseParallel()
            elif isinstance(module, nn.RMSNorm):
                plan[name] = _SharedNorm()
            elif isinstance(module, CompressionFunction):
                plan[name] = _Compression()
        parallelize_module(layer, mesh, plan)
        layer.register_forward_pre_hook(_Input(mesh), with_kwargs=True)
        layer.ranks = ranks
        layer.num_heads //= ranks
        layer.num_kv_heads //= ranks


def _replicated(x: Any, mesh: DeviceMesh) -> Any:
    """A tensor that every rank has, as DTensor."""
    plain = isinstance(x, Tensor) and not isinstance(x, DTensor)
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False) if plain else x


class _Input:
    """Makes x a DTensor, so that the gradients that the projections give it are added before they are summed."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        named = {name: _replicated(value, self.mesh) if name == "x" else value for name, value in named.items()}
        return tuple(_replicated(x, self.mesh) for x in args[:1]) + args[1:], named


class _SumGradient(torch.autograd.Function):
    """The tensor itself; its gradient is summed over the ranks, in float32 at least."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.to(wide, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.mesh.get_group())
        return total.to(gradient.dtype), None


def _of_this_rank(parameter: Tensor) -> Tensor:
    """The part of a parameter that a rank's heads use: its rows of a sharded one, or all of a replicated one."""
    assert isinstance(parameter, DTensor)
    local: Tensor = parameter.to_local()
    return local if parameter.placements[0].is_shard() else _SumGradient.apply(local, parameter.device_mesh)  # type: ignore[no-untyped-call]


class _Replicated(ParallelStyle):
    """A Linear that every rank computes in full."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def input(_: nn.Module, inputs: tuple[DTensor], mesh: DeviceMesh) -> Any:
            x = inputs[0].to_local(grad_placements=[Partial()])
            if x.requires_grad and mesh.get_local_rank():
                x.register_hook(torch.zeros_like)  # all ranks have the full gradient: only the first rank's counts
            return _replicated(x, mesh)

        return distribute_module(
            module, device_mesh, input_fn=input, output_fn=lambda _, output, mesh: output.to_local()
        )


class _SharedNorm(ParallelStyle):
    """An RMSNorm of a rank's heads, with one weight for all."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.RMSNorm)

        def forward(x: Tensor) -> Tensor:
            return nn.functional.rms_norm(x, tuple(module.normalized_shape), _of_this_rank(module.weight), module.eps)

        module.forward = forward  # type: ignore[method-assign]
        return distribute_module(module, device_mesh)


class _Compression(ParallelStyle):
    """Phi with a row for each KV head, which go with their heads, or with one row for all."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, CompressionFunction)

        def partition(_: str, phi: nn.Module, mesh: DeviceMesh) -> None:
            for name, t in list(phi.named_parameters()):
                placements = [Shard(0) if t.shape[0] > 1 else Replicate()]
                divided = nn.Parameter(distribute_tensor(t, mesh, placements), requires_grad=t.requires_grad)
                phi.register_parameter(name, divided)

        def output(_: nn.Module, weights: CompressionWeights, mesh: DeviceMesh) -> Any:
            tensors = (None if t is None else _of_this_rank(t) for t in weights.as_arguments()[1:])
            return CompressionWeights(weights.kind, *tensors)

        return distribute_module(module, device_mesh, partition, output_fn=output)
