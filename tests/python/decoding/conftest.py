import pytest
import torch

import nsa
from devices import head_dims
from problem import SMALL


@pytest.fixture
def layer():
    torch.manual_seed(1)
    layer = nsa.NativeSparseAttention(32, 4, 2, *head_dims(16, 24), SMALL).eval().requires_grad_(False)
    torch.nn.init.normal_(layer.gate[2].weight)
    return layer
