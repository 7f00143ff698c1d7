#!/usr/bin/env python3
"""Times the collectives of context parallelism under torchrun: what bench/scale/scale_model.py --collectives reads.

    torchrun --standalone --nproc-per-node 8 bench/scale/collectives.py --json collectives.json

NCCL between GPUs, gloo between CPUs. A size is that of all ranks' parts together, of which a rank receives all but its
own (bytes in the result). all_gather and all_to_all move bytes, reduce_scatter adds float32. A warm-up call comes
first; a time is the median of --repeats on the slowest rank. GPU times are between two events.
"""

import argparse
import json
import os
import statistics
import sys
import time
from datetime import date, timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from options import amounts, integer, integers


def arguments():
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", type=amounts, default="1,4,16,64,256,1024,2048", help="sizes, MiB (default %(default)s)"
    )
    parser.add_argument(
        "--ranks",
        type=partial(integers, least=2),
        default=[],
        help="additional group sizes, e.g. 2,4 (default: only all ranks)",
    )
    parser.add_argument("--repeats", type=integer, default=5)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    if min(options.sizes) == 0:
        parser.error("--sizes: must be above 0")
    if max(options.ranks, default=2) > dist.get_world_size():
        parser.error(f"--ranks {options.ranks}: must be in 2 ... {dist.get_world_size()}")
    return options


def calls(ranks, size, device):
    """For each collective the bytes that a rank receives, and the call."""
    part = max(4, int(size * 2**20) // ranks // 4 * 4)
    whole, other = (torch.zeros(part * ranks, dtype=torch.uint8, device=device) for _ in range(2))
    mine = whole[:part].clone()

    def named(group):
        return {
            "all_gather": lambda: dist.all_gather_into_tensor(whole, mine, group=group),
            "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(
                mine.view(torch.float32), whole.view(torch.float32), group=group
            ),
        }

    return part * (ranks - 1), named


def seconds(call, device):
    """Seconds of a call on this rank."""
    if device == "cpu":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def main():
    """Prints a line for each collective and size."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=timedelta(minutes=5))
    options, rank, found = arguments(), dist.get_rank(), []
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    for ranks in sorted({*options.ranks, dist.get_world_size()}):
        group = dist.new_group(list(range(ranks)))
        for size in options.sizes if rank < ranks else ():
            received, named = calls(ranks, size, device)
            for collective, call in named(group).items():
                times = []
                for _ in range(options.repeats + 1):
                    dist.all_reduce(torch.zeros(1, device=device), group=group)  # they begin together
                    times.append(seconds(call, device))
                slowest = torch.tensor(statistics.median(times[1:]), dtype=torch.float64, device=device)
                dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
                row = {"collective": collective, "ranks": ranks, "bytes": received, "seconds": slowest.item()}
                found.append(row)
                if rank == 0:
                    speed = received / row["seconds"] / 1e9
                    print(
                        f"{ranks:4} ranks {collective:<15}{received:>12} bytes {1e3 * row['seconds']:>10.3f} ms", end=""
                    )
                    print(f" {speed:>8.2f} GB/s", flush=True)
        dist.barrier()
    if rank == 0 and options.json:
        about = {"device_name": name, "backend": backend, "date": date.today().isoformat(), "torch": torch.__version__}
        about |= {"commit": os.environ.get("COMMIT"), "repeats": options.repeats}
        options.json.write_text(json.dumps({**about, "collectives": found}, indent=1) + "\n")
    dist.barrier()
    os._exit(0)  # what ends a group of gloo joins threads that may wait for the interpreter


if __name__ == "__main__":
    main()
