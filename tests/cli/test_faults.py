"""Each call of a run that touches files fails once or is the last: no loss, and --resume ends with the same bits."""

import json
import shutil
import struct

import pytest
from faults import (
    ADVERSARIAL,
    EACCES,
    EINTR,
    EIO,
    EMFILE,
    ENOSPC,
    FULL,
    for_each,
    killed,
    needs_library,
    one_line,
    run,
    run_with_fault,
)
from test_resume import same_bits

from conftest import TINY, nsa

pytestmark = needs_library

# Three checkpoints, metrics between them. One thread: the calls come in the same order each time.
OPTIONS = [*TINY, "--context", 128, "--threads", 1, "--steps", 4]
OPTIONS += ["--save-every", 2, "--log-every", 1, "--eval-every", 2]

KILLS = ["kill-before", "kill-behind"]
ACTIONS = {
    "open": [EIO, EMFILE, "kill-before"],
    "create": [EACCES, EIO, ENOSPC, EMFILE, FULL, *KILLS],
    "read": [EIO, EINTR, "short", "kill-before"],
    "write": [EIO, ENOSPC, FULL, EINTR, "short", "torn", *KILLS],
    "fsync": [EIO, ENOSPC, *KILLS],
    "rename": [EIO, EACCES, ENOSPC, *KILLS],
    "unlink": [EIO, EACCES, *KILLS],
    "mkdir": [EACCES, ENOSPC, *KILLS],
    "rmdir": [EIO, *KILLS],
    "flock": [EIO, *KILLS],
    "truncate": [EIO, *KILLS],
    "close": [EIO, *KILLS],
}
HARMLESS = (EINTR, "short")  # the call is made again


def is_checkpoint(call):
    return call.name == "rename" and call.path.endswith("model.safetensors")


def cases_of(calls):
    """All, or a part: a failure at the last call of each site, every one for a checkpoint's files and once for each
    kind of call, and kills around all that orders a checkpoint (or all calls, if there is no earlier checkpoint)."""
    if ADVERSARIAL:
        return [(call, action) for call in calls for action in ACTIONS[call.name]]
    cases, seen = [], set()
    for call in {call.site: call for call in calls}.values():
        failures = [action for action in ACTIONS[call.name] if not action.startswith("kill")]
        if "safetensors" not in call.path or call.name not in ("write", "rename", "fsync"):
            failures = [action for action in failures if (call.name, action) not in seen] or failures[:1]
        seen.update((call.name, action) for action in failures)
        cases += [(call, action) for action in failures]
    renames = [i for i, call in enumerate(calls) if is_checkpoint(call)]
    cycle = calls[renames[0] : renames[1] + 4] if len(renames) > 1 else calls
    orders = ("rename", "unlink", "fsync", "mkdir", "truncate")
    return cases + [(call, action) for call in cycle for action in KILLS if call.name in orders]


def step_of(checkpoint):
    with checkpoint.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        return int(json.loads(file.read(size))["__metadata__"]["step"])


def names(folder):
    return {path.name.replace(".nsa-lock", "") for path in folder.iterdir()} - {""}


class Scenario:
    """A command on a folder, tried with a fault at a time. `before`: the folder that it starts from, or None."""

    def __init__(self, scratch, command, before=None):
        self.scratch, self.command, self.before = scratch, command, before
        folder = self.folder("counted")
        code, errors, self.calls = run_with_fault([*command, "--out", folder], folder, scratch / "counted.log")
        assert code == 0, errors

    def folder(self, name):
        """A new one named by the case: its path is of the same length each time, so are the files."""
        folder = self.scratch / name
        shutil.rmtree(folder, ignore_errors=True)
        if self.before:
            shutil.copytree(self.before, folder)
        return folder

    def relative(self, call):
        return call.name, call.site[1].replace(str(self.scratch), "").split("/", 2)[2:]

    def meet(self, case):
        """The folder and the exit code after the fault; checks the program's message."""
        call, action = case
        folder = self.folder(f"{call.number}_{action}")
        log = self.scratch / f"{folder.name}.log"
        code, errors, calls = run_with_fault([*self.command, "--out", folder], folder, log, call.number, action)
        assert self.relative(calls[call.number - 1]) == self.relative(call), "the calls are not the same each time"
        if action.startswith("kill") or action == "torn":
            assert killed(code), (code, errors)
        elif code != 0:
            assert action not in HARMLESS, errors
            assert str(folder) in one_line(errors)
            assert code == (2 if action == EACCES else 1), (code, errors)
        return folder, code

    def remove(self, folder):
        shutil.rmtree(folder)
        (self.scratch / f"{folder.name}.log").unlink()


@pytest.fixture(scope="module")
def reference(tmp_path_factory, corpus):
    out = tmp_path_factory.mktemp("faults") / "reference"
    nsa("train", "--out", out, "--data", corpus, *OPTIONS)
    return out


@pytest.fixture(scope="module")
def half(tmp_path_factory, corpus):
    """A run that was killed between its second checkpoint and its last, with metrics behind the checkpoint."""
    scenario = Scenario(tmp_path_factory.mktemp("half"), ["train", "--data", corpus, *OPTIONS])
    last = [call for call in scenario.calls if is_checkpoint(call)][-1]
    folder, _ = scenario.meet((last, "kill-before"))
    assert step_of(folder / "model.safetensors") == 2
    return folder


def resume_and_compare(folder, options, reference):
    """The run ends as if nothing had been, and leaves nothing else behind."""
    nsa("train", "--out", folder, *(["--resume"] if (folder / "config.json").exists() else options))
    same_bits(reference, folder)
    assert names(folder) == names(reference)


@pytest.mark.bits
@pytest.mark.parametrize("what", ["train", "resume"])
def test_training(tmp_path, corpus, reference, half, what):
    options = ["--data", corpus, *OPTIONS]
    scenario = Scenario(tmp_path, ["train", *options] if what == "train" else ["train", "--resume"],
                        half if what == "resume" else None)  # fmt: skip
    saved = [call.number for call in scenario.calls if is_checkpoint(call)]
    steps = [0, 2, 4][-len(saved) :]

    def check(case):
        folder, _ = scenario.meet(case)
        there = [step for number, step in zip(saved, steps, strict=True) if number < case[0].number]
        if what == "resume":
            there.append(2)
        if there:  # else it may have ended before its first checkpoint
            assert step_of(folder / "model.safetensors") >= max(there), "a checkpoint is lost"
        resume_and_compare(folder, options, reference)
        scenario.remove(folder)

    for_each(check, cases_of(scenario.calls))


@pytest.mark.bits
def test_overwriting(tmp_path, corpus, reference):
    """The old run or the new one; where it is neither, because the old one's removal has begun, that is said."""
    old = tmp_path / "old"
    (tmp_path / "tries").mkdir()
    nsa("train", "--out", old, "--data", corpus, *OPTIONS, "--seed", 7)
    scenario = Scenario(tmp_path / "tries", ["train", "--overwrite", "--data", corpus, *OPTIONS], old)
    begun = next(call.number for call in scenario.calls if call.name == "rename")
    first = next(call.number for call in scenario.calls if is_checkpoint(call))

    def check(case):
        folder, code = scenario.meet(case)
        if code == 0:
            same_bits(reference, folder)
        elif case[0].number < begun:
            resume_and_compare(folder, [], old)
        elif case[0].number > first:
            resume_and_compare(folder, [], reference)
        else:
            code, errors = run(["train", "--resume", "--out", folder])
            if code != 0:
                assert "config.json changed" in one_line(errors)
        nsa("train", "--overwrite", "--out", folder, "--data", corpus, *OPTIONS)
        same_bits(reference, folder)
        scenario.remove(folder)

    cases = cases_of(scenario.calls)
    for_each(check, cases if ADVERSARIAL else [case for case in cases if case[0].number <= first + 2])


def test_a_result_replaces_the_one_before_or_leaves_it(tmp_path, reference):
    folder = tmp_path / "results"
    folder.mkdir()
    arguments = ["generate", reference, "--tokens", 4, "--temperature", 0, "--json"]
    _, _, calls = run_with_fault([*arguments, folder / "a.json"], folder, tmp_path / "log")

    def check(case):
        call, action = case
        path = folder / f"{call.number}_{action}" / "a.json"  # a folder of its own: the cases run side by side
        path.parent.mkdir()
        path.write_text("before")
        log = tmp_path / f"{call.number}_{action}.log"
        code, errors, _ = run_with_fault([*arguments, path], folder, log, call.number, action)
        if action.startswith("kill") or action == "torn":
            assert killed(code)
        elif code != 0:
            assert action not in HARMLESS and str(path.parent) in one_line(errors)
            assert list(path.parent.glob("*.tmp")) == []
        if code == 0:
            assert json.loads(path.read_text())["sequences"]
        elif path.read_text() != "before":
            assert json.loads(path.read_text())["sequences"]

    assert calls
    for_each(check, cases_of(calls))


def test_power_failure_leaves_a_complete_checkpoint(tmp_path, corpus):
    """What takes a name is on the disk before, and the name is on the disk before what it replaces is removed."""
    scenario = Scenario(tmp_path, ["train", "--data", corpus, *OPTIONS])
    unwritten, unnamed, renames = set(), False, 0
    for call in scenario.calls:
        if call.name == "write":
            unwritten.add(call.path)
        elif call.name == "rename":
            assert call.source not in unwritten, call
            unnamed, renames = True, renames + 1
        elif call.name == "fsync" and call.path.endswith("/counted"):
            unnamed = False
        elif call.name == "fsync":
            unwritten.discard(call.path)
        elif call.name == "unlink":
            assert not unnamed, call
    assert renames == 8 and not unnamed
