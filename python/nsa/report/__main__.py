"""Draws the report: python -m nsa.report PATH... [--out DIR]."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._files import named_path
from .sources import Sources, read_sources


def main(arguments: list[str] | None = None) -> int:
    """Draws the report, or writes events; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m nsa.report",
        description="Draws training runs and measurements as one HTML page and PNGs. What cannot be read is "
        "named on stderr and left out; the exit code is then 2.",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        type=named_path,
        metavar="PATH",
        help="run folder of nsa train (with the results in it), or a JSON file of nsa bench, eval, "
        "needle, inspect, recall or tools/gpu.sh decode",
    )
    parser.add_argument(
        "--out", type=named_path, default=Path("report"), metavar="DIR", help="folder of the report (default: report)"
    )
    parser.add_argument("--only", metavar="NAME", help="draw only this picture, without the page")
    parser.add_argument(
        "--tensorboard",
        type=named_path,
        metavar="DIR",
        help="write the runs' metrics as TensorBoard's events, not a page",
    )
    options = parser.parse_args(arguments)
    sources = read_sources(options.paths)
    for line in sources.left_out:
        _complain(line)
    if not sources.runs and not any(sources.results.values()):
        return 2
    if options.tensorboard:
        return _write_events(sources, options.tensorboard)
    try:
        from . import decode, gpu, measurements, training
        from .page import write_page
        from .style import save
    except ImportError as error:
        print(f"report: {error}: pip install matplotlib", file=sys.stderr)
        return 1

    sections = [
        (
            "loss",
            training.loss,
            "Loss",
            "In training (lines) and on held-out documents (points), at equal tokens and equal time.",
        ),
        (
            "loss_by_position",
            training.loss_by_position,
            "Loss by position",
            "Further back in the context means more to attend to; a model that uses it has a lower loss there.",
        ),
        ("speed", training.speed, "Training speed", "Whole model, evaluations not counted."),
        (
            "speed_over_context",
            training.speed_over_context,
            "Training speed over context",
            "Of runs with different contexts: medians without the first line of the log.",
        ),
        (
            "attention_time",
            measurements.attention_time,
            "Attention time over length",
            "One call of attention, without projections; both axes are logarithmic.",
        ),
        (
            "cuda_time",
            gpu.cuda_time,
            "Attention time over length on a GPU",
            "One call of everything, and its stages one upon the other. Both axes are logarithmic: the height of a "
            "layer is not its share.",
        ),
        (
            "decode_time",
            decode.decode_time,
            "Decode steps over the context",
            "One token of every sequence. Both axes are logarithmic.",
        ),
        (
            "generate_speed",
            decode.generate_speed,
            "Generating over the context",
            "Whole models, all sequences together.",
        ),
        ("selection_map", measurements.selection_map, "Selection map", "Blocks that the queries of one text selected."),
        ("gates", training.gates, "Gates", "Mean of each branch's gate; a branch near 0 is starved."),
        (
            "selection_health",
            training.selection_health,
            "Selection during training",
            "A collapsing selection shows as entropy or free picks that fall towards 0.",
        ),
        (
            "needle",
            measurements.needle,
            "Needle in a haystack",
            "Retrieval accuracy of a key-value needle by context length and needle depth.",
        ),
        (
            "recall_map",
            measurements.recall_map,
            "Recall map",
            "Associative recall beyond the sliding window: three small models, trained on the same sequences.",
        ),
        ("recall", training.recall, "Recall", "Key-value pairs further apart than the sliding window."),
    ]
    if options.only and options.only not in {name for name, *_ in sections}:
        parser.error(f"--only {options.only}: must be one of {', '.join(name for name, *_ in sections)}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        pictures = []
        for name, draw, title, text in sections:
            if options.only and name != options.only:
                continue
            picture = draw(sources)
            if picture is not None:
                file = options.out / f"{name}.png"
                save(picture, file)
                pictures.append((title, text, file))
        if options.only:
            for _, _, file in pictures:
                print(file)
        else:
            page = options.out / "report.html"
            write_page(page, sources, pictures)
            print(f"{page}: {len(pictures)} pictures of {len(sources.runs)} runs")
    except OSError as error:
        _complain(str(error))
        return 1
    return 2 if sources.left_out else 0


def _write_events(sources: Sources, folder: Path) -> int:
    """A folder of events for each run: what each line of its metrics.jsonl has, at its step."""
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        print(f"report: {error}: pip install tensorboard", file=sys.stderr)
        return 1
    try:
        for run in sources.runs:
            place = folder / run.name
            if place.exists():
                raise FileExistsError(f"{place}: exists already")
            with SummaryWriter(str(place)) as writer:
                for kind, lines in (("train", run.train), ("eval", run.evals)):
                    for line in lines:
                        for name, value in _scalars(line):
                            writer.add_scalar(f"{kind}/{name}", value, line.get("step"))
            print(place)
    except OSError as error:
        _complain(str(error))
        return 1
    return 2 if sources.left_out else 0


def _scalars(line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in line.items():
        if isinstance(value, int | float) and name != "step":
            yield name, value
    for i, layer in enumerate(line.get("layers") or []):
        for name, value in layer.items():
            if name != "layer":
                yield f"layer {layer.get('layer', i)}/{name}", value


def _complain(message: str) -> None:
    """In one line, whatever characters a name has."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in message)
    print(f"report: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
