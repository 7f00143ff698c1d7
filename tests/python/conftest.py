import sys
from pathlib import Path

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
