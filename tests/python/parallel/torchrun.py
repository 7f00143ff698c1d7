"""Programs on several ranks, as tests start them: gloo on CPUs, or NCCL on GPUs with NSA_PARALLEL_DEVICE=cuda."""

import os
import subprocess
import sys

import torch

DEVICE = os.environ.get("NSA_PARALLEL_DEVICE", "cpu")
BACKENDS = "gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl"
RANKS = 4 if DEVICE == "cpu" else torch.cuda.device_count()  # at most
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
if DEVICE == "cpu":
    ENVIRONMENT["CUDA_VISIBLE_DEVICES"] = ""


def torchrun(ranks, file, *arguments, timeout=120):
    """What the ranks printed; they have ended by then, whatever happened."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(file), *map(str, arguments)]
    pipe = subprocess.PIPE
    running = subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=pipe, stderr=pipe, text=True)
    try:
        printed, errors = running.communicate(timeout=timeout)
    finally:
        if running.poll() is None:
            running.terminate()  # which torchrun passes on to the ranks, whose sessions are their own
            running.communicate(timeout=60)
    assert running.returncode == 0, (printed + errors)[-4000:]
    return printed
