import os

# As in tests/python; and nothing here may wait for a server.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
