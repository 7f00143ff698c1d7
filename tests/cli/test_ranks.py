"""python -m nsa.train: several ranks train what one process trains. bench/scale/train_ranks.py measures them."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from conftest import PROGRAM, ROOT, TINY, TINY_NSA, TINY_RUN, metrics, nsa, refused, same_weights

RUN = [*TINY, "--layers", "2", "--threads", "1", "--selector-loss", "0.1"]
BENCH = ROOT / "bench/scale/train_ranks.py"
WAIT = 300  # s, for what takes a few where no other work runs
STARTED = []  # processes of the current test


@pytest.fixture(autouse=True)
def no_process_is_left():
    """Also where the test failed before it waited for them."""
    yield
    for process in STARTED:
        process.kill()
        process.wait()
    STARTED.clear()


def ranks(number, *arguments, own=None, **environment):
    """Starts the ranks as torchrun does; `own`: further options of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": number, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"NSA_PROGRAM": PROGRAM, "OMP_NUM_THREADS": 1, "NSA_DEVICE": "cpu"}
    started = []
    for rank in range(number):
        given = os.environ | common | {"RANK": rank, "LOCAL_RANK": rank} | environment
        command = [sys.executable, "-m", "nsa.train", *map(str, arguments), *(own[rank] if own else [])]
        pipe = subprocess.PIPE
        given = {name: str(value) for name, value in given.items()}
        started.append(subprocess.Popen(command, env=given, stdout=pipe, stderr=pipe, text=True, errors="replace"))
    STARTED.extend(started)
    return started


def end(started, code=0, timeout=WAIT):
    """What each rank printed; all leave with the code, or what is allowed of them."""
    printed, deadline = [], time.monotonic() + timeout
    try:
        for process in started:
            printed.append("".join(process.communicate(timeout=max(0, deadline - time.monotonic()))))
    finally:
        for process in started:
            process.kill()
    codes = [code] * len(started) if isinstance(code, int) else code
    assert [process.returncode for process in started] == codes, "\n".join(printed)
    return printed


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """Runs of one process with that many batches to a step."""
    out = tmp_path_factory.mktemp("alone")
    for number in (2, 4):
        nsa("train", "--out", out / str(number), "--data", corpus, "--steps", 24, "--grad-accum", number, *RUN)
    return out


@pytest.mark.bits
@pytest.mark.parametrize("number", (2, 4))
@pytest.mark.parametrize("option", ((), ("--shard-optimizer",)), ids=("whole", "sharded"))
def test_a_batch_for_each_rank(number, option, corpus, alone, tmp_path):
    """The sums are those of one process in their order, too."""
    printed = end(ranks(number, "--out", tmp_path / "run", "--data", corpus, "--steps", 24, *RUN, *option))
    assert f"and {number} ranks" in printed[0] and "done: 24 steps" in printed[0] and not any(printed[1:])
    same_weights(tmp_path / "run", alone / str(number))
    for kind in ("train", "eval"):
        found, expected = metrics(tmp_path / "run", kind), metrics(alone / str(number), kind)
        assert [line["tokens"] for line in found] == [line["tokens"] for line in expected]
        assert [line["loss"] for line in found] == [line["loss"] for line in expected]


@pytest.mark.skipif(os.environ.get("NSA_PARALLEL_DEVICE") != "cuda", reason="NSA_PARALLEL_DEVICE=cuda: on two GPUs")
@pytest.mark.parametrize("option", ((), ("--shard-optimizer",)), ids=("whole", "sharded"))
def test_a_batch_for_each_gpu(option, corpus, tmp_path):
    """The bits of one process over NCCL, too, in bfloat16, where the norm of the gradients is above --clip."""
    model = "--layers 2 --hidden-size 64 --heads 4 --kv-heads 1 --head-dim 64".split()
    given = ["--data", corpus, "--steps", 24, "--grad-accum", 2, "--clip", 0.01, *model, *TINY_NSA, *TINY_RUN]
    out, expected = tmp_path / "run", tmp_path / "one"
    nsa("train", "--out", expected, *given, device="cuda")
    end(ranks(2, "--out", out, *given, *option, NSA_DEVICE="cuda"), timeout=4 * WAIT)
    same_weights(out, expected)
    assert [line["loss"] for line in metrics(out, "train")] == [line["loss"] for line in metrics(expected, "train")]


def test_two_batches_for_each_rank(corpus, alone, tmp_path):
    out = tmp_path / "run"
    end(ranks(2, "--out", out, "--data", corpus, "--steps", 24, "--grad-accum", 4, "--gate-balance", 0.01, *RUN))
    nsa(
        "train",
        "--out",
        tmp_path / "one",
        "--data",
        corpus,
        "--steps",
        24,
        "--grad-accum",
        4,
        "--gate-balance",
        0.01,
        *RUN,
    )
    for found, expected in zip(metrics(out, "train"), metrics(tmp_path / "one", "train"), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.bits
@pytest.mark.parametrize("kind", ("dense", "sparse"))
def test_from_a_folder_of_transformers(kind, corpus, tmp_path):
    """The bits of one process that starts there."""
    transformers = pytest.importorskip("transformers", minversion="5.23")
    torch = pytest.importorskip("torch")
    from nsa.hf import NsaQwen3Config, NsaQwen3ForCausalLM

    sizes = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    sparse = {"kernel_size": 8, "kernel_stride": 4, "block_size": 16, "topk": 4, "window_size": 32}
    torch.manual_seed(1)
    if kind == "dense":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    else:
        model = NsaQwen3ForCausalLM(NsaQwen3Config(**sizes, nsa=sparse))
    folder, run, expected = tmp_path / "model", tmp_path / "run", tmp_path / "one"
    model.save_pretrained(folder)
    given = ["--init", folder, "--data", corpus, "--steps", 12, "--grad-accum", 2, "--dtype", "float32", "--threads", 1]
    given += ["--context", 128, "--batch-size", 1, "--held-out-percent", 20, "--log-every", 4, "--eval-every", 0]
    nsa("train", "--out", expected, *given)
    end(ranks(2, "--out", run, *given))
    same_weights(run, expected)
    assert [line["loss"] for line in metrics(run, "train")] == [line["loss"] for line in metrics(expected, "train")]


@pytest.fixture(scope="module")
def long(corpus, tmp_path_factory):
    """Arguments of a run that takes seconds, and its end without an interruption."""
    arguments = ["--data", corpus, "--steps", 200, "--save-every", 20, *RUN, "--eval-every", 0]
    out = tmp_path_factory.mktemp("long") / "run"
    nsa("train", "--out", out, "--grad-accum", 2, *arguments)
    return arguments, out


def wait_for_step(step, run, process):
    deadline = time.monotonic() + WAIT
    while not (run / "metrics.jsonl").exists() or f'"step":{step},' not in (run / "metrics.jsonl").read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.bits
def test_stopped_and_resumed(long, tmp_path):
    """Bitwise with as many ranks, sharded or not; another number of ranks resumes, too."""
    arguments, expected = long
    out = tmp_path / "run"
    started = ranks(2, "--out", out, *arguments)
    wait_for_step(40, out, started[0])
    started[1].send_signal(signal.SIGTERM)  # to one of them
    printed = end(started, code=128 + signal.SIGTERM)
    assert "stopped at step" in printed[0] and not printed[1]
    stopped = metrics(out, "end")[-1]["step"]
    assert 40 <= stopped < 200
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    end(ranks(2, "--out", out, "--resume", "--shard-optimizer"))
    same_weights(out, expected)
    nsa("train", "--out", copy, "--resume")
    same_weights(copy, expected)


@pytest.mark.slow
@pytest.mark.bits
@pytest.mark.parametrize("victim", (0, 1))
def test_killed(victim, long, tmp_path):
    """A rank that dies ends the run with a message; resuming from the last checkpoint gives the same bits."""
    arguments, expected = long
    out, draw = tmp_path / "run", random.Random(victim)
    started = ranks(2, "--out", out, *arguments)
    wait_for_step(draw.randrange(10, 30) * 4, out, started[victim])
    time.sleep(draw.random() * 0.02)
    started[victim].kill()
    codes = [-signal.SIGKILL if rank == victim else 1 for rank in (0, 1)]
    told = end(started, code=codes, timeout=60)[1 - victim]
    assert f"nsa: rank {1 - victim}: step " in told and "another rank is gone" in told, told
    assert f"is in {out}; resume with --resume" in told, told
    end(ranks(2, "--out", out, "--resume"))
    same_weights(out, expected)


def test_torchrun(corpus, tmp_path):
    """Ctrl-C of all ranks."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "nsa.train"]
    command += ["--out", out, "--data", corpus, "--minutes", 1, *RUN]
    given = {"NSA_PROGRAM": PROGRAM, "GLOO_SOCKET_IFNAME": "lo"}
    given = {name: str(value) for name, value in given.items()}
    process = subprocess.Popen(
        [*map(str, command)], env=os.environ | given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    STARTED.append(process)
    wait_for_step(8, out, process)
    process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=WAIT)[0]
    assert "stopped at step" in printed, printed
    nsa("eval", out)


def test_minutes_are_the_first_ranks(corpus, tmp_path):
    out = tmp_path / "run"
    printed = end(ranks(2, "--out", out, "--data", corpus, "--minutes", 0.02, *RUN))
    assert "done: " in printed[0]
    assert metrics(out, "end")[-1]["reason"] == "finished"


def test_refusals(corpus, tmp_path):
    """By every rank, without a wait for the others."""
    common = ["--out", tmp_path / "run", "--data", corpus, "--steps", 4, *RUN]
    for arguments, message in (
        (("--grad-accum", 3), "grad_accum = 3: must be a multiple of the 2 ranks"),
        (("--lr", "x"), "--lr: x: must be a finite number"),
    ):
        for rank, told in enumerate(end(ranks(2, *common, *arguments), code=2)):
            assert told.startswith(f"nsa: rank {rank}: {message}"), told
    printed = end(ranks(2, *common, own=(["--lr", "1e-3"], ["--lr", "2e-3"])), code=[1, 2])
    assert "nsa: rank 0: another rank is gone" in printed[0]
    assert "nsa: rank 1: not as on the first rank: train.lr = 0.002, was 0.001" in printed[1]
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "file").touch()
    printed = end(ranks(2, *common[2:], "--out", tmp_path / "foreign"), code=[2, 1])
    assert "holds no run of this program" in printed[0] and "another rank is gone" in printed[1]
    assert [file.name for file in (tmp_path / "foreign").iterdir()] == ["file"]


def test_how_it_is_started(tmp_path, monkeypatch):
    given = os.environ | {"NSA_PROGRAM": str(tmp_path / "bin" / "nsa")}

    def message(**environment):
        command = [sys.executable, "-m", "nsa.train", "--out", tmp_path / "run"]
        done = subprocess.run(command, env=given | environment, capture_output=True, text=True, timeout=WAIT)
        assert done.returncode == 1
        return done.stderr

    assert message().startswith("nsa.train: start it as torchrun ")
    assert message(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0").startswith(
        f"nsa.train: no {tmp_path}/lib/libnsa_program.so"
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "run several ranks with torchrun ... -m nsa.train" in refused("train", "--out", tmp_path / "run")


def bench(*arguments):
    given = {"NSA_PROGRAM": PROGRAM, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": 1, "NSA_DEVICE": "cpu"}
    given = os.environ | {name: str(value) for name, value in given.items()}
    command = [sys.executable, str(BENCH), *map(str, arguments)]
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=2 * WAIT)


def test_speed_of_the_bench(corpus, tmp_path):
    """Two ranks have the weights of one."""
    found = []
    for ranks in (1, 2):
        file = tmp_path / f"{ranks}.json"
        train = ["--data", corpus, "--steps", 24, "--grad-accum", 2, *RUN]
        done = bench("speed", "--ranks", ranks, "--out", tmp_path / str(ranks), "--json", file, "--", *train)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(json.loads(file.read_text()))
    assert [run["ranks"] for run in found] == [1, 2]
    for run in found:
        assert (
            run["steps"] == 24 and run["grad_accum"] == 2 and len(run["losses"]) == 6 and run["tokens_per_second"] > 0
        )
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]


def test_kill_by_the_bench(corpus, tmp_path):
    file = tmp_path / "killed.json"
    train = ["--data", corpus, "--steps", 200, "--save-every", 20, *RUN, "--eval-every", 0]
    done = bench("kill", "--ranks", 2, "--at", 40, "--out", tmp_path / "runs", "--json", file, "--", *train)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["same_weights"] and [run["victim"] for run in found["runs"]] == [0, 1]
    for run in found["runs"]:
        assert run["code"] != 0 and 0 < run["seconds_until_said"] < 15 and "resume with --resume" in run["said"]
        assert run["end"]["step"] == 200 and run["left_running"] == []


@pytest.mark.parametrize("arguments, message", (
    (("kill", "--ranks", 1, "--out", "new"), "--ranks 1: must be at least 2"),
    (("speed", "--ranks", 1, "--out", "full"), "must be empty"),
))  # fmt: skip
def test_the_bench_refuses(arguments, message, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    *others, folder = arguments
    done = bench(*others, tmp_path / folder)
    assert done.returncode != 0 and message in done.stderr
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["file"]
