"""Schemas of the files: every field that a picture reads, checked once, when the file is read."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any, str], None]
"""Raises ReportError unless a value is as it should be; the string is the field's name in its file."""

_LARGEST = 1e15
_MAX_LAYERS, _MAX_HEADS = 128, 64  # a panel each: a picture has at most 2^16 pixels to a side


class ReportError(Exception):
    """A file that is missing or not what it should be; the message names it."""


def refuse(where: str, value: Any, rule: str) -> None:
    raise ReportError(f"{where} = {'null' if value is None else reprlib.repr(value)}: must be {rule}")


def number(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        refuse(where, value, f"a number from {-_LARGEST:g} to {_LARGEST:g}")


def positive(value: Any, where: str) -> None:
    """For logarithmic axes."""
    number(value, where)
    if value < 1 / _LARGEST:
        refuse(where, value, f"at least {1 / _LARGEST:g}")


def whole(least: int = 0, most: int = int(_LARGEST)) -> Check:
    def check(value: Any, where: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            refuse(where, value, f"a whole number from {least} to {most}")

    return check


def flag(value: Any, where: str) -> None:
    if not isinstance(value, bool):
        refuse(where, value, "true or false")


def text(most: int = 300) -> Check:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, str) or len(value) > most or not value.isprintable():
            refuse(where, value, f"a text of at most {most} printable characters")

    return check


def nullable(inner: Check) -> Check:
    def check(value: Any, where: str) -> None:
        if value is not None:
            inner(value, where)

    return check


def items(inner: Check, least: int = 0, most: int = 1_000_000) -> Check:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, list) or not least <= len(value) <= most:
            refuse(where, value, f"a list of {least} to {most} items")
        for i, item in enumerate(value):
            inner(item, f"{where}[{i}]")

    return check


def record(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """Fields that no picture reads may be anything."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            refuse(where or "the file", value, "an object")
        prefix = f"{where}." if where else ""
        for name, inner in required.items():
            if name not in value:
                raise ReportError(f"no {prefix}{name}")
            inner(value[name], prefix + name)
        for name, inner in (optional or {}).items():
            if name in value:
                inner(value[name], prefix + name)

    return check


def same_length(value: dict[str, Any], where: str, *names: str) -> None:
    first, *others = names
    for name in others:
        if len(value[name]) != len(value[first]):
            raise ReportError(f"{where}{name}: {len(value[name])} items: must be {len(value[first])}, as {first} has")


_count, _text, _path = whole(), text(), text(4096)
_numbers = items(number)

# ---------------------------------------------------------------------------------------------------------- run folders

_SIZES = ("num_layers", "hidden_size", "num_heads", "num_kv_heads")
config = record(
    {
        "model": record({"attention": _text}, dict.fromkeys(_SIZES, whole(1))),
        "train": record({"context": whole(1)}, {"device": _text}),
    },
    {
        "parameters": record({}, dict.fromkeys(("total", "phi", "gates", "extra_kv"), nullable(number))),
        "data": record({}, {"paths": items(_path), "ids": text(4096), "tokenizer": _path}),
        "fingerprint": _text,
    },
)

_LAYER = ("gate_cmp", "gate_slc", "gate_swa", "unforced_share", "selection_entropy", "neighbour_overlap")
_progress = {"tokens": _count, "seconds": number, "loss": number}
_SCALARS = ("lr", "grad_norm", "model_tflops", "noise")

train_line = record(
    {**_progress, "tokens_per_second": number},
    {
        "step": _count,
        **dict.fromkeys(_SCALARS, number),
        "layers": nullable(items(record(dict.fromkeys(_LAYER, number), {"layer": _count}), most=_MAX_LAYERS)),
    },
)
eval_line = record(
    _progress,
    {
        "step": _count,
        "bits_per_byte": nullable(number),
        "loss_by_position": nullable(
            items(record({"from": _count, "to": whole(1), "loss": number, "tokens": _count}), most=1000)
        ),
    },
)

# -------------------------------------------------------------------------------------------------------------- results

_SETTINGS = {"dtype": _text, "num_heads": whole(1), "num_kv_heads": whole(1), "head_dim": whole(1)}
_POINT = {"op": _text, "variant": _text, "length": whole(1), "extrapolated": flag}
_crossover = record(
    {}, dict.fromkeys(("forward", "forward_backward"), nullable(record({}, {"dense": nullable(positive)})))
)
_cpu_bench = record(
    {
        "settings": record(_SETTINGS),
        "machine": record({"cpu": _text, "threads": whole(1), "isa": _text}),
        "results": items(record(_POINT, {"seconds": positive, "best_s": positive}), most=10000),
    },
    {"crossover": _crossover},
)
_gpu_bench = record(
    {
        "settings": record({**_SETTINGS, "v_head_dim": whole(1), "phi": _text}),
        "machine": record({"gpu": _text}),
        "results": items(
            record(
                {**_POINT, "seconds": positive},
                {"part_of": _text, "peer": nullable(_text), "peer_s": nullable(positive)},
            ),
            most=10000,
        ),
    },
    {"crossover": _crossover},
)


def _bench(value: dict[str, Any], where: str) -> None:
    record({"machine": record({}), "results": items(record({}))})(value, where)
    gpu = "gpu" in value["machine"]
    (_gpu_bench if gpu else _cpu_bench)(value, where)
    for i, point in enumerate(value["results"]):
        if not gpu and "seconds" not in point and "best_s" not in point:
            raise ReportError(f"no results[{i}].seconds")
        if gpu and point.get("peer") and point.get("peer_s") is None:
            raise ReportError(f"no results[{i}].peer_s")


def _needle(value: dict[str, Any], where: str) -> None:
    some = items(number, least=1, most=256)
    fields = {"checkpoint": _path, "lengths": items(whole(1), 1, 256), "depths": some, "samples": _count}
    record({**fields, "exact": items(some, least=1, most=256)}, {"task": _text, "lines": _count})(value, where)
    same_length(value, where, "lengths", "exact")
    for i, row in enumerate(value["exact"]):
        if len(row) != len(value["depths"]):
            raise ReportError(f"exact[{i}]: {len(row)} items: must be {len(value['depths'])}, as depths has")


def _map(value: Any, where: str) -> None:
    blocks = items(items(whole(-1, 2**20), most=4096), least=1, most=4096)
    record({"query_positions": items(_count, least=1), "blocks": blocks, "forced": blocks})(value, where)
    same_length(value, f"{where}.", "blocks", "forced", "query_positions")


_head = record({"kv_head": _count, "unforced_share": number, "map": _map})
_inspected = record(
    {
        "layer": _count,
        "gates": record(dict.fromkeys(("cmp", "slc", "swa"), number)),
        "kv_heads": items(_head, least=1, most=_MAX_HEADS),
    }
)
_inspect = record({"checkpoint": _path, "layers": items(_inspected, most=_MAX_LAYERS)})
_shares = items(nullable(number), least=1, most=256)
_recall_fields = record(
    {"chance": number},
    {
        "scores": record(
            {},
            dict.fromkeys(
                ("nsa", "full", "window", "nsa_window_gate_only"),
                record({}, {"accuracy": nullable(number), "by_distance": _shares}),
            ),
        ),
        "history": nullable(
            items(record({"step": _count}, dict.fromkeys(("nsa", "full"), record({"accuracy": number}))))
        ),
        "distances": items(_count, least=2, most=257),
        "window_size": whole(1),
    },
)


def _recall(value: dict[str, Any], where: str) -> None:
    _recall_fields(value, where)
    parts = len(value.get("distances", [])) - 1
    for model in ("nsa", "full", "window"):
        row = value.get("scores", {}).get(model, {}).get("by_distance")
        if row is not None and "distances" in value and len(row) != parts:
            place = f"scores.{model}.by_distance"
            raise ReportError(f"{place}: {len(row)} items: must be {parts}, between the distances")


_step = record(
    {"batch": whole(1), "new": whole(1), "median": positive, "floor": positive, "dense_floor": positive},
    {"cache": _text},
)
_decode_stage = record(
    {"problem": _text, "context": whole(1), "ragged": flag, "selection": _text, "steps": items(_step, most=1000)}
)
_dense_step = record({"batch": whole(1), "context": whole(1), "us": record({}), "best": _text})
_generate_step = record({"attention": _text, "batch": whole(1), "context": whole(1), "tokens_per_second": positive})


def cuda_decode_stages(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Results of `cuda_decode` in a file of `tools/gpu.sh decode`, by stage."""
    stages = result["stages"].items()
    return {name: stage["result"] for name, stage in stages if name.startswith("decode") and name != "decode_dense"}


def steps_of_one_token(result: Mapping[str, Any]) -> dict[tuple[int, int], dict[str, Any]]:
    """Those of the first problem, with the step's own selection and caches in bfloat16, by sequences and context."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    stages = cuda_decode_stages(result)
    for part in stages.values():
        if part["ragged"] or part["selection"] != "own" or part["problem"] != stages["decode"]["problem"]:
            continue
        for step in part["steps"]:
            if step["new"] == 1 and step.get("cache", "bfloat16") == "bfloat16":
                found.setdefault((step["batch"], part["context"]), step)
    return found


def _decode(value: dict[str, Any], where: str) -> None:
    record({"gpu": _text, "stages": record({"decode": record({})})})(value, where)
    for name, stage in value["stages"].items():
        place = f"stages.{reprlib.repr(name)}"
        if name == "decode_dense":
            record({"result": record({"steps": items(_dense_step, most=1000)})})(stage, place)
            for i, step in enumerate(stage["result"]["steps"]):
                record({step["best"]: positive})(step["us"], f"{place}.result.steps[{i}].us")
        elif name == "generate_speed":
            record({"result": record({"problem": _text, "steps": items(_generate_step, least=1, most=1000)})})(
                stage, place
            )
        elif name.startswith("decode"):
            record({"result": _decode_stage})(stage, place)


_compared = record({"checkpoint": _path, "difference": number}, {"half_width": nullable(number)})

RESULTS: dict[str, Check] = {
    "nsa-bench": _bench,
    "nsa-decode": _decode,
    "nsa-eval": record({}, {"checkpoint": _path, "against": _compared}),  # a sentence, no picture
    "nsa-needle": _needle,
    "nsa-inspect": _inspect,
    "nsa-recall": _recall,
}
