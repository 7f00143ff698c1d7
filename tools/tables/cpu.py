"""`nsa_attention` end to end and its operations on a CPU: `nsa bench`."""

from tables.bench import PASSES, RIVALS, Bench, crossovers
from tables.text import figure, fill, seconds, source, table


def cpu_end_to_end():
    yield "## End to end on a CPU, against dense attention"
    yield "![attention time over context length on a CPU](images/attention_time.png)"
    yield fill(
        "Seconds, the best of several calls; φ = mean. Dense is torch's `scaled_dot_product_attention` with the same "
        "threads, the faster of expanded K/V and `enable_gqa`. Plain is causal attention on the library's own kernels, "
        "so its ratio is the gain of the method alone. \\* Extrapolated as the square of the length."
    )
    for name in ("bench_bfloat16.json", "bench_float32.json"):
        bench = Bench(name)
        machine = bench.machine
        where = f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}"
        yield source(where, bench.all, f"{bench.problem()}, defaults", "")
        rows = [["", "length", "NSA", "dense", "dense / NSA", "plain", "plain / NSA"]]
        for r in sorted(bench.all["ratios"], key=lambda r: r["pass"] != "forward"):
            mark = " *" if r["extrapolated"] else ""
            row = [PASSES[r["pass"]], str(r["length"]), seconds(r["seconds"])]
            for kind in ("dense", "plain"):
                row += [seconds(r[f"{kind}_seconds"]) + mark, f"{r[f'over_{kind}']:.1f}"]
            rows.append(row)
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
