"""Kills at random moments, full disks, two trainers of one run, little memory: no loss, one line, the same bits."""

import random
import re
import resource
import shutil
import signal
import subprocess
import time

import pytest
from faults import ADVERSARIAL, for_each, one_line, run, start
from test_resume import same_bits

from conftest import TINY, metrics, nsa

OPTIONS = [*TINY, "--threads", 1, "--steps", 120, "--save-every", 5, "--log-every", 3]


@pytest.fixture(scope="module")
def reference(tmp_path_factory, corpus):
    """A run and the seconds it took."""
    out = tmp_path_factory.mktemp("adversarial") / "reference"
    begin = time.monotonic()
    nsa("train", "--out", out, "--data", corpus, *OPTIONS)
    return out, time.monotonic() - begin


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, corpus):
    """The same run, stopped at a checkpoint on its way."""
    out = tmp_path_factory.mktemp("adversarial") / "stopped"
    process = start(["train", "--out", out, "--data", corpus, *OPTIONS], stdout=None, stderr=None)
    while not (out / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert 0 < metrics(out, "end")[-1]["step"] < 120
    return out


@pytest.mark.bits
def test_thirty_kills(tmp_path, corpus, reference):
    out_of_reference, seconds = reference
    kinds = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP]

    def check(seed):
        draw = random.Random(seed)
        for part in range(3):  # each: five signals on the way of one run
            out = tmp_path / f"{seed}-{part}"
            for _ in range(5):
                resume = (out / "config.json").exists()
                arguments = ["--resume"] if resume else ["--data", corpus, *OPTIONS]
                with start(["train", "--out", out, *arguments], stdout=subprocess.DEVNULL) as process:
                    time.sleep(draw.uniform(0, seconds))
                    how = draw.choice(kinds)
                    process.send_signal(how)
                    _, errors = process.communicate(timeout=60)
                assert process.returncode in (0, -how, 128 + how), errors
            arguments = ["--resume"] if (out / "config.json").exists() else ["--data", corpus, *OPTIONS]
            nsa("train", "--out", out, *arguments)
            same_bits(out_of_reference, out)

    for_each(check, range(20) if ADVERSARIAL else range(2))


@pytest.mark.bits
@pytest.mark.parametrize("how", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_limit_on_the_size_of_files(tmp_path, corpus, reference, stopped, how):
    """Written files end at 1, 64 and 200 KB: the process is killed by SIGXFSZ, or told, if that signal is ignored."""

    def check(limit):
        def preexec_fn():
            signal.signal(signal.SIGXFSZ, how)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        out = tmp_path / str(limit)
        shutil.copytree(stopped, out)
        code, errors = run(["train", "--out", out, "--resume"], preexec_fn=preexec_fn)
        if how == signal.SIG_DFL:
            assert code == -signal.SIGXFSZ
        else:
            assert code == 1 and "File too large" in one_line(errors)
        nsa("train", "--out", out, "--resume")
        same_bits(reference[0], out)

    for_each(check, [1000, 64_000, 200_000])


@pytest.mark.bits
def test_a_disk_that_fills_up(tmp_path, corpus, reference, stopped):
    disk = tmp_path / "disk"
    disk.mkdir()
    size = sum(path.stat().st_size for path in stopped.iterdir())
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size + 200_000}", "tmpfs", disk]
    made = subprocess.run(mount, capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    try:
        out = disk / "run"
        shutil.copytree(stopped, out)
        code, errors = run(["train", "--out", out, "--resume"])
        assert code == 1 and "No space left on device" in one_line(errors) and str(out) in errors
        shutil.copytree(out, tmp_path / "elsewhere")
        nsa("train", "--out", tmp_path / "elsewhere", "--resume")
        same_bits(reference[0], tmp_path / "elsewhere")
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.bits
def test_a_second_trainer_leaves_no_mark_on_the_first(tmp_path, corpus, reference):
    out = tmp_path / "run"
    arguments = ["train", "--out", out, "--data", corpus, *OPTIONS]
    with start(arguments) as first:
        while not (out / "metrics.jsonl").exists():
            assert first.poll() is None
            time.sleep(0.01)
        first.send_signal(signal.SIGSTOP)  # it is there still when the others come
        for second in (["train", "--out", out, "--resume"], arguments, [*arguments, "--overwrite"]):
            code, errors = run(second)
            assert code == 2 and str(first.pid) in one_line(errors)
        first.send_signal(signal.SIGCONT)
        first.communicate(timeout=120)
    assert first.returncode == 0
    same_bits(reference[0], out)


def peak(arguments):
    """The most address space that the program used, bytes; of a stopped process's last moments."""
    with start(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        most = 0
        while process.poll() is None:
            try:
                found = re.search(r"VmPeak:\s+(\d+)", open(f"/proc/{process.pid}/status").read())
            except OSError:
                break
            most = max(most, int(found[1]) if found else 0)
            time.sleep(0.002)
    return most * 1024


@pytest.mark.bits
def test_memory_that_runs_out(tmp_path, reference, stopped):
    """From what the program needs to be loaded to what it needs to end: done, or one line and exit code 1."""
    commands = {"train": ["train", "--resume", "--out"], "generate": ["generate", "--tokens", 200, "--ignore-end"],
                "eval": ["eval"]}  # fmt: skip
    least = peak(["--version"])
    limits = {}
    for name, command in commands.items():
        shutil.copytree(stopped, tmp_path / name)
        most = peak([*command, tmp_path / name])
        count = 26 if ADVERSARIAL else 5
        limits[name] = [least + (most - least) * i // count for i in range(count)]
    # Less than LibTorch's constructors take, which run before main().
    limits["train"] += [least - i * 2**20 for i in (range(1, 40) if ADVERSARIAL else (1, 8))]

    def check(case):
        name, limit = case
        out = tmp_path / f"{name}-{limit}"
        shutil.copytree(stopped, out)
        code, errors = run([*commands[name], out], limit=limit)
        assert code in (0, 1, 127), (code, errors)
        if code == 127:  # the dynamic linker's
            assert "error while loading shared libraries" in errors
        elif code == 1:
            assert "terminate" not in errors and "internal error" not in errors, errors
            last = [line for line in re.split(r"[\r\n]", errors) if line][-1]
            assert last.startswith(("nsa: ", "libgomp: ")), errors
        nsa("train", "--out", out, "--resume")
        if name == "train":  # without a buffer MKL multiplies in another way, with other last bits
            losses = [metrics(run, "eval")[-1]["loss"] for run in (reference[0], out)]
            assert losses[1] == pytest.approx(losses[0], rel=0.01)
        else:
            same_bits(reference[0], out)
        shutil.rmtree(out)

    for_each(check, [(name, limit) for name in commands for limit in limits[name]])
