#!/usr/bin/env python3
"""Predicts the time of a sequence's attention over 2 ... 1024 GPUs from measurements of one GPU and its fabric.

    python bench/scale/scale_model.py --fabric NVLink:4:350:8 --fabric network:10:45 --picture scale.png

Attention of S tokens on P GPUs takes (a S + b S^2) / P, as head_tail divides it. a and b fit, with the
least relative error, whole forwards and backwards of `nsa bench` (from --from tokens on) and the slowest rank of each
`context_parallel.py --simulated-ranks`. A collective takes (P - 1) latencies and the bytes that a rank receives over
the bandwidth. The forward gathers keys and values; the backward gathers them again and sends or reduces their
gradients. Nothing is overlapped, and no call is too short to fill its GPU: the first makes it slow, the second fast. A
fabric is NAME:LATENCY_us:GB/s[:most GPUs]; --collectives takes latency and bandwidth from a result of
bench/scale/collectives.py. --measured takes results of `tools/gpu.sh scale`: their collectives, and the model's error
at each time of their context parallelism. tools/scale.py writes docs/guide/scale.md with all that.
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
from options import integer, integers

RESULTS = Path(__file__).parents[1] / "results"
SETTINGS = {"num_heads": "heads", "num_kv_heads": "kv_heads", "head_dim": "head_dim", "dtype": "dtype"}
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
PASSES = ("forward", "backward")


def fit(points):
    """a and b with the least sum of squares of (a x + b y) / t - 1 over points (x, y, t); both at least 0."""
    rows = [(x / t, y / t) for x, y, t in points]
    xx, xy, yy = (sum(p[i] * p[j] for p in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    x, y = (sum(p[i] for p in rows) for i in (0, 1))
    determinant = xx * yy - xy * xy
    if determinant <= 1e-12 * xx * yy:
        raise ValueError(f"{len(points)} measurements: must be of at least two sizes")
    a, b = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
    if a < 0:
        return 0.0, y / yy
    return (a, b) if b >= 0 else (x / xx, 0.0)


@dataclass
class Fabric:
    """Seconds and bytes per second of each collective."""

    name: str
    costs: dict
    most: int = 1024

    @classmethod
    def given(cls, text):
        """Parses NAME:LATENCY_us:GB/s[:most GPUs]."""
        name, *numbers = text.split(":")
        if len(numbers) not in (2, 3):
            raise argparse.ArgumentTypeError(f"{text}: must be NAME:LATENCY_us:GB/s[:most GPUs]")
        latency, bandwidth = map(float, numbers[:2])
        if not (0 <= latency < math.inf and bandwidth > 0):
            raise argparse.ArgumentTypeError(f"{text}: latency must be at least 0, bandwidth above 0")
        collectives = ("all_gather", "all_to_all", "reduce_scatter")
        return cls(name, dict.fromkeys(collectives, (1e-6 * latency, 1e9 * bandwidth)), *map(integer, numbers[2:]))

    @classmethod
    def measured(cls, result):
        """Fitted to bench/scale/collectives.py's result."""
        costs = {}
        for name in {row["collective"] for row in result["collectives"]}:
            rows = [row for row in result["collectives"] if row["collective"] == name]
            latency, per_byte = fit([(row["ranks"] - 1, row["bytes"], row["seconds"]) for row in rows])
            costs[name] = latency, 1 / per_byte if per_byte else float("inf")
        return cls(f"{result['backend']}, {result['device_name']}", costs)

    def seconds(self, collective, ranks, count):
        """Seconds of a collective in which every rank receives `count` bytes."""
        latency, bandwidth = self.costs[collective]
        return (ranks - 1) * latency + count / bandwidth


class Measured:
    """A result of `tools/gpu.sh scale`: what several GPUs were measured at."""

    def __init__(self, result):
        self.result, self.stages = result, result["stages"]
        self.gpus, self.name = result["gpus"], f"{result['gpus']} x {result['gpu']}"

    def of(self, stage):
        """Result of a stage, or None."""
        return self.stages.get(stage, {}).get("result")

    def fabric(self):
        """Its collectives, or None."""
        found = self.of("collectives")
        return Fabric.measured(found) if found else None

    def rows(self):
        """Rows of its context parallelism, with all KV heads at once in head_tail."""
        found = self.of("context_parallel")
        if not found:
            return []
        return [r for r in found["rows"] if r["layout"] == "head_tail" and r["kv_heads_at_once"] == found["kv_heads"]]


class Compared(NamedTuple):
    """Seconds of a pass: measured, and by the model."""

    length: int
    gpus: str
    name: str
    measured: float
    modelled: float

    @property
    def percent(self):
        """The model's error."""
        return 100 * (self.modelled / self.measured - 1)


def error_table(compared):
    """Lines of a table of `Model.errors`."""
    yield "| tokens | GPUs | pass | measured, ms | model, ms | error |"
    yield "|---:|---:|---|---:|---:|---:|"
    for one in compared:
        times = f"{1000 * one.measured:.1f} | {1000 * one.modelled:.1f}"
        yield f"| {one.length} | {one.gpus} | {one.name} | {times} | {one.percent:+.0f} % |"


class Model:
    """Cost model fitted to measurements on one GPU."""

    def __init__(self, bench, simulated, shortest):
        self.settings = settings = bench["settings"]
        for result in simulated:
            for theirs, ours in SETTINGS.items():
                if result[ours] != settings[theirs]:
                    raise ValueError(
                        f"{ours} = {result[ours]} of simulated ranks: must be the bench's {settings[theirs]}"
                    )
            if result["layout"] != "head_tail" or len(result["ranks"]) != result["simulated_ranks"]:
                raise ValueError("simulated ranks: must be all ranks of the layout head_tail")
        self.row = settings["num_kv_heads"] * (settings["head_dim"] + settings["v_head_dim"])
        self.width, self.stride = BYTES[settings["dtype"]], settings["kernel_stride"]
        whole = {
            (r["op"], r["length"]): r["seconds"]
            for r in bench["results"]
            if r["op"] in ("forward", "forward_backward") and r["variant"] == settings["phi"] and not r["extrapolated"]
        }
        self.points = {"forward": [], "backward": []}  # (tokens, GPUs, seconds on each)
        for (op, length), seconds in sorted(whole.items(), key=lambda item: item[0][1]):
            if length >= shortest and op == "forward":
                self.points["forward"].append((length, 1, seconds))
            elif length >= shortest and ("forward", length) in whole:
                self.points["backward"].append((length, 1, seconds - whole["forward", length]))
        for result in simulated:
            for name in PASSES:
                slowest = max(rank[f"{name}_ms"] for rank in result["times"]) / 1000
                self.points[name].append((result["tokens"], result["simulated_ranks"], slowest))
        self.fits = {
            name: fit([(length / gpus, length**2 / gpus, seconds) for length, gpus, seconds in points])
            for name, points in self.points.items()
        }

    def attention(self, name, length, gpus):
        """Seconds of a pass without collectives."""
        a, b = self.fits[name]
        return (a * length + b * length**2) / gpus

    def collectives(self, name, length, gpus, fabric, reduction):
        """Seconds of a pass in collectives."""
        count = length * (gpus - 1) / gpus * (1 + 1 / self.stride) * self.row
        seconds = fabric.seconds("all_gather", gpus, count * self.width)
        if name == "backward":  # a reduce-scatter is of float32
            seconds += fabric.seconds(reduction, gpus, count * (self.width if reduction == "all_to_all" else 4))
        return seconds

    def total(self, length, gpus, fabric, reduction):
        """Seconds of forward and backward."""
        return sum(
            self.attention(name, length, gpus) + self.collectives(name, length, gpus, fabric, reduction)
            for name in PASSES
        )

    def errors(self, measured=()):
        """Compares each time of the fit, and of what several GPUs measured, with the model."""
        for name, points in self.points.items():
            for length, gpus, seconds in points:
                of = "1" if gpus == 1 else f"1 simulating {gpus}"
                yield Compared(length, of, name, seconds, self.attention(name, length, gpus))
        for run in measured:
            if (fabric := run.fabric()) is None:
                continue
            for row in run.rows():
                length = row["tokens"]
                parts = [
                    self.attention(name, length, run.gpus)
                    + self.collectives(name, length, run.gpus, fabric, "all_to_all")
                    for name in PASSES
                ]
                passes = [(name, row[f"{name}_ms"], part) for name, part in zip(PASSES, parts, strict=True)]
                passes.append(("backward, forward again", row["recomputed_backward_ms"], sum(parts)))
                for name, time, part in passes:
                    yield Compared(length, str(run.gpus), name, time / 1000, part)

    def check_problem(self, measured):
        """Raises where a result is of another problem."""
        found = measured.of("context_parallel")
        for theirs, ours in SETTINGS.items() if found else ():
            if found[ours] != self.settings[theirs]:
                what = f"{ours} = {found[ours]} of {measured.name}"
                raise ValueError(f"{what}: must be the bench's {self.settings[theirs]}")

    def table(self, length, gpus, fabrics, reduction):
        """Lines of a table: milliseconds, and the efficiency over one GPU."""
        header = "".join(f" {fabric.name}: all, ms | efficiency |" for fabric in fabrics)
        yield f"| GPUs | forward, ms | backward, ms |{header}"
        yield "|---:" * (3 + 2 * len(fabrics)) + "|"
        alone = sum(self.attention(name, length, 1) for name in PASSES)
        for count in gpus:
            cells = [f"{1000 * self.attention(name, length, count):.1f}" for name in PASSES]
            for fabric in fabrics:
                total = self.total(length, count, fabric, reduction)
                shown = [f"{1000 * total:.1f}", f"{alone / count / total:.2f}"]
                cells += shown if count <= fabric.most else ["", ""]
            yield f"| {count} | " + " | ".join(cells) + " |"


def draw(model, options, fabrics, measured=()):
    """Time and efficiency over the number of GPUs, with what was measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    times, efficiency = figure.subplots(1, 2)
    for i, length in enumerate(options.tokens):
        alone = sum(model.attention(name, length, 1) for name in PASSES)
        for fabric, style in zip(fabrics, ("-", "--", ":", "-.") * len(fabrics), strict=False):
            gpus = [count for count in options.gpus if count <= fabric.most]
            totals = [model.total(length, count, fabric, options.reduction) for count in gpus]
            label = f"{length} tokens, {fabric.name}"
            times.plot(gpus, [1000 * t for t in totals], style, color=f"C{i}", label=label)
            shares = [alone / count / t for count, t in zip(gpus, totals, strict=True)]
            efficiency.plot(gpus, shares, style, color=f"C{i}")
        simulated = {(n, p): t for n, p, t in model.points["forward"] if p > 1 and n == length}
        for n, p, t in model.points["backward"]:
            if (n, p) in simulated:
                times.plot(
                    [p], [1000 * (simulated[n, p] + t)], "o", color=f"C{i}", label="simulated, without collectives"
                )
    for run in measured:
        for row in run.rows():
            if row["tokens"] in options.tokens:
                color = f"C{options.tokens.index(row['tokens'])}"
                whole = row["forward_ms"] + row["backward_ms"]
                times.plot([run.gpus], [whole], "D", color=color, label=f"measured, {run.name}")
                if "alone" in row:
                    one = row["alone"]["forward_ms"] + row["alone"]["backward_ms"]
                    efficiency.plot([run.gpus], [one / run.gpus / whole], "D", color=color)
    times.set(xlabel="GPUs", ylabel="forward and backward, ms", xscale="log", yscale="log")
    times.set_title("predicted time of one layer's attention", fontsize=10)
    efficiency.set(xlabel="GPUs", xscale="log", ylim=(0, 1.05))
    efficiency.set_title("predicted efficiency", fontsize=10)
    for axes in (times, efficiency):
        axes.set_xscale("log", base=2)
        axes.set_xticks(options.gpus, [str(count) for count in options.gpus], fontsize=8)
        axes.grid(alpha=0.3)
    times.legend(fontsize=7)
    figure.savefig(options.picture, dpi=110)


def main():
    """Prints the errors, and a table for each length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, default=RESULTS / "bench_random.json", help="result of nsa bench --json")
    parser.add_argument("--simulated", type=Path, nargs="*", default=[RESULTS / "simulated_ranks.json"])
    parser.add_argument("--collectives", type=Path, nargs="*", default=[])
    parser.add_argument("--measured", type=Path, nargs="*", default=[])
    parser.add_argument("--fabric", type=Fabric.given, action="append", default=[])
    parser.add_argument("--tokens", type=integers, default=[2**20])
    parser.add_argument("--gpus", type=integers, default=[2**i for i in range(1, 11)])
    parser.add_argument(
        "--from",
        type=integer,
        default=16384,
        dest="shortest",
        help="minimum length in the fit, tokens (default %(default)s)",
    )
    parser.add_argument("--reduction", choices=("all_to_all", "reduce_scatter"), default="all_to_all")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    try:
        bench, *others = (json.loads(path.read_text()) for path in (options.bench, *options.simulated))
        model = Model(bench, others, options.shortest)
        runs = [Measured(json.loads(path.read_text())) for path in options.measured]
        for run in runs:
            model.check_problem(run)
        results = [json.loads(path.read_text()) for path in options.collectives]
        results += [run.of("collectives") for run in runs if run.of("collectives")]
        fabrics = options.fabric + [Fabric.measured(result) for result in results]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not fabrics:
        parser.error("--fabric, --collectives or --measured: must be given")
    print("\n".join(error_table(model.errors(runs))))
    for result, fabric in zip(results, fabrics[len(options.fabric) :], strict=True):
        ratios = [
            fabric.seconds(row["collective"], row["ranks"], row["bytes"]) / row["seconds"]
            for row in result["collectives"]
        ]
        worst = max(abs(ratio - 1) for ratio in ratios)
        print(f"\n{fabric.name}: {len(ratios)} collectives, largest error {100 * worst:.0f} %")
    for length in options.tokens:
        print(f"\n{length} tokens, predicted:\n")
        print("\n".join(model.table(length, options.gpus, fabrics, options.reduction)))
    if options.picture:
        draw(model, options, fabrics, runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
