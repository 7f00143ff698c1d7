"""Two processes: DDP, FSDP2 and tensor parallelism over KV heads train as one process does.

On CPUs over gloo; with NSA_PARALLEL_DEVICE=cuda on two GPUs over NCCL.
"""

import os
import subprocess
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import nsa
from torchrun import BACKENDS, DEVICE, ENVIRONMENT, RANKS

D = 16 if DEVICE == "cpu" else 64
CLOSE = 1e-5 if DEVICE == "cpu" else 5e-5  # of float32 sums in another order, as in test_cuda.py
CFG = nsa.NSAConfig(kernel_size=8, kernel_stride=4, block_size=16, topk=4, window_size=20)
WAYS = ("ddp", "fsdp", "fsdp, phi per head", "fsdp, phi alone", "tensor", "tensor, phi per head")

REFUSED = [
    "1.num_kv_heads = 3: must be a multiple of the mesh's 2 ranks",
    "num_kv_heads = 3: must be a multiple of the mesh's 2 ranks",
    "layer_or_model: its parameters: must not be divided already",
    "layer_or_model: the layer: Own: must not have a forward of its own (nsa.hf's have a tp_plan)",
    "layer_or_model: Linear: has no nsa.NativeSparseAttention in it",
    "mesh: int: must be torch.DeviceMesh",
    "selector_queries = 8: must be 0 with tensor parallelism, where a rank has some of the heads",
]


class Model(nn.Module):
    def __init__(self, way):
        super().__init__()
        torch.manual_seed(1)
        options = {"qk_norm": True, "phi_per_kv_head": "per head" in way}
        self.layers = nn.ModuleList(nsa.NativeSparseAttention(32, 4, 2, D, cfg=CFG, **options) for _ in range(2))
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                nn.init.normal_(parameter, std=0.1)
        self.to(DEVICE)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def batches():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(3, 4, 50, 32, generator=generator).to(DEVICE)


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


def whole(t):
    return t.full_tensor() if isinstance(t, torch.distributed.tensor.DTensor) else t.clone()


def wrong_calls(mesh):
    """What shard_heads says to what it cannot divide."""
    odd = nn.ModuleList([nsa.NativeSparseAttention(32, 4, 2, 16, cfg=CFG), nsa.NativeSparseAttention(32, 3, 3, 16)])
    before = {name: (id(parameter), parameter.shape) for name, parameter in odd.named_parameters()}
    divided = nsa.NativeSparseAttention(32, 4, 2, 16, cfg=CFG)
    nsa.parallel.shard_heads(divided, mesh)
    own = type("Own", (nsa.NativeSparseAttention,), {"forward": lambda self, x: x})(32, 4, 2, 16)
    told = []
    learns = nsa.NativeSparseAttention(32, 4, 2, D, cfg=CFG, selector_queries=8).to(DEVICE)
    nsa.parallel.shard_heads(learns, mesh)
    refused = [(odd, mesh), (odd[1], mesh), (divided, mesh), (own, mesh), (nn.Linear(2, 2), mesh), (odd, 2)]
    for call in (*(partial(nsa.parallel.shard_heads, *given) for given in refused), partial(learns, batches()[0])):
        try:
            call()
        except (ValueError, TypeError) as error:
            told.append(str(error))
    assert before == {name: (id(parameter), parameter.shape) for name, parameter in odd.named_parameters()}
    assert odd[0].num_kv_heads == 2
    return told


def sums(model, x):
    """How often forward and backward of a layer sum over the ranks."""
    from torch.distributed.tensor.debug import CommDebugMode

    counts = []
    with CommDebugMode() as forward:
        loss = model.layers[0](x.clone().requires_grad_()).square().mean()
    with CommDebugMode() as backward:
        loss.backward()
    for mode in (forward, backward):
        counts.append(mode.get_total_counts())
    assert all(p.grad.placements == p.placements for p in model.layers[0].parameters())
    model.zero_grad()
    return counts


def work(rank, way, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(BACKENDS, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    mesh = init_device_mesh(DEVICE, (2,))
    model = Model(way)
    trained = model
    if way == "ddp":
        trained = nn.parallel.DistributedDataParallel(model)
    elif way.startswith("fsdp"):
        for layer in model.layers:
            for phi in (layer.phi_k, layer.phi_v) if "alone" in way else ():
                fully_shard(phi, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        nsa.parallel.shard_heads(model, mesh)
        torch.save((sums(model, batches()[0]), wrong_calls(mesh)), f"{folder}/tensor-{rank}.pt")
    split = not way.startswith("tensor")

    def part(batch):
        return batch.chunk(2)[rank] if split else batch

    first, losses = train(trained, part, lambda: {name: whole(p.grad) for name, p in model.named_parameters()})
    if split:
        dist.all_reduce(losses)
        losses /= 2
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/checkpoint")
    parameters = {name: whole(p.detach()) for name, p in model.named_parameters()}
    if rank == 0:
        torch.save((first, losses, parameters), f"{folder}/result.pt")
    dist.barrier()
    # What ends a process group joins gloo's threads, which may wait for the interpreter's lock or outlive its end.
    os._exit(0)


@pytest.mark.skipif(RANKS < 2, reason=f"{RANKS} GPUs")
@pytest.mark.parametrize("way", WAYS)
def test_as_one_process(way, tmp_path):
    environment = os.environ | ENVIRONMENT
    command = [sys.executable, "-W", "ignore", __file__, way, str(tmp_path)]
    running = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    try:
        model = Model(way)
        expected, losses = train(model, lambda batch: batch, lambda: gradients(model))
        errors = [process.communicate(timeout=120)[1] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [process.returncode for process in running] == [0, 0], "\n".join(errors)[-4000:]
    found, found_losses, parameters = torch.load(tmp_path / "result.pt", map_location=DEVICE)
    torch.testing.assert_close(found_losses, losses, rtol=CLOSE, atol=CLOSE)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= CLOSE * gradient.abs().max(), name
    if way != "ddp":  # the sharded checkpoint in one process
        state = {"model": Model(way).state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / "checkpoint")
        assert all(torch.equal(state["model"][name], value) for name, value in parameters.items())
    if way.startswith("tensor"):
        for rank in (0, 1):
            counts, told = torch.load(tmp_path / f"tensor-{rank}.pt")
            # The output; the gradients of x, of gate.0's output, of four norms and of phi's ten parameters, if shared.
            assert counts == [1, 6 if "per head" in way else 16]
            assert told == REFUSED


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    work(int(sys.argv[3]), sys.argv[1], sys.argv[2])
