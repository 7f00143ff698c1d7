"""Two gloo processes: DDP, FSDP2 and tensor parallelism over KV heads train as one process does."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import nsa

CFG = nsa.NSAConfig(kernel_size=8, kernel_stride=4, block_size=16, topk=4, window_size=20)
WAYS = ("ddp", "fsdp", "fsdp, phi per head", "tensor", "tensor, phi per head")


class Model(nn.Module):
    def __init__(self, way):
        super().__init__()
        torch.manual_seed(1)
        options = {"qk_norm": True, "phi_per_kv_head": "per head" in way}
        self.layers = nn.ModuleList(nsa.NativeSparseAttention(32, 4, 2, 16, cfg=CFG, **options) for _ in range(2))
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                nn.init.normal_(parameter, std=0.1)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def batches():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(3, 4, 50, 32, generator=generator)


def train(model, part, full_gradients):
    """The first step's gradients and the losses of three; `part`: of a batch, the rows of this process."""
    optimizer = torch.optim.AdamW(nsa.parameter_groups(model, 1e-2, 0.1))
    losses, first = [], None
    for batch in batches():
        x = part(batch)
        loss = (model(x).roll(1, 1) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        first = full_gradients() if first is None else first
        optimizer.step()
        losses.append(loss.detach())
    return first, torch.stack(losses)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def split_over_heads(model, mesh):
    """Tensor parallelism by torch's plans; returns the names of sharded parameters and the dimension they lie along."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    along = {}
    for i, layer in enumerate(model.layers):
        branches = [f"{x}_proj.{branch}" for x in "kv" for branch in ("cmp", "slc", "swa")]
        plan = {name: ColwiseParallel() for name in ("q_proj", *branches, "gate.2")} | {"o_proj": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)
        layer.num_heads //= 2
        layer.num_kv_heads //= 2
        for phi_name in ("phi_k", "phi_v"):
            phi = getattr(layer, phi_name)
            for name, parameter in list(phi.named_parameters()):
                if parameter.shape[0] > 1:  # a row for each KV head
                    setattr(phi, name, nn.Parameter(parameter.detach().chunk(2)[mesh.get_local_rank()].clone()))
                    along[f"layers.{i}.{phi_name}.{name}"] = 0
                else:
                    parameter.register_hook(total)
        for name, parameter in layer.named_parameters():
            if "_norm" in name:
                parameter.register_hook(total)
    return along


def total(gradient):
    """Each process has the share of its heads."""
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    return gradient


def whole(name, gradient, along):
    if isinstance(gradient, torch.distributed.tensor.DTensor):
        return gradient.full_tensor()
    if name in along:
        parts = [torch.empty_like(gradient) for _ in range(2)]
        dist.all_gather(parts, gradient.contiguous())
        return torch.cat(parts, along[name])
    return gradient.clone()


def work(rank, way, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (2,))
    model, along = Model(way), {}
    trained = model
    if way == "ddp":
        trained = nn.parallel.DistributedDataParallel(model)
    elif way.startswith("fsdp"):
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        along = split_over_heads(model, mesh)
    split = not way.startswith("tensor")

    def part(batch):
        return batch.chunk(2)[rank] if split else batch

    first, losses = train(
        trained, part, lambda: {name: whole(name, p.grad, along) for name, p in model.named_parameters()}
    )
    if split:
        dist.all_reduce(losses)
        losses /= 2
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/checkpoint")
    parameters = {name: whole(name, p.detach(), along) for name, p in model.named_parameters()}
    if rank == 0:
        torch.save((first, losses, parameters), f"{folder}/result.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("way", WAYS)
def test_as_one_process(way, tmp_path):
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "ignore", __file__, way, str(tmp_path)]
    running = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    model = Model(way)
    expected, losses = train(model, lambda batch: batch, lambda: gradients(model))
    errors = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(errors)[-4000:]
    found, found_losses, parameters = torch.load(tmp_path / "result.pt")
    torch.testing.assert_close(found_losses, losses, rtol=1e-5, atol=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name
    if way.startswith("fsdp"):  # the sharded checkpoint in one process
        state = {"model": Model(way).state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / "checkpoint")
        assert all(torch.equal(state["model"][name], value) for name, value in parameters.items())


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    work(int(sys.argv[3]), sys.argv[1], sys.argv[2])
    os._exit(0)  # gloo's threads sometimes outlive the interpreter's end, which then aborts
