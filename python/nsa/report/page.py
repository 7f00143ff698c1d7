"""The HTML page: who is ahead, a table of the runs, and the pictures, embedded."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

from . import write_file
from .sources import Run, Sources

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222; }
h1 { font-size: 1.6em; } h2 { font-size: 1.2em; margin: 2em 0 .3em; } p { max-width: 46em; }
img { max-width: 100%; height: auto; } table { border-collapse: collapse; }
th, td { padding: .3em .8em; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
"""


def write_page(file: Path, sources: Sources, pictures: list[tuple[str, str, Path]]) -> None:
    """pictures: title, what it shows, PNG file."""
    body = ["<h1>Native Sparse Attention: report</h1>"]
    for sentence in verdicts(sources):
        print(sentence)
        body.append(f"<p><strong>{escape(sentence)}</strong></p>")
    if sources.runs:
        body.append(_table(sources.runs))
    write_document(file, "NSA report", body, pictures)


def write_document(file: Path, name: str, body: list[str], pictures: list[tuple[str, str, Path]]) -> None:
    """A page of HTML elements, and pictures behind them: title, text, PNG file."""
    body = list(body)
    for title, text, png in pictures:
        data = base64.b64encode(png.read_bytes()).decode()
        body += [f"<h2>{escape(title)}</h2>", f"<p>{escape(text)}</p>"]
        body.append(f'<img src="data:image/png;base64,{data}" alt="{escape(title)}">')
    content = "\n".join(body)
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{content}\n</body></html>\n"
    )
    write_file(file, page.encode())


def verdicts(sources: Sources) -> list[str]:
    """Who is ahead, a sentence for each comparison: those of `nsa eval --against`, else the first two runs."""
    found = []
    for result in sources.of("eval"):
        if "against" not in result or "checkpoint" not in result:
            continue
        compared, half_width = result["against"], result["against"].get("half_width")
        found.append(
            _verdict(_last(result["checkpoint"]), _last(compared["checkpoint"]), compared["difference"], half_width)
        )
    runs = [run for run in sources.runs if run.evals]
    if found or len(runs) < 2:
        return found
    ours, theirs = runs[:2]
    if ours.config.get("fingerprint") != theirs.config.get("fingerprint"):
        return [f"{ours.name} and {theirs.name} have different data, so their losses are not compared."]
    sentence = _verdict(ours.name, theirs.name, ours.evals[-1]["loss"] - theirs.evals[-1]["loss"], None)
    return [f"{sentence} nsa eval {ours.name} --against {theirs.name} --json FILE gives the interval."]


def _verdict(ours: str, theirs: str, difference: float, half_width: float | None) -> str:
    interval = "without an interval" if half_width is None else f"± {half_width:.4f}, paired 95 % interval"
    if half_width is not None and abs(difference) <= half_width:
        return f"{ours} and {theirs} are level: {difference:+.4f} nats per token of held-out loss ({interval})."
    ahead, behind = (ours, theirs) if difference < 0 else (theirs, ours)
    return f"{ahead} is ahead of {behind} by {abs(difference):.4f} nats per token of held-out loss ({interval})."


def _last(path: str) -> str:
    return path.rstrip("/").split("/")[-1]


def _model(run: Run) -> str:
    model = run.config["model"]
    sizes = [model.get(key) for key in ("num_layers", "hidden_size", "num_heads", "num_kv_heads")]
    if None in sizes:
        return run.attention
    layers, width, heads, kv_heads = sizes
    return f"{run.attention}, {layers} layers of {width}, {heads} heads, {kv_heads} KV heads"


def _data(run: Run) -> str:
    data = run.config.get("data", {})
    paths = [data["ids"]] if data.get("ids") else data.get("paths")
    if paths is None:
        return "-"
    tokens = data.get("tokenizer") or "token numbers"
    names = ", ".join(map(_last, paths)) or "Python sources"
    return f"{names}; {_last(tokens)}; context {_count(run.config['train']['context'])}"


def _table(runs: list[Run]) -> str:
    header = [
        "run",
        "model",
        "data",
        "device",
        "held-out loss (nats per token)",
        "bits per byte",
        "parameters",
        "of it φ",
    ]
    header += ["gates", "extra K/V", "tokens seen", "minutes", "tokens per second"]
    rows = []
    for run in runs:
        counts, last = run.config.get("parameters", {}), run.train[-1]
        rates = sorted(line["tokens_per_second"] for line in run.train)
        held_out = run.evals[-1] if run.evals else {}
        cells = [run.name, _model(run), _data(run), run.config["train"].get("device", "-")]
        cells += [f"{x:.4f}" if (x := held_out.get(key)) is not None else "-" for key in ("loss", "bits_per_byte")]
        cells += [_count(counts.get(key)) for key in ("total", "phi", "gates", "extra_kv")]
        cells += [_count(last["tokens"]), f"{last['seconds'] / 60:.1f}", _count(rates[len(rates) // 2])]
        rows.append(cells)
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return f"<table><tr>{head}</tr>\n" + "\n".join(lines) + "</table>"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
