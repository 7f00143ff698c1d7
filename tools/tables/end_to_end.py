"""`nsa_attention` end to end, and its operations on a CPU: `nsa bench`."""

from tables.bench import DENSE, PASSES, RIVALS, Bench, crossovers, limits
from tables.text import figure, fill, gpu_of, ratio, seconds, source, table


def gpu_times(bench):
    """Times by length, with those of dense attention and of the fastest other implementation."""
    phis = [bench.phi] + [phi for phi in ("mlp", "linear", "mean") if phi != bench.phi and bench.times("forward", phi)]
    peers = any(r.get("peer") for pass_name in PASSES for r in bench.results(pass_name, bench.phi).values())
    # FlashAttention-2 is the slowest of them at every length.
    forms = [form for form in DENSE if form != "flash2" and bench.times("dense_forward", form)]
    columns = [*(f"NSA, φ = {phi}" for phi in phis), *(DENSE[form] for form in forms)]
    rows = [["", "length", *columns, "other NSA", "fastest dense / NSA", "other / NSA"]]
    for pass_name, title in PASSES.items():
        dense = {form: bench.times(f"dense_{pass_name}", form) for form in forms}
        for length, r in bench.results(pass_name, bench.phi).items():
            if length & (length - 1):
                continue  # measured for the crossover
            nsa, peer = 1e3 * r["seconds"], 1e3 * r["peer_s"] if r.get("peer") else None
            row = [title, str(length), *(figure(bench.times(pass_name, phi).get(length)) for phi in phis)]
            row += [figure(dense[form].get(length)) for form in forms]
            row += [f"{figure(peer)} ({r['peer']})" if peer else ""]
            rows.append([*row, bench.over_dense(pass_name, length, 2), ratio(peer, nsa)])
    return table(rows if peers else [[*row[:-3], row[-2]] for row in rows])


def gpu_end_to_end():
    bench = Bench("bench_cuda.json")
    own, rates = bench.settings["selection"] == "own", bench.all["rates"]
    attends = "the blocks that it selects" if own else "given blocks; its own selection still runs"
    yield "## End to end on a GPU, against dense attention"
    yield "![attention time over context length on a GPU, with the stages of NSA](images/cuda_time.png)"
    backward = ", whose backward is [of another run](#with-the-recipes-blocks)" if bench.borrows() else ""
    unit = (
        f"Medians in ms, L2 flushed before each call. NSA includes compression and attends to {attends}. Dense "
        f"attention is cuDNN through torch, and FlashAttention-3{backward}; FlashAttention-2 is slower. "
        "The other NSA is the fastest public implementation in `bench/peers/peers.py`. Measured "
        f"limits: {limits(rates)}."
    )
    about = {key: bench.all[key] for key in ("date", "commit", "command")}
    yield source(gpu_of(bench.machine), about, f"{bench.problem()}, defaults", unit)
    yield gpu_times(bench)
    yield crossovers(bench)
    yield "### Stages"
    for pass_name, title in PASSES.items():
        length = 65536
        rows = [[f"{title}, {length} tokens", "ms", "TFLOP", "GB", "share of the limit", "other NSA"]]
        end_to_end = bench.results(pass_name, bench.phi)[length]
        stages = [r for r in bench.all["results"] if r.get("part_of") == pass_name and r["length"] == length]
        stages = [r for r in stages if r["variant"] == bench.phi]
        for r in [*stages, end_to_end]:
            peer = f"{figure(1e3 * r['peer_s'])} ({r['peer']})" if r.get("peer") else ""
            name = "**end to end**" if r is end_to_end else r["op"].replace("_", " ")
            work = [f"{r['gflop'] / 1e3:.2f}", f"{r['bytes'] / 1e9:.2f}", f"{r['share']:.0%}"]
            rows.append([name, figure(1e3 * r["seconds"]), *work, peer])
        yield table(rows)


def gpu_recipe():
    yield "### With the recipe's blocks"
    for name in ("bench_recipe.json", "bench_recipe_stride_16.json"):
        bench = Bench(name)
        s = bench.settings
        about = {key: bench.all[key] for key in ("date", "commit", "command")}
        blocks = (
            f"compression blocks of {s['kernel_size']} tokens, stride {s['kernel_stride']}, {s['topk']} selected "
            f"blocks of {s['block_size']}"
        )
        yield source(gpu_of(bench.machine), about, f"{bench.problem()}, {blocks}", "Medians in ms, as above.")
        yield gpu_times(bench)
        yield crossovers(bench)


def gpu_h100():
    bench = Bench("bench_h100.json")
    yield "### On an H100"
    about = {key: bench.all[key] for key in ("date", "commit", "command")}
    unit = f"Measured limits: {limits(bench.all['rates'])}."
    yield source(gpu_of(bench.machine), about, f"{bench.problem()}, defaults", unit)
    yield gpu_times(bench)
    yield crossovers(bench)


def cpu_end_to_end():
    yield "## End to end on a CPU, against dense attention"
    yield fill(
        "Seconds, the best of several calls; φ = mean. Dense is torch's `scaled_dot_product_attention` with the same "
        "threads, the faster of expanded K/V and `enable_gqa`. Plain is causal attention on the library's own kernels, "
        "so its ratio is the gain of the method alone. \\* Extrapolated as the square of the length."
    )
    names = ("bench_bfloat16.json", "bench_bfloat16_zen4.json", "bench_bfloat16_xeon.json", "bench_float32.json")
    for name in names:
        bench = Bench(name)
        machine = bench.machine
        where = f"{machine['cpu']} ({machine['processor']}), {machine['threads']} threads, {machine['isa']}"
        yield source(where, bench.all, f"{bench.problem()}, defaults", "")
        rows = [["", "length", "NSA", "dense", "dense / NSA", "plain / NSA"]]
        for r in sorted(bench.all["ratios"], key=lambda r: r["pass"] != "forward"):
            mark = " *" if r["extrapolated"] else ""
            row = [PASSES[r["pass"]], str(r["length"]), seconds(r["seconds"]), seconds(r["dense_seconds"]) + mark]
            rows.append([*row, *(f"{r[f'over_{kind}']:.1f}" for kind in ("dense", "plain"))])
        yield table(rows)
        yield crossovers(bench, RIVALS)


def cpu_operations():
    yield "### Single operations on a CPU"
    benches = [Bench("bench_bfloat16.json"), Bench("bench_float32.json")]
    length = 16384
    yield fill(
        f"From the same runs, at {length} tokens. GF/s counts the multiplications and additions of the operation "
        "([measuring](guide/measuring.md#what-is-counted)). Peak is the share of the peak FMA rate, measured right "
        "after each result."
    )
    rows = [["", *(f"{b.settings['dtype']}, {what}" for b in benches for what in ("ms", "GF/s", "peak"))]]
    for r in benches[0].all["results"]:
        if r["length"] != length or r["op"].startswith("dense") or r["extrapolated"]:
            continue
        row = [" ".join(filter(None, (r["op"].replace("_", " "), r["variant"])))]
        for bench in benches:
            same = bench.results(r["op"], r["variant"]).get(length)
            if same:
                share = f"{same['gflops'] / same['peak_gflops']:.0%}"
                row += [figure(1e3 * same["seconds"]), f"{same['gflops']:.0f}", share]
            else:
                row += ["", "", ""]
        rows.append(row)
    yield table(rows)
