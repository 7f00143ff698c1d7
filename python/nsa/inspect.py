"""python -m nsa.inspect FOLDER --prompt TEXT --out FILE: a picture of what the sparse layers attend to in a text.

FOLDER is a sparse model of `nsa.hf`. The picture has a row for each layer: the selected blocks, the attention of all
branches, and the gates. Exit codes: 2 when options or FOLDER are at fault, 1 when something else fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._files import check_model, named_path, read_regular
from .config import NSAConfig
from .hf import NsaLayerOutput  # first: it says what to install
from .hf.conversion import on_a_cpu
from .layer import BRANCHES
from .selector import block_mask

# isort: split
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

MOST_LAYERS = 4
"""Layers that are drawn if none are named."""


def attention_of(layer: NsaLayerOutput, cfg: NSAConfig) -> Tensor:
    """Attention of each query to each block of tokens, gates included, a mean over heads: (S, blocks).

    A compressed key counts for the block of its first token.
    """
    length = layer.gates.shape[1]
    total = torch.zeros(length, -(-length // cfg.block_size))
    for gate, branch in zip(layer.gates[0].float().unbind(-1), BRANCHES, strict=True):
        weights = (gate.T[..., None] * layer.weights[branch][0]).mean(0)
        tokens = torch.arange(weights.shape[1]) * (cfg.kernel_stride if branch == "cmp" else 1)
        total.index_add_(1, tokens // cfg.block_size, weights.cpu())
    return total


def draw(layers: dict[int, NsaLayerOutput], cfg: NSAConfig, out: Path, title: str) -> None:
    """Saves the picture as PNG."""
    from .report.style import BRANCH_COLOURS, BRANCH_NAMES, figure, save

    fig, axes = figure(columns=3, rows=len(layers), width=4.6, height=3.4)
    fig.suptitle(title)
    for row, (number, layer) in enumerate(layers.items()):
        chosen, attention, gates = axes[3 * row : 3 * row + 3]
        length = layer.indices.shape[1]
        blocks = -(-length // cfg.block_size)
        share = block_mask(layer.indices[0].cpu(), blocks).float().mean(1)
        extent = (-0.5, blocks - 0.5, length - 0.5, -0.5)
        for ax, picture, label in (
            (chosen, share, "share of KV heads that select it"),
            (attention, attention_of(layer, cfg), "attention, gates included"),
        ):
            image = ax.imshow(
                picture.numpy(), cmap="Blues", vmin=0, aspect="auto", extent=extent, interpolation="nearest"
            )
            fig.colorbar(image, ax=ax, label=label)
            ax.grid(visible=False)
            ax.set(xlabel=f"block of {cfg.block_size} tokens", ylabel="query (token)")
        chosen.set_title(f"layer {number}: selected blocks")
        attention.set_title(f"layer {number}: attention")
        for branch, gate in zip(BRANCHES, layer.gates[0].float().mean(1).unbind(-1), strict=True):
            gates.plot(gate.cpu().numpy(), color=BRANCH_COLOURS[branch], label=BRANCH_NAMES[branch])
        gates.set(title=f"layer {number}: gates", xlabel="query (token)", ylabel="mean over heads", ylim=(0, 1.02))
        gates.legend(fontsize=9)
    save(fig, out)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m nsa.inspect", description=__doc__)
    option = parser.add_argument
    option("folder", metavar="FOLDER", help="a sparse model that from_pretrained of nsa.hf loads")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", metavar="TEXT", help="text, for the tokenizer in FOLDER")
    text.add_argument("--ids", type=named_path, metavar="FILE", help="file of token numbers in place of a text")
    option(
        "--out", type=named_path, required=True, metavar="FILE", help="picture (.png) or page with the picture (.html)"
    )
    option("--layers", metavar="N,N", help=f"numbers of the layers to draw (default: {MOST_LAYERS} sparse ones)")
    given = parser.parse_args(arguments)
    if given.out.suffix not in (".png", ".html"):
        parser.error(f"--out {given.out}: must end with .png or .html")
    if not given.out.parent.is_dir():
        parser.error(f"--out {given.out}: must be in a folder that exists")
    try:
        from .report import style  # noqa: F401  # which needs matplotlib
        from .report.page import write_document
    except ImportError as error:
        print(f"error: {error}: pip install matplotlib", file=sys.stderr)
        return 1
    try:
        check_model(given.folder)
        config = AutoConfig.from_pretrained(given.folder, trust_remote_code=False)
        decoder: Any = config.get_text_config()
        if not hasattr(decoder, "nsa"):
            raise ValueError(f"{given.folder}: model_type = {config.model_type}: must be a sparse model of nsa.hf")
        sparse = [i for i in range(decoder.num_hidden_layers) if i not in decoder.dense_layers]
        if not sparse:
            raise ValueError(f"{given.folder}: dense_layers = {decoder.dense_layers}: must leave a sparse layer")
        numbers = _layers(given.layers, sparse)
        ids, prompt = _ids(given)
        if not ids or not all(0 <= token < decoder.vocab_size for token in ids):
            allowed = f"token numbers 0 ... {decoder.vocab_size - 1}, at least one"
            raise ValueError(f"{given.ids or '--prompt'}: must be {allowed}")
        kind: Any = AutoModelForCausalLM if decoder is config else AutoModelForImageTextToText
        try:
            model = on_a_cpu(kind.from_pretrained(given.folder, trust_remote_code=False)).eval()
        except (RuntimeError, SafetensorError) as error:
            raise ValueError(f"{given.folder}: its weights cannot be loaded: {error}") from None
        with torch.no_grad():
            records = model(torch.tensor([ids]), output_nsa=numbers).nsa
        layers = {number: records[number] for number in numbers}
        title = f"{Path(given.folder).name}: {len(ids)} tokens"
        if given.out.suffix == ".png":
            draw(layers, decoder.nsa_config(), given.out, title)
        else:
            with tempfile.TemporaryDirectory() as made:
                draw(layers, decoder.nsa_config(), Path(made) / "picture.png", title)
                write_document(given.out, title, [], [("Prompt", prompt, Path(made) / "picture.png")])
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"{given.out}: layers {', '.join(map(str, numbers))} of {given.folder}, {len(ids)} tokens")
    return 0


def _layers(named: str | None, sparse: list[int]) -> list[int]:
    if named is None:
        count = min(MOST_LAYERS, len(sparse))
        return [sparse[i * (len(sparse) - 1) // max(count - 1, 1)] for i in range(count)]
    numbers = named.split(",")
    if not all(number.isascii() and number.isdigit() and int(number) in sparse for number in numbers):
        raise ValueError(f"--layers {named}: must be numbers of sparse layers, {', '.join(map(str, sparse))}")
    return sorted({int(number) for number in numbers})


def _ids(given: argparse.Namespace) -> tuple[list[int], str]:
    """Token numbers, and the text that the page shows."""
    if given.ids is None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(given.folder, trust_remote_code=False)
        except (ValueError, OSError):
            message = f"--prompt: {given.folder} has no tokenizer of transformers: must be given as --ids"
            raise ValueError(message) from None
        return tokenizer(given.prompt).input_ids, given.prompt
    content = read_regular(given.ids)
    try:
        text = content.decode()
        return [int(number) for number in text.split()], text
    except ValueError:
        raise ValueError(f"{given.ids}: must hold decimal numbers with spaces between them") from None


if __name__ == "__main__":
    sys.exit(main())
