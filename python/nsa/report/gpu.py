"""The picture of `nsa bench` on a GPU: time over length with NSA's stages."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .sources import Sources, shown
from .style import ATTENTION_COLOURS, BRANCH_COLOURS, figure, length_axis

PASSES = {"forward": "forward", "forward_backward": "forward and backward"}
_DENSE = {
    "cudnn": ("dense attention, cuDNN", "s-"),
    "flash2": ("dense attention, FlashAttention-2", "^--"),
    "flash3": ("dense attention, FlashAttention-3", "v-."),
}

# In the order in which they run, with the branch they are coloured by and how strongly.
_STAGES = {
    "compress": ("phi", 0.9),
    "compressed attention, selection": ("cmp", 0.9),
    "selected attention": ("slc", 0.9),
    "sliding window, combine": ("swa", 0.9),
    "gates, row terms": ("rest", 0.6),
    "selected attention: dQ": ("slc", 0.65),
    "selected attention: dK, dV": ("slc", 0.45),
    "compressed attention: dK, dV": ("cmp", 0.5),
    "sliding window: dK, dV": ("swa", 0.5),
    "compressed and window: dQ": ("both", 0.5),
    "compress_backward": ("phi", 0.5),
}
_COLOURS = BRANCH_COLOURS | {"phi": "#7b4b94", "rest": "#8a8d91", "both": "#adb06f"}


def is_gpu(bench: dict[str, Any]) -> bool:
    return "gpu" in bench["machine"]


class Measured:
    """One result file: what was measured, by what it is called and by length."""

    def __init__(self, bench: dict[str, Any]):
        self.bench = bench
        self.settings, self.machine = bench["settings"], bench["machine"]
        self.phi = self.settings["phi"]
        self.gpu = self.machine["gpu"].split(",")[0]

    def results(self, op: str, variant: str, part_of: str = "") -> dict[int, dict[str, Any]]:
        """Measured results by length, without extrapolated ones."""
        return {
            r["length"]: r
            for r in self.bench["results"]
            if (r["op"], r["variant"], r.get("part_of", "")) == (op, variant, part_of) and not r["extrapolated"]
        }

    def times(self, op: str, variant: str, part_of: str = "") -> dict[int, float]:
        """Milliseconds by length."""
        return {length: 1e3 * r["seconds"] for length, r in self.results(op, variant, part_of).items()}

    def stages(self, pass_name: str) -> dict[str, dict[int, dict[str, Any]]]:
        found = {stage: self.results(stage, self.phi, pass_name) for stage in _STAGES}
        return {stage: by_length for stage, by_length in found.items() if by_length}

    def peers(self, pass_name: str) -> dict[int, tuple[float, str]]:
        """The fastest other implementation: milliseconds and its name."""
        whole = self.results(pass_name, self.phi)
        return {length: (1e3 * r["peer_s"], r["peer"]) for length, r in whole.items() if r.get("peer")}

    def crossover(self, pass_name: str) -> float | None:
        return (self.bench.get("crossover", {}).get(pass_name) or {}).get("dense")

    def problem(self) -> str:
        s = self.settings
        dims = f"D = {s['head_dim']}" if s["head_dim"] == s["v_head_dim"] else f"{s['head_dim']}/{s['v_head_dim']}"
        return f"B = 1, H = {s['num_heads']}, Hkv = {s['num_kv_heads']}, {dims}, {s['dtype']}"


def cuda_time(sources: Sources) -> Figure | None:
    """Time over length: NSA whole and its stages, dense attention, the fastest other implementation of NSA."""
    benches = [Measured(bench) for bench in sources.of("bench") if is_gpu(bench)]
    if not benches:
        return None
    fig, axes = figure(columns=len(PASSES), rows=len(benches), width=7.2, height=6.2)
    for i, bench in enumerate(benches):
        row = axes[len(PASSES) * i : len(PASSES) * (i + 1)]
        for ax, pass_name in zip(row, PASSES, strict=True):
            _draw_pass(ax, bench, pass_name)
        row[0].set_title(shown(f"{bench.problem()}; {bench.gpu}") + "\n", fontsize=9, loc="left")
    return fig


def _draw_pass(ax: Axes, bench: Measured, pass_name: str) -> None:
    whole = bench.times(pass_name, bench.phi)
    if not whole:
        ax.set_visible(False)
        return
    lengths = sorted(whole)
    low = dict.fromkeys(lengths, 0.0)
    for stage, by_length in bench.stages(pass_name).items():
        high = {n: low[n] + (1e3 * by_length[n]["seconds"] if n in by_length else 0.0) for n in lengths}
        branch, alpha = _STAGES[stage]
        ax.fill_between(
            lengths,
            [max(low[n], 1e-3) for n in lengths],
            [high[n] for n in lengths],
            color=_COLOURS[branch],
            alpha=alpha,
            lw=0,
            label=stage.replace("_", " "),
        )
        low = high
    ax.plot(lengths, [whole[n] for n in lengths], "o-", color="black", ms=5, label=f"NSA, φ = {shown(bench.phi)}")
    for form, (name, style) in _DENSE.items():
        dense = bench.times(f"dense_{pass_name}", form)
        if dense:
            ax.plot(list(dense), list(dense.values()), style, color=ATTENTION_COLOURS["full"], ms=5, label=name)
    peers = bench.peers(pass_name)
    if peers:
        names = " or ".join(sorted({name for _, name in peers.values()}))
        ms = [ms for ms, _ in peers.values()]
        ax.plot(list(peers), ms, "D:", color="#444444", mfc="white", ms=6, label=f"NSA by {shown(names)}")
    crossover = bench.crossover(pass_name)
    if crossover and crossover > lengths[0]:
        name = f"NSA faster from {round(crossover, -2):.0f} tokens"
        ax.axvline(crossover, color="black", ls=":", lw=1.2, label=name)
    length_axis(ax, lengths)
    smallest = min(whole.values())
    ax.set(yscale="log", ylim=(smallest / 20, None), xlabel="sequence length (tokens)", ylabel="time of one call (ms)")
    ax.set_title(PASSES[pass_name].capitalize())
    ax.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
