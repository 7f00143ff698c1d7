"""`nsa generate` and llama.cpp with the same Llama on a CPU: bench/models/llama_cpp.py."""

from tables.text import noted, ratio, read, source, table


def cell(row, rate):
    """Tokens/s, or why there are none."""
    return f"{row[rate]:.3g}" if rate in row else next((run["error"] for run in row["runs"] if "error" in run), "")


def llama_cpp():
    result = read("llama_cpp.json")
    shape, names = result["shape"], result["engines"]
    rows = {(row["context"], row["engine"]): row for row in result["rows"]}
    engines = [engine for engine in names if any(engine == found for _, found in rows)]
    yield "### llama.cpp with the same Llama"
    problem = (
        f"random weights, {shape['num_hidden_layers']} layers, hidden {shape['hidden_size']}, vocabulary "
        f"{shape['vocab_size']}, {result['threads']} threads, {result['llama_cpp']}"
    )
    yield source(", ".join([result["cpu"], *result["flags"]]), result, problem, "Tokens/s.")
    cells = [["", "context", *(names[engine] for engine in engines), "NSA / llama.cpp"]]
    for rate in ("prompt", "generation"):
        for context in sorted({context for context, _ in rows}):
            found = {engine: rows.get((context, engine), {"runs": []}) for engine in engines}
            dense = max((row[rate] for engine, row in found.items() if "f16" in engine and rate in row), default=None)
            figures = (cell(row, rate) for row in found.values())
            cells.append([rate, str(context), *figures, ratio(found["sparse"].get(rate), dense)])
    yield table(cells)
    yield from noted(result)
