"""Pictures of measurements: attention time over length, the selection map, the recall map, the needle map."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .gpu import is_gpu
from .sources import Sources, shown
from .style import ATTENTION_COLOURS, BRANCH_COLOURS, figure, length_axis, tokens

_PASSES = {"forward": "Forward", "forward_backward": "Forward and backward"}


def attention_time(sources: Sources) -> Figure | None:
    """Time of one call over length, with the length from which NSA is faster; a row for each benchmark of a CPU."""
    benches = [b for b in sources.of("bench") if any(r["op"] in _PASSES for r in b["results"]) and not is_gpu(b)]
    if not benches:
        return None
    fig, axes = figure(columns=len(_PASSES), rows=len(benches), width=6.6, height=4.8)
    for i, bench in enumerate(benches):
        for ax, pass_name in zip(axes[len(_PASSES) * i :], _PASSES, strict=False):
            _draw_pass(ax, bench, pass_name)
        settings, machine = bench["settings"], bench["machine"]
        title = (
            f"{settings['dtype']}, H = {settings['num_heads']}, Hkv = {settings['num_kv_heads']}, "
            f"D = {settings['head_dim']}; {machine['cpu']}, {machine['threads']} threads, {machine['isa']}"
        )
        axes[len(_PASSES) * i].set_title(shown(title) + "\n", fontsize=9, loc="left")
    return fig


def _seconds(point: dict[str, Any]) -> float:
    return point["seconds"] if "seconds" in point else point["best_s"]


def _draw_pass(ax: Axes, bench: dict[str, Any], pass_name: str) -> None:
    series = _series(bench, pass_name)
    if not series:
        ax.set_visible(False)
        return
    for (op, variant), points in series.items():
        dense, plain = op.startswith("dense"), op.startswith("plain")
        full = "full attention, torch" if dense else "full attention, our kernels"
        name = full if dense or plain else f"NSA, φ = {shown(variant)}"
        colour = ATTENTION_COLOURS["full" if dense else "window" if plain else "nsa"]
        style = "--" if variant == "mlp" else "-"
        ax.plot([p["length"] for p in points], [_seconds(p) for p in points], style, color=colour, label=name)
        for extrapolated in (False, True):
            part = [p for p in points if p["extrapolated"] == extrapolated]
            face = "white" if extrapolated else colour
            ax.plot([p["length"] for p in part], [_seconds(p) for p in part], "o", color=colour, mfc=face, ms=6)
    crossover = (bench.get("crossover", {}).get(pass_name) or {}).get("dense")
    if crossover:
        ax.axvline(crossover, color="black", ls=":", lw=1.2, label=f"NSA faster from {tokens(round(crossover))} tokens")
    if any(p["extrapolated"] for points in series.values() for p in points):
        ax.plot([], [], "o", color="black", mfc="white", label="extrapolated as length squared")
    length_axis(ax, sorted({p["length"] for points in series.values() for p in points}))
    ax.set(yscale="log", xlabel="sequence length (tokens)", ylabel="time of one call (s)", title=_PASSES[pass_name])
    ax.legend(fontsize=9)


def _series(bench: dict[str, Any], pass_name: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Curves of one pass; of dense attention the faster variant at each length."""
    series: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for op in (f"dense_{pass_name}", f"plain_{pass_name}", pass_name):
        for r in bench["results"]:
            if r["op"] != op:
                continue
            curve = series.setdefault((op, r["variant"] if op == pass_name else ""), {})
            best = curve.get(r["length"])
            if best is None or _seconds(r) < _seconds(best):
                curve[r["length"]] = r
    return {key: [curve[length] for length in sorted(curve)] for key, curve in series.items()}


def selection_map(sources: Sources) -> Figure | None:
    """Selected blocks of each query, per layer and KV head."""
    results = [r for r in sources.of("inspect") if r["layers"]]
    if not results:
        return None
    layers = results[-1]["layers"]
    heads = max(len(layer["kv_heads"]) for layer in layers)
    fig, axes = figure(columns=heads, rows=len(layers), width=4.4, height=3.3, sharex=True, sharey=True)
    palette = ListedColormap(["white", "#c9ced3", BRANCH_COLOURS["slc"]])
    for r, layer in enumerate(layers):
        for c in range(heads):
            ax = axes[r * heads + c]
            if c >= len(layer["kv_heads"]):
                ax.set_visible(False)
                continue
            head = layer["kv_heads"][c]
            picture, positions = _picture(head["map"])
            extent = (-0.5, picture.shape[1] - 0.5, positions[-1], positions[0])
            ax.imshow(picture, cmap=palette, vmin=0, vmax=2, aspect="auto", extent=extent, interpolation="nearest")
            ax.grid(visible=False)
            ax.set_title(
                f"layer {layer['layer']}, KV head {head['kv_head']}: {head['unforced_share']:.0%} free", fontsize=10
            )
            if r == len(layers) - 1:
                ax.set_xlabel("selection block")
            if c == 0:
                ax.set_ylabel("query position (tokens)")
    legend = [
        Patch(color=BRANCH_COLOURS["slc"], label="selected"),
        Patch(color="#c9ced3", label="forced (first, local)"),
    ]
    fig.legend(handles=legend, loc="outside upper center", ncols=2, title="Selected blocks by query")
    return fig


def _picture(chosen: dict[str, Any]) -> tuple[np.ndarray, list[int]]:
    """0: not selected, 1: forced, 2: selected; one row per query."""
    blocks = 1 + max((block for row in chosen["blocks"] + chosen["forced"] for block in row), default=0)
    picture = np.zeros((len(chosen["blocks"]), blocks))
    for row, (selected, forced) in enumerate(zip(chosen["blocks"], chosen["forced"], strict=True)):
        picture[row, [block for block in selected if block >= 0]] = 2
        picture[row, [block for block in forced if block >= 0]] = 1
    return picture, chosen["query_positions"]


def recall_map(sources: Sources) -> Figure | None:
    """Recall accuracy of each model by the distance between a pair and its question."""
    names = {"nsa": "NSA", "full": "full attention", "window": "window alone"}
    results = [
        result
        for result in sources.of("recall")
        if "distances" in result and all("by_distance" in result.get("scores", {}).get(name, {}) for name in names)
    ]
    if not results:
        return None
    result = results[-1]
    edges = result["distances"]
    found = 100 * np.array([result["scores"][model]["by_distance"] for model in names], dtype=float)
    fig, (ax,) = figure(width=8.6, height=2.9)
    image = ax.imshow(found, cmap="RdYlGn", vmin=0, vmax=100, aspect="auto")
    for (row, column), value in np.ndenumerate(found):
        ax.text(column, row, "" if np.isnan(value) else f"{value:.0f}", ha="center", va="center", fontsize=9)
    ax.set_xticks(range(len(edges) - 1), [f"{a}-{b - 1}" for a, b in itertools.pairwise(edges)], fontsize=9)
    ax.set_yticks(range(len(names)), list(names.values()))
    reach = f"; the window: {result['window_size']}" if "window_size" in result else ""
    ax.set(xlabel=f"distance from pair to question (tokens{reach})", title="Associative recall by distance")
    ax.grid(visible=False)
    fig.colorbar(image, ax=ax, label="recall accuracy (%)")
    return fig


def needle(sources: Sources) -> Figure | None:
    """Needle retrieval accuracy by context length and needle depth."""
    results = sources.of("needle")
    if not results:
        return None
    fig, axes = figure(columns=len(results), width=6.4, height=4.2)
    for ax, result in zip(axes, results, strict=True):
        found = 100 * np.array(result["exact"]).T  # depths by lengths
        image = ax.imshow(found, cmap="RdYlGn", vmin=0, vmax=100, aspect="auto")
        for (depth, length), value in np.ndenumerate(found):
            ax.text(length, depth, f"{value:.0f}", ha="center", va="center", fontsize=9)
        ax.set_xticks(range(len(result["lengths"])), [tokens(n) for n in result["lengths"]])
        ax.set_yticks(range(len(result["depths"])), [f"{100 * d:.0f} %" for d in result["depths"]])
        name = shown(result["checkpoint"].rstrip("/").split("/")[-1])
        # Tasks of one line, and files of older versions, have no number of them.
        task = f" ({shown(result.get('task', ''))}, {result['lines']} lines)" if "lines" in result else ""
        title = f"Needle retrieval{task}: {name}"
        ax.set(xlabel="context length (tokens)", ylabel="needle depth", title=title)
        ax.grid(visible=False)
        fig.colorbar(image, ax=ax, label=f"retrieval accuracy (%), {result['samples']} samples each")
    return fig
