"""Hyperparameters: what is refused, and that the message is the C++ library's."""

import dataclasses

import pytest
import torch

import nsa
from nsa._registration import call

REFUSED = [
    ({"kernel_size": 0}, "kernel_size = 0: must be >= 1"),
    ({"kernel_stride": 0}, "kernel_stride = 0: must be >= 1"),
    ({"block_size": 0}, "block_size = 0: must be a positive multiple of 16"),
    ({"block_size": 40}, "block_size = 40: must be a positive multiple of 16"),
    ({"kernel_size": 24}, "kernel_stride = 16: must be a divisor of kernel_size = 24"),
    ({"kernel_size": 96, "kernel_stride": 48}, "kernel_stride = 48: must be a divisor of block_size = 64"),
    ({"init_blocks": -1}, "init_blocks = -1: must be >= 0"),
    ({"local_blocks": 0}, "local_blocks = 0: must be >= 1"),
    ({"window_size": 0}, "window_size = 0: must be >= 1"),
    ({"topk": 0}, "topk = 0: must be >= 1"),
    ({"topk": 2}, "topk = 2: must be >= init_blocks + local_blocks = 1 + 2"),
]


@pytest.mark.parametrize("change, message", REFUSED)
def test_refused(change, message):
    with pytest.raises(ValueError) as error:
        nsa.NSAConfig(**change)
    assert str(error.value) == message


@pytest.mark.parametrize("change, message", REFUSED)
def test_message_is_the_librarys(change, message):
    """The operators validate too, so that a list of numbers from elsewhere is no way around the rules."""
    values = dataclasses.asdict(nsa.NSAConfig()) | change
    weights = nsa.CompressionWeights("mean").as_arguments()
    with pytest.raises(ValueError) as error:
        call(torch.ops.nsa.compress, torch.zeros(1, 8, 1, 8), *weights, list(values.values()), None)
    assert str(error.value) == message


@pytest.mark.parametrize("value", [1.5, "32", None, True, 2**31])
def test_integers_only(value):
    with pytest.raises(ValueError, match=r"window_size = .*: must be an integer"):
        nsa.NSAConfig(window_size=value)


def test_frozen_and_equal():
    assert nsa.NSAConfig() == nsa.NSAConfig(32, 16, 64, 16, 1, 2, 512)
    with pytest.raises(dataclasses.FrozenInstanceError):
        nsa.NSAConfig().topk = 3


def test_num_compressed():
    cfg = nsa.NSAConfig()
    assert [cfg.num_compressed(n) for n in (0, 31, 32, 47, 48, 64)] == [0, 0, 1, 1, 2, 3]
