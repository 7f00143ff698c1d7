"""examples/train_long.py: however many processes share the work, the losses are those of one.

On CPUs over gloo; with NSA_PARALLEL_DEVICE=cuda on GPUs over NCCL, as many as there are.
"""

import os
import re
import shutil
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchrun import BACKENDS, DEVICE, RANKS, torchrun

EXAMPLES = Path(__file__).parents[3] / "examples"
COMMON = f"--steps 4 --save-every 2 --tokens 1536 --head-dim {16 if DEVICE == 'cpu' else 64}".split()
# For a number of processes: name, options, and the run from whose second step it resumes.
RUNS = {
    4: {"cp x tp": ("--cp 2 --tp 2", None), "dp x cp": ("--dp 2 --cp 2", None)},
    2: {
        "dp": ("--dp 2", None),
        "cp": ("--cp 2 --recompute", None),
        "tp": ("--tp 2", None),
        "bfloat16": ("--cp 2 --bfloat16", None),
        "dp, on from cp x tp": ("--dp 2 --resume", "cp x tp"),
        "tp, on from dp x cp": ("--tp 2 --resume", "dp x cp"),
    },
}
if RANKS < 4:
    del RUNS[4]
    RUNS[2] = {name: run for name, run in RUNS[2].items() if run[1] is None}
    RUNS[2] |= {f"{way}, on from alone": (f"--{way} 2 --resume", "alone") for way in ("dp", "tp")}
pytestmark = [pytest.mark.slow, pytest.mark.skipif(RANKS < 2, reason=f"{RANKS} GPUs")]


def work(folder):
    """The losses of every run that has this number of processes."""
    import train_long

    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(BACKENDS, timeout=timedelta(seconds=30))
    losses = {}
    for name, (options, _) in RUNS[dist.get_world_size()].items():
        given = [*options.split(), "--out", f"{folder}/{name}", *COMMON]
        losses[name] = train_long.train(train_long.arguments(given))
    if dist.get_rank() == 0:
        torch.save(losses, f"{folder}/{dist.get_world_size()}.pt")
    dist.barrier()
    os._exit(0)  # as the example does


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    printed = torchrun(1, EXAMPLES / "train_long.py", "--out", folder / "alone", *COMMON)
    found = {"alone": [float(loss) for loss in re.findall(r"step \d: (\S+) nats per byte, [1-9]\d* tokens/s", printed)]}
    for ranks, runs in RUNS.items():
        for name, (_, start) in runs.items():
            if start is not None:
                shutil.copytree(folder / start / "step-2", folder / name / "step-2")
                (folder / name / "step-3.tmp").mkdir()  # of a process that was killed
        torchrun(ranks, __file__, folder)
        found |= torch.load(folder / f"{ranks}.pt")
    for name in found:
        assert {path.name for path in (folder / name).iterdir()} - {"step-3.tmp"} == {"step-2", "step-4"}
    return found


def test_one_process(losses):
    assert len(losses["alone"]) == 4
    assert 5 < losses["alone"][0] < 6 and losses["alone"][-1] < 0.85 * losses["alone"][0]  # ln 256 is 5.5


@pytest.mark.parametrize("name", [name for runs in RUNS.values() for name in runs])
def test_as_one_process(losses, name):
    expected = losses["alone"][2 if ", on from " in name else 0 :]
    assert losses[name] == pytest.approx(expected, abs=0.02 if name == "bfloat16" else 1e-4)


def test_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_long

    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    (tmp_path / "old/step-3").mkdir(parents=True)
    (tmp_path / "new/step-3.tmp").mkdir(parents=True)
    (tmp_path / "short").write_bytes(bytes(64))
    numbers = "dp cp tp tokens batch steps save-every layers width heads kv-heads head-dim".split()
    for options, message in (
        ("--out new --cp 2", "--dp 1 x --cp 2 x --tp 1: must be the 4 processes"),
        ("--out new --dp 4", "--batch 2: must be a multiple of --dp 4"),
        ("--out new --cp 4 --resume", "/new: must have checkpoints with --resume, and none without"),
        *(
            (f"--out new --{name} {n}", f"--{name}: {n}: must be")
            for name in numbers
            for n in ("0", "-3", "1.5", "nan")
        ),
        ("--out new --cp 4 --heads 3", "--heads 3: must be a multiple of --kv-heads 2"),
        ("--out new --cp 4 --data new", "--data new: must be a file"),
        (f"--out new --cp 4 --data {tmp_path}/short --tokens 64", "--tokens 64: must be fewer than the 64 bytes"),
        ("--out old --cp 4", "/old: must have checkpoints with --resume, and none without"),
    ):
        with pytest.raises(SystemExit):
            train_long.arguments(options.replace("--out ", f"--out {tmp_path}/").split())
        assert message in capsys.readouterr().err
    assert train_long.arguments(["--out", f"{tmp_path}/old", "--cp", "4", "--resume"]).cp == 4


if __name__ == "__main__":
    sys.path[:0] = [str(EXAMPLES)]
    work(sys.argv[1])
