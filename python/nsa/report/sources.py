"""Run folders of `nsa train`, and results of `nsa bench`, `eval`, `needle`, `inspect`, `recall`."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._files import read_regular
from . import fields
from .fields import ReportError

_MOST = 2**28
"""Maximum bytes of a file. That is a run of half a million lines of metrics."""


def shown(name: str) -> str:
    """A name from outside in a picture: not too long, and dollars are no formula."""
    return (name if len(name) <= 160 else f"{name[:159]}…").replace("$", r"\$")


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
        """Short, and different for runs of the same attention; for a picture."""
        return shown(self.attention if self.name == self.attention else f"{self.attention} ({self.name})")


@dataclass
class Sources:
    runs: list[Run] = field(default_factory=list)
    results: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {kind: [] for kind in fields.RESULTS})
    left_out: list[str] = field(default_factory=list)
    """Files that could not be read, with the reason, a line each."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        return self.results[f"nsa-{kind}"]


def read_sources(paths: list[Path]) -> Sources:
    """Reads run folders, the results that lie in them, and single result files; notes what had to be left out."""
    sources = Sources()

    def attempt(read: Callable[[Path], None], path: Path) -> None:
        try:
            read(path)
        except ReportError as error:
            sources.left_out.append(str(error))
        except OSError as error:
            sources.left_out.append(f"{path}: {error.strerror}")

    def folder_or_file(path: Path) -> None:
        if not path.is_dir():
            _add_result(sources, path, required=True)
            return
        attempt(lambda folder: sources.runs.append(_read_run(folder)), path)
        for file in sorted(path.glob("*.json")):
            if file.name != "config.json":
                attempt(lambda file: _add_result(sources, file, required=False), file)

    for path in paths:
        attempt(folder_or_file, path)
    return sources


def _read_run(folder: Path) -> Run:
    file = folder / "config.json"
    config = _read_json(file)
    if not isinstance(config.get("model"), dict) or "attention" not in config["model"]:
        raise ReportError(f"{file}: no model.attention: not the configuration of a run")
    _check(fields.config, config, str(file))
    lines: dict[str, list[tuple[int, dict[str, Any]]]] = {"train": [], "eval": [], "end": []}
    metrics = folder / "metrics.jsonl"
    for number, text in enumerate(_read_text(metrics).split("\n"), 1):
        if not text.strip():
            continue
        try:
            line = _parse(text)
            lines[line["kind"]].append((number, line))
        except (ValueError, KeyError, TypeError) as error:
            raise ReportError(f"{metrics}:{number}: not a line of metrics: {error}") from error
    if not lines["train"]:
        raise ReportError(f"{metrics}: no training step yet")
    for kind, check in (("train", fields.train_line), ("eval", fields.eval_line)):
        for number, line in lines[kind]:
            _check(check, line, f"{metrics}:{number}")
    layers = [(number, len(line["layers"])) for number, line in lines["train"] if line.get("layers")]
    for number, count in layers:
        if count != layers[0][1]:
            first, expected = layers[0]
            raise ReportError(f"{metrics}:{number}: layers: {count} items: must be {expected}, as in line {first}")
    train, evals = ([line for _, line in lines[kind]] for kind in ("train", "eval"))
    name = "".join(c if c.isprintable() else "\ufffd" for c in folder.resolve().name)
    return Run(name, config, train, evals)


def _add_result(sources: Sources, file: Path, required: bool) -> None:
    result = _read_json(file)
    kind = result.get("kind")
    if kind is None and isinstance(result.get("stages"), dict) and "decode" in result["stages"]:
        kind = "nsa-decode"  # of tools/gpu.sh
    if isinstance(kind, str) and kind in fields.RESULTS:
        _check(fields.RESULTS[kind], result, str(file))
        sources.results[kind].append(result)
    elif required:
        raise ReportError(f"{file}: kind = {reprlib.repr(kind)}: must be one of {', '.join(fields.RESULTS)}")


def _check(check: fields.Check, value: Any, place: str) -> None:
    try:
        check(value, "")
    except ReportError as error:
        raise ReportError(f"{place}: {error}") from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = _parse(_read_text(file))
    except ValueError as error:
        raise ReportError(f"{file}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ReportError(f"{file}: must hold a JSON object")
    return value


def _parse(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number in JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _read_text(file: Path) -> str:
    try:
        return read_regular(file, most=_MOST).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ReportError(f"{file}: {error}") from error
    except ValueError as error:  # with the file's name
        raise ReportError(str(error)) from error
