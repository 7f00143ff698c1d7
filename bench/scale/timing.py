"""Timing helpers of bench/scale/context_parallel.py and bench/scale/context_ranks.py."""

import statistics
import time

import torch

import nsa

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def device_name(device):
    """Name of the GPU, or CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def wait(device):
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mark(device):
    """A time stamp in the device's work."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(begin, end):
    """Milliseconds between two marks; the device must have reached the second one."""
    return 1000 * (end - begin) if isinstance(begin, float) else begin.elapsed_time(end)


def median_of(call, repeats):
    """Medians of the numbers that the call returns, after one warm-up call."""
    call()
    return [statistics.median(numbers) for numbers in zip(*(call() for _ in range(repeats)), strict=True)]


def time_chunk(chunk, whole, queries, device):
    """Milliseconds of a chunk's `nsa_attention`, forward and backward.

    `whole`: k, v, k_c and v_c of the global sequence; `queries`: the chunk's q, gates and dO.
    """
    end = chunk.rows[1]
    q, gates, d_o = queries
    k, v = (t[:, :end].detach().requires_grad_() for t in whole[:2])
    k_c, v_c = (t[:, : chunk.seen_blocks].detach().requires_grad_() for t in whole[2:])
    inputs = [q.detach().requires_grad_(), k, v, gates.detach().requires_grad_(), k_c, v_c]
    marks = [mark(device)]
    o = nsa.nsa_attention(*inputs[:4], k_c=k_c, v_c=v_c)
    marks.append(mark(device))
    torch.autograd.grad(o, inputs, d_o)
    marks.append(mark(device))
    wait(device)
    return milliseconds(marks[0], marks[1]), milliseconds(marks[1], marks[2])
