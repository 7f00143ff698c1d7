#!/usr/bin/env python3
"""Tests `nsa train` on several ranks: its speed, and its behaviour when a rank is killed.

    python bench/scale/train_ranks.py speed --ranks 2 --out runs/two --json two.json -- --data text --steps 80
    python bench/scale/train_ranks.py kill --ranks 2 --out runs/killed --json killed.json -- --data text --steps 400

Behind -- are options of nsa train. The ranks are those of torchrun on this machine; nothing that was started is left
running.

speed: tokens a second and model TFLOP/s, medians over the lines of metrics.jsonl but the first; the losses; and a hash
of the weights at the end, by which runs of other numbers of ranks can be compared (they must have the same
--grad-accum).

kill: for the first and for the last rank a run in which that one gets SIGKILL once step --at is logged. Both at the
same time, on the same GPUs. What counts are the seconds from there until another rank has said what happened, and until
torchrun has ended; then --resume has to come to the last step, with the same weights in both runs.
"""

import argparse
import hashlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from options import amount, integer

SAID = re.compile(r"nsa: rank (\d+): step \d+: .*; the last checkpoint, of step \d+, is in .*; resume with --resume")


def arguments():
    """Parses the command line."""
    given = sys.argv[1:]
    split = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "kill"))
    parser.add_argument("--ranks", type=integer, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument(
        "--at", type=integer, default=50, help="step after whose log line a rank is killed (default %(default)s)"
    )
    parser.add_argument(
        "--limit", type=amount, default=120, help="time limit of each start, seconds (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args(given[:split])
    if options.what == "kill" and options.ranks < 2:
        parser.error(f"--ranks {options.ranks}: must be at least 2")
    options.train = given[split + 1 :]
    return options


class Torchrun:
    """nsa train under torchrun, with what it prints and when."""

    def __init__(self, options, folder, *train):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
        command += ["-m", "nsa.train", "--out", str(folder), *train]
        self.lines, self.limit = [], options.limit
        self.begin = time.monotonic()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))
            print(f"[{self.process.pid}] {line}", end="", flush=True)

    def pids(self):
        """Process ids by rank."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int(re.search(r"^PPid:\s*(\d+)", (folder / "status").read_text(), re.MULTILINE)[1])
                variables = (folder / "environ").read_bytes().split(b"\0")
            except (OSError, TypeError):
                continue  # it has ended
            if parent == self.process.pid:
                found |= {int(v[5:]): int(folder.name) for v in variables if v.startswith(b"RANK=")}
        return found

    def wait_for(self, step, folder):
        """Until metrics.jsonl has the step."""
        while (
            not (folder / "metrics.jsonl").exists() or f'"step":{step},' not in (folder / "metrics.jsonl").read_text()
        ):
            if self.process.poll() is not None or time.monotonic() > self.begin + self.limit:
                raise SystemExit(f"{folder}: did not come to step {step}: {self.end(0)}: {self.tail()}")
            time.sleep(0.01)

    def end(self, limit=None):
        """The exit code; after the limit the ranks are killed."""
        try:
            code = self.process.wait(max(0, self.begin + self.limit - time.monotonic()) if limit is None else limit)
        except subprocess.TimeoutExpired:
            ranks = self.pids()
            self.process.kill()
            for pid in ranks.values():
                os.kill(pid, signal.SIGKILL)
            code = f"not ended after {time.monotonic() - self.begin:.0f} s"
            self.process.wait()
        self.reader.join(10)
        return code

    def tail(self):
        """The last lines."""
        return "\n".join(line for _, line in self.lines[-15:])


def metrics(folder, kind):
    """Lines of metrics.jsonl."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def weights_hash(folder):
    """SHA-256 of the tensors of the model, whatever else its file says."""
    data = (folder / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    return hashlib.sha256(data[header:]).hexdigest()


def speed(options):
    """Figures of one run."""
    run = Torchrun(options, options.out, *options.train)
    if (code := run.end()) != 0:
        raise SystemExit(f"torchrun: {code}: {run.tail()}")
    config, lines = json.loads((options.out / "config.json").read_text()), metrics(options.out, "train")
    found = {
        name: statistics.median(line[name] for line in lines[1:]) for name in ("tokens_per_second", "model_tflops")
    }
    found |= {"losses": [line["loss"] for line in lines], "steps": lines[-1]["step"], "tokens": lines[-1]["tokens"]}
    found |= {"parameters": config["parameters"]["total"], "context": config["train"]["context"]}
    found |= {"grad_accum": config["train"]["grad_accum"], "weights_sha256": weights_hash(options.out)}
    return found | {"seconds_of_all": time.monotonic() - run.begin}


def killed(options, victim):
    """Figures of a run whose rank `victim` is killed, and of its end by --resume."""
    folder = options.out / str(victim)
    run = Torchrun(options, folder, *options.train)
    run.wait_for(options.at, folder)
    pids = run.pids()
    moment = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    code = run.end(60)
    ended = time.monotonic() - moment
    said = [(at - moment, line) for at, line in run.lines if (found := SAID.search(line)) and int(found[1]) != victim]
    found = {"victim": victim, "code": code, "seconds_until_torchrun_ended": ended}
    found |= {"seconds_until_said": said[0][0] if said else None, "said": said[0][1] if said else None}
    found["left_running"] = [rank for rank, pid in pids.items() if Path(f"/proc/{pid}").exists()]
    again = Torchrun(options, folder, "--resume")
    found |= {"resumed": again.end(), "seconds_of_resumed": time.monotonic() - again.begin}
    end = metrics(folder, "end")
    found |= {"end": end[-1] if end else None, "weights_sha256": weights_hash(folder)}
    return found


def kill(options):
    """Figures of both runs."""
    victims = (0, options.ranks - 1)
    with ThreadPoolExecutor(len(victims)) as pool:
        found = list(pool.map(lambda victim: killed(options, victim), victims))
    return {"runs": found, "same_weights": len({run["weights_sha256"] for run in found}) == 1}


def fine(options, found):
    """Returns whether the results are as expected."""
    if options.what == "speed":
        return found["losses"][-1] < found["losses"][0]
    runs = found["runs"]
    ended = all(run["said"] and run["seconds_until_torchrun_ended"] < 35 and not run["left_running"] for run in runs)
    return (
        ended
        and all(run["resumed"] == 0 and run["end"]["reason"] == "finished" for run in runs)
        and found["same_weights"]
    )


def main():
    """Prints and writes the figures."""
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    if any(options.out.iterdir()):
        sys.exit(f"--out {options.out}: must be empty")
    found = {"ranks": options.ranks, "train": " ".join(options.train), "date": date.today().isoformat()}
    found |= {"commit": os.environ.get("COMMIT")}
    found |= speed(options) if options.what == "speed" else kill(options)
    found["fine"] = fine(options, found)
    text = json.dumps(found, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 0 if found["fine"] else 1


if __name__ == "__main__":
    sys.exit(main())
