"""A small GPT in plain PyTorch whose attention is Native Sparse Attention, trained on Python's standard library.

Prints the loss as it falls, then which blocks the queries of a held-out text select, as numbers and, where matplotlib
is installed, as a picture (a map: a row for each block of queries, a column for each selected one).

    python examples/gpt.py [PICTURE.png]
"""

import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nsa

WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 4, 1, 32, 2
LENGTH, BATCH, STEPS = 512, 4, 120
CFG = nsa.NSAConfig(kernel_size=16, kernel_stride=8, block_size=16, topk=8, window_size=64)


class Block(nn.Module):
    """Attention and MLP. The layer replaces q, k, v, RoPE, scaled_dot_product_attention and o."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nsa.NativeSparseAttention(WIDTH, HEADS, KV_HEADS, HEAD_DIM, cfg=CFG, qk_norm=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The block's output, and the blocks that its queries selected."""
        o, indices = self.attention(self.norms[0](x), return_indices=True)
        x = x + o
        return x + self.mlp(self.norms[1](x)), indices


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The logits, and for each layer the blocks that its queries selected."""
        x, selected = self.embedding(tokens), []
        for block in self.blocks:
            x, indices = block(x)
            selected.append(indices)
        return self.head(x), selected


def sources() -> Tensor:
    """The bytes of the standard library's modules, not of its packages."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def loss_of(model: GPT, rows: Tensor) -> Tensor:
    """Nats per byte."""
    logits, _ = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def selection_map(indices: Tensor) -> Tensor:
    """Share of the queries in each block of queries that select each block of keys, of the first KV head."""
    chosen = torch.zeros(LENGTH, LENGTH // CFG.block_size + 1)
    chosen.scatter_(1, indices[0, :, 0].long() % chosen.shape[1], 1.0)  # -1, where there is no more, goes to the last
    return chosen[:, :-1].unflatten(0, (-1, CFG.block_size)).mean(1)


def draw(picture: Tensor, path: str) -> None:
    """Saves the map where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return print("matplotlib is not installed: no picture")
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    figure.colorbar(axes.imshow(picture, cmap="Blues", vmin=0, vmax=1), label="share of queries that select it")
    axes.set(xlabel=f"selected block of {CFG.block_size} bytes", ylabel="block of queries")
    figure.savefig(path, dpi=80)
    print(f"picture: {path}")


def main() -> None:
    """Trains, then inspects block selection."""
    torch.manual_seed(0)
    text = sources()
    held_out, text = text[: 8 * (LENGTH + 1)].view(8, -1).long(), text[8 * (LENGTH + 1) :]
    model = GPT()
    optimizer = torch.optim.AdamW(nsa.parameter_groups(model, 3e-3, 0.1))
    with torch.no_grad():
        before = loss_of(model, held_out).item()
    for step in range(1, STEPS + 1):
        starts = torch.randint(len(text) - LENGTH, (BATCH,)).tolist()
        loss = loss_of(model, torch.stack([text[start : start + LENGTH + 1] for start in starts]).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:3}: {loss.item():.3f} nats per byte")

    with torch.no_grad():
        after = loss_of(model, held_out).item()
        selected = model(held_out[:1, :-1])[1][-1]
    print(f"held out: {before:.3f} -> {after:.3f} nats per byte")
    assert after < 0.6 * before, "the model has not learnt"

    picture = selection_map(selected)
    past = torch.ones_like(picture).tril(-CFG.local_blocks)[:, CFG.init_blocks :].bool()  # neither first nor local
    print(f"the last block of queries selects, by block: {[round(share, 1) for share in picture[-1].tolist()]}")
    print(f"of the blocks that are not forced a query selects {picture[:, CFG.init_blocks :][past].mean():.0%}")
    if len(sys.argv) > 1:
        draw(picture, sys.argv[1])


if __name__ == "__main__":
    main()
