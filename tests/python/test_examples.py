"""Every file of examples/ runs, by itself and in a time that a reader waits for, and is shown in docs/examples.md."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(name, *arguments, by=("-W", "error::DeprecationWarning:__main__")):
    """What the example printed; each asserts what it shows."""
    command = [sys.executable, *by, str(ROOT / "examples" / name), *arguments]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_gpt(tmp_path):
    printed = run("gpt.py", str(tmp_path / "map.png"))
    before, after = map(float, re.search(r"held out: ([\d.]+) -> ([\d.]+) nats", printed).groups())
    assert 5 < before < 7 and after < 3  # ln 256 is 5.5
    share = int(re.search(r"not forced a query selects (\d+)%", printed)[1])
    assert 10 < share < 60
    pytest.importorskip("matplotlib")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_caches():
    differences = [float(d) for d in re.findall(r"largest difference (\S+)", run("caches.py"))]
    assert len(differences) == 8 and max(differences) < 1e-5


def test_own_indices():
    printed = run("own_indices.py")
    answers = {
        name: int(share) for name, share in re.findall(r"^(\w+) .*right answers: +(\d+)%$", printed, re.MULTILINE)
    }
    assert answers.keys() == {"scores", "oracle", "random"}
    assert answers["oracle"] == 100 > answers["scores"] > 40 > 25 > answers["random"]


def test_finetune():
    pytest.importorskip("transformers", minversion="5.24")
    pytest.importorskip("peft")
    printed = run("finetune.py")
    steps = re.findall(r"step (\d+): ([\d.]+) nats per byte, phi moved by ([\d.]+)", printed)
    losses, moved = ([float(step[i]) for step in steps] for i in (1, 2))
    assert len(losses) == 3 and losses[-1] < min(4.2, losses[0] - 0.3)  # ln 256 is 5.5
    assert 0 < moved[0] < moved[-1] < 0.5 * 30 * 1e-2  # half the rate of the adapters
    right, asked = map(int, re.search(r"right continuations: (\d+) of (\d+)", printed).groups())
    assert asked == 20 and right > 0.8 * asked


def test_images():
    pytest.importorskip("transformers", minversion="5.24")
    printed = run("images.py")
    losses = [float(loss) for loss in re.findall(r"step +\d+: ([\d.]+) nats", printed)]
    assert len(losses) == 3 and losses[-1] < 0.3  # ln 8 is 2.1
    assert int(re.search(r"right colours: (\d+)%", printed)[1]) > 90


@pytest.mark.slow
def test_grpo():
    pytest.importorskip("transformers", minversion="5.24")
    rows = dict(re.findall(r"^(\w+) +([\d.]+ .*)$", run("grpo.py"), re.MULTILINE))
    (_, kl, _), (reward, replayed_kl, _) = (rows[name].split() for name in ("selected", "replayed"))
    assert float(reward) > 0.8 and float(replayed_kl) < 0.7 * float(kl)


def test_fsdp():
    printed = run("fsdp.py", by=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"))
    assert "q_proj: (64, 32), on this rank (32, 32)" in printed
    first, last, alone = map(float, re.search(r"2 ranks: (\S+) -> (\S+); in one process: (\S+)", printed).groups())
    assert last < 0.9 * first and abs(last - alone) < 2e-4


def test_each_has_a_test():
    tests = "".join(test.read_text(encoding="utf-8") for test in (ROOT / "tests").rglob("test_*.py"))
    calls = ('run("{0.name}"', 'EXAMPLES / "{0.name}"', "from {0.stem} import")
    assert [e.name for e in EXAMPLES if not any(call.format(e) in tests for call in calls)] == []


def test_each_is_on_the_page():
    page = (ROOT / "docs/examples.md").read_text(encoding="utf-8")
    assert EXAMPLES
    assert [example.name for example in EXAMPLES if f"](../examples/{example.name})" not in page] == []


def test_lines_on_the_page_are_in_the_examples():
    page = (ROOT / "docs/examples.md").read_text(encoding="utf-8")
    for name, code in re.findall(r"\]\(\.\./examples/(\w+\.py)\).*?```python\n(.*?)```", page, re.DOTALL):
        source = (ROOT / "examples" / name).read_text(encoding="utf-8")
        lines = {line.strip() for line in source.splitlines()}
        assert [line for line in code.splitlines() if line.strip() not in lines] == [], name
