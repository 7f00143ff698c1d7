"""Where a test runs: the backend of the calls, the device of the tensors, and the problems that both can do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import nsa

BACKENDS = ("reference", "cpu", "cuda")
CUDA_HEAD_DIMS = ((64, 64), (128, 128), (192, 128))
NO_CUDA = "no CUDA device" if not torch.cuda.is_available() else "no CUDA device: this build of nsa has no CUDA"


@contextmanager
def running(backend: str) -> Iterator[None]:
    """Calls go to `backend`, and torch makes tensors on its device."""
    if backend == "cuda" and not nsa.device_count():
        pytest.skip(NO_CUDA)
    previous = torch.get_default_device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSA_BACKEND", backend)  # the library reads it at each call
        try:
            _make_tensors_on("cuda" if backend == "cuda" else "cpu")
            yield
        finally:
            _make_tensors_on(previous.type)


def _make_tensors_on(device: str) -> None:
    torch.set_default_device(None if device == "cpu" else device)  # None: without the mode that costs time


def on_gpu() -> bool:
    """Whether torch makes tensors on a GPU now."""
    return torch.get_default_device().type == "cuda"


def here(t: torch.Tensor) -> torch.Tensor:
    """A tensor that was made before the test ran, on its device."""
    return t.to(torch.get_default_device())


def head_dims(dk: int, dv: int) -> tuple[int, int]:
    """These head dims, or on a GPU the next larger ones that it has kernels for."""
    if not on_gpu():
        return dk, dv
    return next((k, v) for k, v in CUDA_HEAD_DIMS if dk <= k and dv <= v)
