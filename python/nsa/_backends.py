"""Backends of the operations."""

from __future__ import annotations

import os
from typing import NamedTuple

from ._arguments import checked
from ._registration import ops

NAMES = ("auto", "cpu", "cuda", "reference")


class Backend(NamedTuple):
    """A backend, which executes calls.

    Attributes:
        name: "cpu", "cuda" or "reference" (fp64 loops; not the module nsa.reference).
        takes: dtypes and head dims.
        available: whether it runs on this machine.
        variant: kernel variant for this machine; None if not available.
        reason: reason why it is not available, else None.
        chosen: whether it runs calls on tensors of its device ("reference": of the host).
    """

    name: str
    takes: str
    available: bool
    variant: str | None
    reason: str | None
    chosen: bool


def backends() -> list[Backend]:
    """Every backend and which one runs calls."""
    lines = [line.partition(": ")[::2] for line in describe_backends().splitlines()]
    chosen = {text.partition(",")[0] for name, text in lines if name.startswith("chosen")}
    result = []
    for name, text in lines:
        if name in NAMES:
            takes, _, state = text.rpartition("; ") if "cannot run: " not in text else text.partition("; ")
            available = state.startswith("runs as ")
            what = state.removeprefix("runs as ").removeprefix("cannot run: ")
            variant, reason = (what, None) if available else (None, what)
            result.append(Backend(name, takes, available, variant, reason, name in chosen))
    return result


class use_backend:
    """Selects backend `name` for all calls of the process, or for a with statement.

    Sets the environment variable NSA_BACKEND. "auto": the fast backend of the tensors' device.

    Raises:
        ValueError: an unknown name, or a backend that cannot run here.
    """

    @checked
    def __init__(self, name: str) -> None:
        if name not in NAMES:
            raise ValueError(f"name = {name!r}: must be {', '.join(NAMES[:-1])} or {NAMES[-1]}")
        for backend in backends():
            if backend.name == name and not backend.available:
                raise ValueError(f"name = {name!r}: cannot run here: {backend.reason}")
        self._before = os.environ.get("NSA_BACKEND")
        os.environ["NSA_BACKEND"] = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            os.environ.pop("NSA_BACKEND", None)
        else:
            os.environ["NSA_BACKEND"] = self._before


def describe_backends() -> str:
    """A line per backend: what it takes and its variant on this machine, or why it cannot run; then which is chosen."""
    return ops.describe_backends()


def device_count() -> int:
    """Number of CUDA devices that the operations can use; 0 if the package was built without CUDA."""
    return ops.device_count()
