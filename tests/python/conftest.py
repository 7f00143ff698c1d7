import os
import sys
from pathlib import Path

# Read when the OpenMP runtime is loaded. The calls here are tiny: threads that spin between them only steal time from
# each other, many times over where other work runs at the same time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

import nsa

sys.path.insert(0, str(Path(__file__).parent))  # devices.py and problem.py

from devices import BACKENDS, head_dims, running
from problem import SMALL


def pytest_collection_modifyitems(items):
    """Files with slow tests come first, so that processes that share the files end together."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Runs every test that uses it on all backends, with its tensors on the backend's device."""
    with running(request.param):
        yield request.param


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    """The same without the reference backend."""
    with running(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def layer():
    torch.manual_seed(1)
    layer = nsa.NativeSparseAttention(32, 4, 2, *head_dims(16, 24), SMALL).eval().requires_grad_(False)
    torch.nn.init.normal_(layer.gate[2].weight)
    return layer
