"""A decoder of bytes, trained on long sequences by many processes: dp x cp x tp of them under torchrun.

    torchrun --standalone --nproc-per-node 4 examples/train_long.py --cp 2 --tp 2 --out runs/long
    torchrun --standalone --nproc-per-node 2 examples/train_long.py --cp 2 --out runs/long --steps 40 --resume

dp divides the sequences of a batch, cp the tokens of a sequence, tp the heads and the units of the MLPs; FSDP2 divides
parameters and optimizer state over dp x cp. A process takes the GPU of its LOCAL_RANK, or the CPU where there is none.
The data of a step depends only on its number, so a run resumes from its last checkpoint on any number of processes.
"""

import argparse
import os
import shutil
import sysconfig
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

import nsa
from nsa.parallel import ContextParallel, shard_heads


def count(text: str) -> int:
    """An integer of at least 1; argparse names the option of any other text."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be an integer of at least 1")
    return int(text)


def files(data: Path | None) -> list[Path]:
    """The files that a run reads."""
    return [data] if data else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"dp": 1, "cp": 1, "tp": 1, "tokens": 2048, "batch": 2, "steps": 20, "save-every": 1000}
    sizes |= {"layers": 2, "width": 64, "heads": 4, "kv-heads": 2, "head-dim": 32}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=count, default=default, metavar="N", help=f"default {default}")
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16; parameters stay float32")
    parser.add_argument("--recompute", action="store_true", help="keep only the blocks' inputs for the backward")
    parser.add_argument("--data", type=Path, help="a file of bytes (default: modules of Python's standard library)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint in --out")
    options = parser.parse_args(given)
    if options.dp * options.cp * options.tp != (ranks := dist.get_world_size()):
        parser.error(f"--dp {options.dp} x --cp {options.cp} x --tp {options.tp}: must be the {ranks} processes")
    if options.batch % options.dp:
        parser.error(f"--batch {options.batch}: must be a multiple of --dp {options.dp}")
    if options.heads % options.kv_heads:
        parser.error(f"--heads {options.heads}: must be a multiple of --kv-heads {options.kv_heads}")
    if options.data and not options.data.is_file():
        parser.error(f"--data {options.data}: must be a file")
    if options.tokens >= (size := sum(file.stat().st_size for file in files(options.data))):
        parser.error(f"--tokens {options.tokens}: must be fewer than the {size} bytes of the data")
    if bool(saved(options.out)) != options.resume:
        parser.error(f"--out {options.out}: must have checkpoints with --resume, and none without")
    return options


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width, sizes = options.width, (options.heads, options.kv_heads, options.head_dim)
        self.attention = nsa.NativeSparseAttention(width, *sizes, qk_norm=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, options.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.head = nn.Sequential(nn.RMSNorm(options.width), nn.Linear(options.width, 256))
        self.recompute = options.recompute

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def divided(model: Decoder, mesh: DeviceMesh, options: argparse.Namespace) -> ContextParallel:
    """Divides heads and units over tp, then parameters over dp x cp; returns how sequences are divided over cp."""
    context, sharded = ContextParallel(mesh["cp"]), mesh["dp", "cp"]._flatten("dp_cp")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if options.bfloat16 else MixedPrecisionPolicy()
    mesh._flatten("all")  # for sums over all ranks in one go
    if options.tp > 1:
        shard_heads(model, mesh["tp"])
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention.context_parallel = context if options.cp > 1 else None
        if options.tp > 1:
            parallelize_module(block.mlp, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(block, mesh=sharded, mp_policy=policy)
    fully_shard(model, mesh=sharded, mp_policy=policy)
    return context


def clip(model: nn.Module, most: float) -> None:
    """Clips by the norm of all gradients; those of different meshes cannot go into one call of torch."""
    of_mesh: dict[DeviceMesh, list[Tensor]] = {}
    for parameter in model.parameters():
        assert isinstance(parameter.grad, DTensor)
        of_mesh.setdefault(parameter.grad.device_mesh, []).append(parameter.grad)
    norms = [get_total_norm(gradients, foreach=False) for gradients in of_mesh.values()]
    norm = torch.stack([norm.full_tensor() for norm in norms if isinstance(norm, DTensor)]).norm()
    clip_grads_with_norm_(model.parameters(), most, norm, foreach=False)


def saved(out: Path) -> list[int]:
    """The steps whose checkpoints are whole."""
    steps = (path.name.removeprefix("step-") for path in out.glob("step-*"))
    return sorted(int(step) for step in steps if step.isdigit())


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Contents of a checkpoint: this rank's parts, under the full model's names."""
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def save(model: nn.Module, optimizer: torch.optim.Optimizer, out: Path, step: int) -> None:
    """Writes step-N.tmp on all ranks, then names it step-N: what has that name is whole."""
    unfinished = out / f"step-{step}.tmp"
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
    dist.barrier()
    dcp.save(state_of(model, optimizer), checkpoint_id=unfinished)  # type: ignore[attr-defined]
    dist.barrier()
    if dist.get_rank() == 0:
        unfinished.rename(out / f"step-{step}")


def load(model: nn.Module, optimizer: torch.optim.Optimizer, out: Path) -> int:
    """Loads the last checkpoint, of whatever number of ranks; returns its step."""
    state, step = state_of(model, optimizer), saved(out)[-1]
    dcp.load(state, checkpoint_id=out / f"step-{step}")  # type: ignore[attr-defined]
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return step


def train(options: argparse.Namespace) -> list[float]:
    """The loss of each step, over all ranks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (options.dp, options.cp, options.tp), mesh_dim_names=("dp", "cp", "tp"))
    torch.manual_seed(1)  # the same weights on every rank
    model = Decoder(options).to(device)
    context = divided(model, mesh, options)
    # torch's foreach implementation refuses DTensors of several meshes in one list.
    optimizer = torch.optim.AdamW(nsa.parameter_groups(model, 3e-3, 0.1), foreach=False)
    first = load(model, optimizer, options.out) if options.resume else 0
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files(options.data))), dtype=torch.uint8)
    losses, generator = [], torch.Generator()
    for step in range(first + 1, options.steps + 1):
        begin = time.perf_counter()
        starts = torch.randint(len(text) - options.tokens, (options.batch,), generator=generator.manual_seed(step))
        starts = starts.chunk(options.dp)[mesh.get_local_rank("dp")]
        rows = torch.stack([text[start : start + options.tokens + 1] for start in starts.tolist()]).long()
        tokens, labels = (context.shard(t).to(device) for t in (rows[:, :-1], rows[:, 1:]))
        # A mean over as many tokens on every rank; FSDP2 takes that of the ranks.
        loss = cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        clip(model, 1.0)
        optimizer.step()
        dist.all_reduce(total := loss.detach().clone())
        losses.append(total.item() / dist.get_world_size())
        if dist.get_rank() == 0:
            speed = options.batch * options.tokens / (time.perf_counter() - begin)
            print(f"step {step}: {losses[-1]:.4f} nats per byte, {speed:.0f} tokens/s", flush=True)
        if step % options.save_every == 0 or step == options.steps:
            save(model, optimizer, options.out, step)
    return losses


def main() -> None:
    """Joins the other processes and trains."""
    if cuda := torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    train(arguments())
    dist.barrier()
    # The end of a process group joins gloo's threads, which may wait for the interpreter. So leave while it lives.
    os._exit(0)


if __name__ == "__main__":
    main()
