"""One process of a test of two: trains a model from a folder on rows of ids, and writes the losses.

torchrun --nproc-per-node N distributed.py FOLDER IDS OUT [tp | fsdp]
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import nsa.hf  # noqa: F401

STEPS = 3


def main(folder: str, ids: str, out: str, kind: str | None = None) -> None:
    options, rank, size = {}, int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if kind is not None:
        dist.init_process_group("gloo")
        options["distributed_config"] = DistributedConfig(**{f"{kind}_size": size})
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, **options).train()
    rows = torch.load(ids)
    if kind == "fsdp":  # each process has its own rows
        rows = rows.chunk(size, dim=1)[rank]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses, norms = [], {}
    for step in range(STEPS):
        loss = model(rows[step], labels=rows[step]).loss
        loss.backward()
        if step == 0:
            for name, parameter in model.named_parameters():
                grad = parameter.grad
                grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                norms[name] = grad.norm().item()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if kind == "fsdp":
            dist.all_reduce(loss)
            loss /= size
        losses.append(loss.item())
    if rank == 0:
        with open(out, "w") as file:
            json.dump({"losses": losses, "norms": norms}, file)
    if kind is not None:
        dist.barrier()
        os._exit(0)  # gloo's threads sometimes outlive the interpreter's end, which then aborts


if __name__ == "__main__":
    main(*sys.argv[1:])
