"""Programs under torchrun, as tests start them."""

import os
import subprocess
import sys

ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


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
