"""Run folders of `nsa train`, and results of `nsa bench`, `eval`, `needle`, `inspect`, `recall`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KINDS = ("nsa-bench", "nsa-eval", "nsa-needle", "nsa-inspect", "nsa-recall")


class ReportError(Exception):
    """A file that is missing or not what it should be; the message names it."""


@dataclass
class Run:
    """A run folder: its configuration and the lines of its metrics by kind."""

    name: str
    config: dict[str, Any]
    train: list[dict[str, Any]]
    evals: list[dict[str, Any]]

    @property
    def attention(self) -> str:
        return self.config["model"]["attention"]

    @property
    def label(self) -> str:
        """Short, and different for runs of the same attention."""
        return self.attention if self.name == self.attention else f"{self.attention} ({self.name})"


@dataclass
class Sources:
    runs: list[Run] = field(default_factory=list)
    results: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return self.results[f"nsa-{kind}"]


def read_sources(paths: list[Path]) -> Sources:
    """Reads run folders, the results that lie in them, and single result files.

    Raises:
        ReportError: a path that is none of these, or a file that cannot be read.
    """
    sources = Sources()
    for path in paths:
        if path.is_dir():
            sources.runs.append(_read_run(path))
            for file in sorted(path.glob("*.json")):
                _add_result(sources, file, required=False)
        else:
            _add_result(sources, path, required=True)
    return sources


def _read_run(folder: Path) -> Run:
    config = _read_json(folder / "config.json")
    if not isinstance(config.get("model"), dict) or "attention" not in config["model"]:
        raise ReportError(f"{folder / 'config.json'}: no model.attention: not the configuration of a run")
    lines: dict[str, list[dict[str, Any]]] = {"train": [], "eval": [], "end": []}
    metrics = folder / "metrics.jsonl"
    for number, text in enumerate(_read_text(metrics).splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            lines[line["kind"]].append(line)
        except (ValueError, KeyError, TypeError) as error:
            raise ReportError(f"{metrics}:{number}: not a line of metrics: {error}") from error
    if not lines["train"]:
        raise ReportError(f"{metrics}: no training step yet")
    return Run(folder.resolve().name, config, lines["train"], lines["eval"])


def _add_result(sources: Sources, file: Path, required: bool) -> None:
    result = _read_json(file)
    kind = result.get("kind")
    if kind in sources.results:
        sources.results[kind].append(result)
    elif required:
        raise ReportError(f"{file}: kind = {kind!r}: must be one of {', '.join(KINDS)}")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read_text(file))
    except ValueError as error:
        raise ReportError(f"{file}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ReportError(f"{file}: must hold a JSON object")
    return value


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{file}: {error}") from error
