"""The whole on a GPU: `nsa bench --device cuda`."""

from tables.bench import DENSE, PASSES, Bench, crossovers, limits
from tables.text import figure, fill, gpu_of, ratio, read, source, table


def gpu_times(bench):
    """The whole by length, beside dense attention and the fastest other implementation."""
    phis = [bench.phi] + [phi for phi in ("mlp", "linear", "mean") if phi != bench.phi and bench.times("forward", phi)]
    peers = any(r.get("peer") for pass_name in PASSES for r in bench.results(pass_name, bench.phi).values())
    rows = [
        ["", "length", *(f"NSA, φ = {phi}" for phi in phis), *DENSE.values(), "other NSA", "cuDNN / NSA", "other / NSA"]
    ]
    for pass_name, title in PASSES.items():
        dense = {form: bench.times(f"dense_{pass_name}", form) for form in DENSE}
        for length, r in bench.results(pass_name, bench.phi).items():
            nsa, peer = 1e3 * r["seconds"], 1e3 * r["peer_s"] if r.get("peer") else None
            row = [title, str(length), *(figure(bench.times(pass_name, phi).get(length)) for phi in phis)]
            row += [figure(dense[form].get(length)) for form in DENSE]
            row += [f"{figure(peer)} ({r['peer']})" if peer else ""]
            rows.append([*row, ratio(dense["cudnn"].get(length), nsa), ratio(peer, nsa)])
    return table(rows if peers else [[*row[:-3], row[-2]] for row in rows])


def gpu_whole():
    bench = Bench("bench_cuda.json")
    given, rates = bench.settings["selection"], bench.all["rates"]
    attends = (
        "the blocks that it chooses" if given == "own" else f"given {given} blocks, while its own choice still runs"
    )
    yield "## The whole on a GPU, beside dense attention"
    yield "![attention time over context length on a GPU, with the stages of NSA](images/cuda_time.png)"
    unit = (
        "Medians in ms, the second-level cache flushed before each call. NSA is everything, compression included, and "
        f"attends to {attends}. Dense attention is torch's; the other NSA is the fastest public implementation of "
        f"`bench/peers/peers.py`. Limits, both measured: {limits(rates)}."
    )
    about = {key: bench.all[key] for key in ("date", "commit", "command")}
    yield source(gpu_of(bench.machine), about, f"{bench.problem()}, defaults", unit)
    yield gpu_times(bench)
    yield crossovers(bench)
    yield "### Its stages"
    for pass_name, title in PASSES.items():
        length = 65536
        rows = [[f"{title}, {length} tokens", "ms", "TFLOP", "GB", "share of the limit", "other NSA"]]
        whole = bench.results(pass_name, bench.phi)[length]
        stages = [r for r in bench.all["results"] if r.get("part_of") == pass_name and r["length"] == length]
        stages = [r for r in stages if r["variant"] == bench.phi]
        for r in [*stages, whole]:
            peer = f"{figure(1e3 * r['peer_s'])} ({r['peer']})" if r.get("peer") else ""
            name = "**whole**" if r is whole else r["op"].replace("_", " ")
            work = [f"{r['gflop'] / 1e3:.2f}", f"{r['bytes'] / 1e9:.2f}", f"{r['share']:.0%}"]
            rows.append([name, figure(1e3 * r["seconds"]), *work, peer])
        yield table(rows)


def gpu_h100():
    bench = Bench("bench_h100.json")
    yield "### On an H100"
    about = {key: bench.all[key] for key in ("date", "commit", "command")}
    unit = f"The same on another GPU; its limits: {limits(bench.all['rates'])}."
    yield source(gpu_of(bench.machine), about, f"{bench.problem()}, defaults", unit)
    yield gpu_times(bench)
    yield crossovers(bench)


def beside_earlier():
    """An earlier build and today's in turn: the passes, what one pass is more than the other, and the stages."""
    found = read("regression_64ed625.json")
    before, runs = found["before"], found["runs"]
    yield "## Beside an earlier build"
    yield fill(
        f"{gpu_of(found)}, {found['date']}: B = 1, H = 64, D = 128, bfloat16, defaults, φ = mean; {before} and the "
        "commit named above each table in turn in one run. Milliseconds of both, and the ratio: medians over the turns "
        "of medians, the second-level cache flushed before each call. What was wanted, what limits and what did not "
        "help: the [findings](findings/kernels/hopper_regression_64ed625.md)."
    )

    def cell(pair):
        return f"{figure(1e3 * pair[0])} → {figure(1e3 * pair[1])} ({pair[1] / pair[0]:.3f})" if pair else ""

    def times(run, part_of):
        return {
            (r["op"], r["length"]): (r["before_s"], r["after_s"]) for r in run["results"] if r["part_of"] == part_of
        }

    def passes(columns):
        """Rows of columns, each a run's passes and a length."""
        rows = [[title, *(cell(whole.get((op, n))) for whole, n in columns)] for op, title in PASSES.items()]
        both = [(whole.get(("forward", n)), whole.get(("forward_backward", n))) for whole, n in columns]
        differences = [cell([b - f for f, b in zip(*pair, strict=True)]) if pair[1] else "" for pair in both]
        return [*rows, ["backward: the difference", *differences]]

    whole = [run for run in runs if "--no-parts" in run["command"]]
    yield f"Commit {whole[0]['after']}, random blocks, {whole[0]['turns']} turns ({whole[-1]['turns']} beyond 65536):"
    yield "\n".join(f"    {run['command']}" for run in whole)
    columns = [(times(run, ""), n) for run in whole for n in sorted({r["length"] for r in run["results"]})]
    yield table([["", *(str(n) for _, n in columns)], *passes(columns)])

    staged = [run for run in runs if run not in whole]
    yield f"Commit {staged[0]['after']}, {staged[0]['turns']} turns (one with G = 4); stages of forward and backward:"
    yield "\n".join(f"    {run['command']}" for run in staged)
    columns = [(run, n) for n in (8192, 65536) for run in staged if any(r["length"] == n for r in run["results"])]
    heads = {4: "", 16: ", G = 4"}
    rows = [["", *(f"{n}, {run['selection']}{heads[run['kv_heads']]}" for run, n in columns)]]
    rows += passes([(times(run, ""), n) for run, n in columns])
    stages = [(times(run, "forward_backward"), n) for run, n in columns]
    for op in dict.fromkeys(op for op, _ in stages[0][0]):
        rows.append([op.replace("_", " "), *(cell(found.get((op, n))) for found, n in stages)])
    yield table(rows)
