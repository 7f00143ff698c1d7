"""The picture of `tools/gpu.sh decode`: a step's time over the context."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from .sources import Sources, shown
from .style import ATTENTION_COLOURS, figure, length_axis


def _steps(result: dict[str, Any]) -> dict[int, dict[int, dict[str, Any]]]:
    """Steps of one token by sequences and context."""
    found: dict[int, dict[int, dict[str, Any]]] = {}
    for stage in result["stages"].values():
        part = stage.get("result", {})
        if part.get("ragged", True) or part["selection"] != "own":
            continue
        for step in part["steps"]:
            if step["new"] == 1 and step.get("cache", "bfloat16") == "bfloat16":
                found.setdefault(step["batch"], {}).setdefault(part["context"], step)
    return found


def decode_time(sources: Sources) -> Figure | None:
    """A panel for each number of sequences: the step, its bytes, and those that dense attention would read."""
    results = sources.of("decode")
    if not results:
        return None
    result = results[0]
    found = _steps(result)
    if not found:
        return None
    fig, axes = figure(columns=len(found), width=4.6, height=4.4)
    for ax, batch in zip(axes, sorted(found, reverse=True), strict=True):
        steps = dict(sorted(found[batch].items()))
        times = {name: [step[name] for step in steps.values()] for name in ("median", "floor", "dense_floor")}
        nsa, full = ATTENTION_COLOURS["nsa"], ATTENTION_COLOURS["full"]
        ax.plot(list(steps), times["dense_floor"], ":", color=full, label="a copy of what dense attention reads")
        ax.plot(list(steps), times["median"], "o-", color=nsa, ms=5, label="NSA")
        ax.plot(list(steps), times["floor"], ":", color=nsa, label="a copy of what NSA reads")
        length_axis(ax, list(steps))
        ax.set(yscale="log", xlabel="context (tokens)", ylabel="time of a step (µs)")
        ax.set_title(f"{batch} sequences" if batch > 1 else "one sequence")
    fig.suptitle(shown(f"{result['stages']['decode']['result']['problem']}; {result['gpu']}"), fontsize=9)
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, fontsize=9, ncols=3, loc="outside lower center")
    return fig
