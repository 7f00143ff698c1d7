import os
import sys
from pathlib import Path

# Read when the OpenMP runtime is loaded. The calls here are tiny: threads that spin between them only steal time from
# each other, many times over where other work runs beside the tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # masked.py and problem.py


@pytest.fixture(params=["reference", "cpu"])
def backend(request, monkeypatch):
    """Every test that asks for it runs on both backends; the library reads the variable at each call."""
    monkeypatch.setenv("NSA_BACKEND", request.param)
    return request.param


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
