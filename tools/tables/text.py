"""Helpers of the tables: files, Markdown, and the lines above a table."""

import json
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"


def read(name):
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def fill(text):
    return textwrap.fill(text, width=120, break_on_hyphens=False)


def table(rows):
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def figure(value):
    """A time in whatever unit the table has: three digits, more only before the point."""
    return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def seconds(value):
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def pair(stage):
    """Forward / backward of one implementation."""
    return "/".join(filter(None, (figure(stage["forward"]), figure(stage["backward"])))) if stage else ""


def ratio(other, ours):
    return f"{other / ours:.2f}" if other and ours else ""


def source(where, about, problem, unit):
    """The lines above a table; `about` has date, commit and command."""
    commit = f"commit {about['commit']}" if about.get("commit") else "commit not recorded"
    text = fill(f"{where}, {about['date']}, {commit}: {problem}. {unit}")
    return text + "\n\n" + textwrap.indent(about["command"], "    ")


def gpu_of(about):
    return f"{about['gpu'].split(',')[0]}, driver {about['driver']}"


def noted(stage):
    """Notes on a stage's figures."""
    if "note" in stage:
        yield fill(stage["note"])
