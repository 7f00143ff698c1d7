"""Pictures of training: loss, loss by position, speed, gates and selection."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from .sources import Run, Sources, shown
from .style import ATTENTION_COLOURS, BRANCH_COLOURS, BRANCH_NAMES, colours, figure, length_axis, tokens


def loss(sources: Sources) -> Figure | None:
    """Loss over tokens and over time: faint while training, points on held-out documents."""
    if not sources.runs:
        return None
    fig, axes = figure(columns=2)
    palette = colours([run.attention for run in sources.runs])
    for ax, key, scale, label in zip(axes, ("tokens", "seconds"), (1, 60), ("tokens seen", "minutes"), strict=True):
        for run, colour in zip(sources.runs, palette, strict=True):
            x = [line[key] / scale for line in run.train]
            ax.plot(x, _smooth([line["loss"] for line in run.train]), color=colour, alpha=0.55, lw=1.3)
            if run.evals:
                held_out = [line["loss"] for line in run.evals]
                ax.plot([line[key] / scale for line in run.evals], held_out, "o-", color=colour, ms=4, label=run.label)
            else:
                ax.plot([], [], color=colour, label=run.label)
        ax.set(xlabel=label, ylabel="loss (nats per token)", title=f"Loss over {key.replace('seconds', 'time')}")
        ax.legend(title="points: held out, lines: training", title_fontsize=9)
    axes[0].xaxis.set_major_formatter(FuncFormatter(tokens))
    return fig


def loss_by_position(sources: Sources) -> Figure | None:
    """Held-out loss by position in the context: what a longer context is worth."""
    runs = [run for run in sources.runs if run.evals and run.evals[-1].get("loss_by_position")]
    if not runs:
        return None
    fig, (ax,) = figure(width=7.5)
    edges: set[int] = set()
    for run, colour in zip(runs, colours([run.attention for run in runs]), strict=True):
        bins = [b for b in run.evals[-1]["loss_by_position"] if b["tokens"] > 0]
        edges |= {b["to"] for b in bins}
        middles = [math.sqrt(max(b["from"], 1) * b["to"]) for b in bins]
        ax.plot(middles, [b["loss"] for b in bins], "o-", color=colour, ms=4, label=run.label)
    length_axis(ax, sorted(edge for edge in edges if edge.bit_count() == 1))  # all of them would overlap
    ax.set(xlabel="position in the context (tokens)", ylabel="held-out loss (nats per token)")
    ax.set_title("Loss by position in the context")
    ax.legend()
    return fig


def speed(sources: Sources) -> Figure | None:
    """Training speed in tokens per second."""
    if not sources.runs:
        return None
    fig, (ax,) = figure(width=7.5)
    for run, colour in zip(sources.runs, colours([run.attention for run in sources.runs]), strict=True):
        rates = [line["tokens_per_second"] for line in run.train]
        ax.plot([line["tokens"] for line in run.train], rates, color=colour, lw=1)
        ax.axhline(median(rates), color=colour, ls="--", lw=1, label=f"{run.label}: median {median(rates):,.0f}")
    ax.xaxis.set_major_formatter(FuncFormatter(tokens))
    ax.set(xlabel="tokens seen", ylabel="tokens per second", ylim=(0, None), title="Training speed")
    ax.legend()
    return fig


def speed_over_context(sources: Sources) -> Figure | None:
    """Training speed by context, of runs whose contexts differ."""
    found: dict[str, dict[int, float]] = {}
    for run in sources.runs:
        rates = [line["tokens_per_second"] for line in run.train[1:] or run.train]  # the first one has the start in it
        found.setdefault(run.label, {})[run.config["train"]["context"]] = median(rates)
    contexts = sorted({context for rates in found.values() for context in rates})
    if len(contexts) < 2:
        return None
    fig, (ax,) = figure(width=7.5)
    for (label, speeds), colour in zip(found.items(), colours([label.split(" ")[0] for label in found]), strict=True):
        ax.plot(sorted(speeds), [speeds[context] for context in sorted(speeds)], "o-", color=colour, ms=4, label=label)
    length_axis(ax, contexts)
    ax.set(xlabel="context (tokens)", ylabel="tokens per second", yscale="log", title="Training speed over context")
    for axis_format in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
        axis_format(FuncFormatter(tokens))
    ax.legend()
    return fig


def gates(sources: Sources) -> Figure | None:
    """Mean gate of each branch per layer: of an inspected text, or of the last training step."""
    panels = [
        (f"inspected {_short(r['checkpoint'])}", {layer["layer"]: layer["gates"] for layer in r["layers"]})
        for r in sources.of("inspect")
        if r["layers"]
    ]
    if not panels:
        for run in _selecting(sources):
            means = {
                _number(layer, i): {branch: layer[f"gate_{branch}"] for branch in BRANCH_NAMES}
                for i, layer in enumerate(run.train[-1]["layers"])
            }
            panels.append((run.label, means))
    if not panels:
        return None
    fig, axes = figure(columns=len(panels))
    for ax, (name, layers) in zip(axes, panels, strict=True):
        for i, branch in enumerate(BRANCH_NAMES):
            places = [layer + 0.27 * (i - 1) for layer in layers]
            values = [layer[branch] for layer in layers.values()]
            ax.bar(places, values, 0.25, color=BRANCH_COLOURS[branch], label=BRANCH_NAMES[branch])
        ax.set(xlabel="layer", ylabel="mean gate", ylim=(0, 1), xticks=list(layers), title=f"Gates per layer: {name}")
        ax.grid(axis="x", visible=False)
        ax.legend(ncols=3, fontsize=9, loc="upper center")
    return fig


def selection_health(sources: Sources) -> Figure | None:
    """Over training, per layer: are blocks chosen freely, spread out, and differently by neighbouring queries?"""
    runs = _selecting(sources)
    if not runs:
        return None
    measures = {
        "unforced_share": ("share of picks not forced", (0, 1)),
        "selection_entropy": ("entropy of the free picks (nats)", (0, None)),
        "neighbour_overlap": ("overlap with the query before", (0, 1)),
    }
    fig, axes = figure(columns=3, rows=len(runs), width=4.6, height=3.8)
    for r, run in enumerate(runs):
        lines = [line for line in run.train if line.get("layers")]
        count = len(lines[0]["layers"])
        for ax, (measure, (title, limits)) in zip(axes[3 * r :], measures.items(), strict=False):
            for layer in range(count):
                values = _smooth([line["layers"][layer][measure] for line in lines])
                shade = BRANCH_COLOURS["slc"]
                alpha = 1 - 0.75 * layer / max(1, count - 1)
                label = f"layer {_number(lines[0]['layers'][layer], layer)}"
                ax.plot([line["tokens"] for line in lines], values, color=shade, alpha=alpha, label=label)
            ax.xaxis.set_major_formatter(FuncFormatter(tokens))
            ax.set(xlabel="tokens seen", ylabel=title, ylim=limits)
        axes[3 * r + 1].set_title(f"Selection during training: {run.label}")
        axes[3 * r].legend(fontsize=8)
    return fig


def recall(sources: Sources) -> Figure | None:
    """Key-value recall further back than the window: final accuracies, and the way there."""
    results = sources.of("recall")
    if not results:
        return None
    result = results[-1]
    bars = {"nsa": "NSA", "nsa_window_gate_only": "NSA, window\ngate only", "full": "full\nattention"}
    bars["window"] = "window\nmodel"
    found = {key: result.get("scores", {}).get(key, {}).get("accuracy") for key in bars}
    bars = {key: name for key, name in bars.items() if found[key] is not None}
    fig, axes = figure(columns=2, width=5.2)
    shades = {**ATTENTION_COLOURS, "nsa_window_gate_only": "#9cc3d5"}
    drawn = axes[0].bar(list(bars.values()), [100 * found[key] for key in bars], color=[shades[key] for key in bars])
    axes[0].bar_label(drawn, fmt="%.1f %%")
    axes[0].axhline(100 * result["chance"], color="black", ls=":", label=f"chance, {100 * result['chance']:.1f} %")
    axes[0].set(ylabel="recall accuracy (%)", ylim=(0, 108), title="Associative recall beyond the window")
    axes[0].legend()
    history = result.get("history") or []
    for model in ("nsa", "full"):
        line = [(h["step"], 100 * h[model]["accuracy"]) for h in history if model in h]
        if line:
            axes[1].plot(*zip(*line, strict=True), color=shades[model], label=model)
    axes[1].set(
        xlabel="training step", ylabel="recall accuracy (%)", ylim=(0, 104), title="Associative recall during training"
    )
    if history:
        axes[1].legend()
    return fig


def _selecting(sources: Sources) -> list[Run]:
    return [run for run in sources.runs if run.train[-1].get("layers")]


def _number(layer: dict[str, Any], place: int) -> int:
    """Index of a layer in a line of metrics; runs older than dense layers have none."""
    return layer.get("layer", place)


def _smooth(values: list[float]) -> list[float]:
    """Moving average over a fiftieth of the values to either side."""
    reach = len(values) // 50
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - reach) : i + reach + 1])]


def _short(path: str) -> str:
    return shown(path.rstrip("/").split("/")[-1])
