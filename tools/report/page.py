"""The HTML page: a table of the runs and the pictures, embedded."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

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
    if sources.runs:
        body.append(_table(sources.runs))
    for title, text, png in pictures:
        data = base64.b64encode(png.read_bytes()).decode()
        body += [f"<h2>{escape(title)}</h2>", f"<p>{escape(text)}</p>"]
        body.append(f'<img src="data:image/png;base64,{data}" alt="{escape(title)}">')
    content = "\n".join(body)
    file.write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>NSA report</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{content}\n</body></html>\n",
        encoding="utf-8",
    )


def _table(runs: list[Run]) -> str:
    header = ("run", "attention", "parameters", "of it φ", "gates", "extra K/V", "tokens seen", "minutes", "tokens/s")
    header += ("held-out loss (nats)", "bits per byte")
    rows = []
    for run in runs:
        counts, last = run.config.get("parameters", {}), run.train[-1]
        rates = sorted(line["tokens_per_second"] for line in run.train)
        held_out = run.evals[-1] if run.evals else {}
        cells = [run.name, run.attention]
        cells += [_count(counts.get(key)) for key in ("total", "phi", "gates", "extra_kv")]
        cells += [_count(last["tokens"]), f"{last['seconds'] / 60:.1f}", _count(rates[len(rates) // 2])]
        cells += [f"{x:.4f}" if (x := held_out.get(key)) is not None else "-" for key in ("loss", "bits_per_byte")]
        rows.append(cells)
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return f"<table><tr>{head}</tr>\n" + "\n".join(lines) + "</table>"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
