"""FSDP2 around layers of NSA: two processes on CPUs train as one would, each with half of the parameters.

    torchrun --standalone --nproc-per-node 2 examples/fsdp.py

On GPUs: the back end "nccl", a device of its own for each process, `.to("cuda")`.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import nsa

CFG = nsa.NSAConfig(kernel_size=8, kernel_stride=4, block_size=16, topk=4, window_size=20)


class Model(nn.Module):
    """Two layers of attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)  # the same weights on every rank
        self.layers = nn.ModuleList(nsa.NativeSparseAttention(32, 4, 2, 16, cfg=CFG) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Attention with residuals."""
        for layer in self.layers:
            x = x + layer(x)
        return x


def train(model: nn.Module, rank: int, ranks: int) -> Tensor:
    """The losses of this rank's rows: predict the token before."""
    optimizer = torch.optim.AdamW(nsa.parameter_groups(model, 1e-2, 0.1))
    generator, losses = torch.Generator().manual_seed(2), []
    batch = torch.randn(4, 100, 32, generator=generator)
    for _ in range(10):
        x = batch.chunk(ranks)[rank]
        loss = (model(x)[:, 1:] - x[:, :-1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def main() -> None:
    """Trains on all ranks, then the same on each alone to compare."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = train(model, rank, ranks)
    dist.all_reduce(losses)
    losses /= ranks

    alone = train(Model(), 0, 1)
    torch.testing.assert_close(losses, alone, rtol=1e-4, atol=1e-4)
    assert losses[-1] < 0.9 * losses[0]
    if rank == 0:
        weight = model.layers[0].get_parameter("q_proj.weight")
        assert isinstance(weight, torch.distributed.tensor.DTensor)
        print(f"q_proj: {tuple(weight.shape)}, on this rank {tuple(weight.to_local().shape)}")
        print(
            f"loss over {ranks} ranks: {losses[0]:.4f} -> {losses[-1]:.4f}; in one process: {alone[-1]:.4f}", flush=True
        )
    dist.barrier()
    # The end of a process group joins gloo's threads, which may wait for the interpreter. So leave while it lives.
    os._exit(0)


if __name__ == "__main__":
    main()
