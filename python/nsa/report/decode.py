"""The pictures of `tools/gpu.sh decode`: a step's time over the context, and tokens/s of `nsa generate`."""

from __future__ import annotations

from matplotlib.figure import Figure

from .fields import steps_of_one_token
from .sources import Sources, shown
from .style import ATTENTION_COLOURS, figure, length_axis


def decode_time(sources: Sources) -> Figure | None:
    """A panel for each number of sequences: the step and its bytes, those of dense attention, and flash_nsa."""
    results = sources.of("decode")
    if not results:
        return None
    result = results[0]
    found = steps_of_one_token(result)
    if not found:
        return None
    dense, peer = (
        result["stages"].get(stage, {"result": {"steps": []}})["result"]["steps"]
        for stage in ("decode_dense", "peer_decode")
    )
    nsa, full = ATTENTION_COLOURS["nsa"], ATTENTION_COLOURS["full"]
    batches = sorted({batch for batch, _ in found}, reverse=True)
    fig, axes = figure(columns=len(batches), width=4.6, height=4.4)
    for ax, batch in zip(axes, batches, strict=True):
        steps = {context: step for (sequences, context), step in sorted(found.items()) if sequences == batch}
        times = {name: [step[name] for step in steps.values()] for name in ("median", "floor", "dense_floor")}
        dense_points = sorted((step["context"], step["us"][step["best"]]) for step in dense if step["batch"] == batch)
        if dense_points:
            ax.plot(
                *zip(*dense_points, strict=True), "s-", color=full, ms=5, label="dense attention, torch's fastest way"
            )
        ax.plot(list(steps), times["dense_floor"], ":", color=full, label="a copy of what dense attention reads")
        others = sorted((step["context"], step["us"]) for step in peer if step["batch"] == batch)
        if others:
            ax.plot(*zip(*others, strict=True), "^--", color="0.4", ms=5, label="flash_nsa")
        ax.plot(list(steps), times["median"], "o-", color=nsa, ms=5, label="NSA")
        ax.plot(list(steps), times["floor"], ":", color=nsa, label="a copy of what NSA reads")
        length_axis(ax, sorted({*steps, *(context for context, _ in dense_points)}))
        ax.set(yscale="log", xlabel="context (tokens)", ylabel="time of a step (µs)")
        ax.set_title(f"{batch} sequences" if batch > 1 else "one sequence")
    fig.suptitle(shown(f"{result['stages']['decode']['result']['problem']}; {result['gpu']}"), fontsize=9)
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, fontsize=9, ncols=5, loc="outside lower center")
    return fig


def generate_speed(sources: Sources) -> Figure | None:
    """Tokens/s of all sequences together, a panel for each number of sequences."""
    results = [result for result in sources.of("decode") if "generate_speed" in result["stages"]]
    if not results:
        return None
    result = results[0]
    part = result["stages"]["generate_speed"]["result"]
    batches = sorted({step["batch"] for step in part["steps"]})
    fig, axes = figure(columns=len(batches), width=4.8, height=4.2)
    for ax, batch in zip(axes, batches, strict=True):
        steps = [step for step in part["steps"] if step["batch"] == batch]
        for attention, name in (("nsa", "NSA"), ("full", "full attention")):
            points = sorted((s["context"], s["tokens_per_second"]) for s in steps if s["attention"] == attention)
            if points:
                ax.plot(*zip(*points, strict=True), "o-", color=ATTENTION_COLOURS[attention], ms=5, label=name)
        length_axis(ax, sorted({step["context"] for step in steps}))
        ax.set(xlabel="context (tokens)", ylabel="tokens/s", ylim=(0, None))
        ax.set_title(f"{batch} sequences" if batch > 1 else "one sequence")
        ax.legend(fontsize=9)
    fig.suptitle(f"{shown(part['problem'])}\n{shown(result['gpu'])}", fontsize=9)
    return fig
