"""Style of the pictures: one colour per attention and per branch, the same in all of them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from PIL import Image

from . import write_file

ATTENTION_COLOURS = {"nsa": "#0b6e99", "full": "#c8553d", "window": "#8a8d91"}
BRANCH_COLOURS = {"cmp": "#e0a030", "slc": "#0b6e99", "swa": "#7a9e7e"}
BRANCH_NAMES = {"cmp": "compressed", "slc": "selected", "swa": "sliding window"}
PALETTE = ("#0b6e99", "#c8553d", "#3a7d44", "#7b4b94")  # curves of one kind
_FURTHER = ("#7b4b94", "#3a7d44", "#b08900", "#444444")

plt.rcParams.update(
    {
        "figure.dpi": 110,
        "savefig.bbox": "tight",
        "font.size": 11,
        "axes.grid": True,
        "grid.alpha": 0.3,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "axes.titlesize": 12,
    }
)


def figure(
    columns: int = 1, rows: int = 1, width: float = 6.2, height: float = 4.2, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure and its axes in reading order."""
    fig, axes = plt.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained", **options
    )
    return fig, list(axes.flat)


def save(fig: Figure, path: Path, dpi: int = 110) -> None:
    """A PNG of 48 colours, which are enough for lines and text and take a quarter of the space."""
    with io.BytesIO() as buffer, io.BytesIO() as png:
        fig.savefig(buffer, format="png", dpi=dpi)
        picture = Image.open(buffer).convert("RGB").quantize(48, Image.Quantize.MAXCOVERAGE)
        picture.save(png, format="png", optimize=True)
        write_file(path, png.getvalue())


def colours(attentions: list[str]) -> list[str]:
    """One colour per run; the second run of an attention gets another one."""
    result: list[str] = []
    further = iter(_FURTHER * len(attentions))
    for attention in attentions:
        colour = ATTENTION_COLOURS.get(attention)
        result.append(colour if colour and colour not in result else next(further))
    return result


def tokens(value: float, _position: int | None = None) -> str:
    """4096 -> "4K", 2000000 -> "2M": powers of two up to 1M, decimal above."""
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    if value >= 1024 and value % 1024 == 0:
        return f"{int(value) // 1024}K"
    return f"{value / 1e3:g}k" if value >= 1e4 else f"{value:g}"


def length_axis(ax: Axes, lengths: list[int]) -> None:
    """A logarithmic axis of lengths in tokens with a tick at each."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths)
    ax.xaxis.set_major_formatter(FuncFormatter(tokens))
    ax.xaxis.set_minor_locator(NullLocator())
