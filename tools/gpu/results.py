#!/usr/bin/env python3
"""Collects the results of tools/gpu.sh in one JSON: results.py LOGS JSON COMMAND [NAME CODE SECONDS COMMAND]...

An existing file of the same commit, GPU and driver keeps its other stages.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def machine():
    """The first GPU and its driver, None where there is none."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        gpu, driver = subprocess.check_output(query, text=True).splitlines()[0].split(", ")
    except (OSError, subprocess.CalledProcessError):
        gpu = driver = None
    found = {"gpu": gpu, "driver": driver, "commit": os.environ.get("COMMIT") or None}
    return found | {"gpus": int(os.environ["GPUS"])} if "GPUS" in os.environ else found


def tests(path):
    """Counts from the XML that GoogleTest and pytest write."""
    cases = list(ElementTree.parse(path).iter("testcase"))
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    run = len(cases) - skipped
    return {"run": run, "passed": run - failed, "skipped": skipped, "failed": failed}


def timings(text):
    """The times in the output of bench/gpu/cuda_stages.cu."""
    lengths, now = {}, None
    for line in text.splitlines():
        if found := re.match(r"S = (\d+)", line):
            now = lengths.setdefault(found[1], {})
        elif found := re.match(r"  (.+?) +([0-9.]+) ms +workspace +([0-9.]+) MiB", line):
            now[found[1]] = {"ms": float(found[2]), "workspace_mib": float(found[3])}
    return {"problem": "B=1 H=64 Hkv=4 D=128 bfloat16, MLP phi, defaults", "unit": "ms", "lengths": lengths}


def training(text):
    """Losses and speed in the output of examples/train_long.py."""
    lines = re.findall(r"^step \d+: (\S+) nats per byte, (\d+) tokens/s$", text, re.MULTILINE)
    losses, speeds = [float(loss) for loss, _ in lines], [int(speed) for _, speed in lines[1:]]
    return {"losses": losses, "tokens_per_second": statistics.median(speeds) if speeds else None}


def stage(logs, name, code, seconds, command):
    found = {"outcome": {0: "passed", 77: "skipped"}.get(int(code), "failed"), "seconds": int(seconds)}
    found |= {"command": command, "date": time.strftime("%Y-%m-%d")}
    if (logs / f"{name}.xml").exists():
        found["tests"] = tests(logs / f"{name}.xml")
        if found["tests"]["run"] == 0 and code == "0":
            found["outcome"] = "skipped"
    log = (logs / f"{name}.log").read_text(errors="replace")
    if command.startswith("compute-sanitizer"):
        summary = re.search(r"SUMMARY: (\d+) ", log)
        found["findings"] = int(summary[1]) if summary else None
    if name == "repeat":
        found["repeats"] = int(os.environ["NSA_REPEATS"])
    if name == "stages":
        found |= timings(log)
    if name in ("prebuilt", "topology"):
        found["text"] = log
    if name.startswith("train_long"):
        found["result"] = training(log)
    if (logs / f"{name}.json").exists():
        found["result"] = json.loads((logs / f"{name}.json").read_text())
    return found


def main():
    logs, path, command, *fields = sys.argv[1:]
    about, path = machine(), Path(path)
    before = json.loads(path.read_text()) if path.exists() else {}
    stages = before.get("stages", {}) if all(before.get(key) == value for key, value in about.items()) else {}
    for i in range(0, len(fields), 4):
        stages[fields[i]] = stage(Path(logs), *fields[i : i + 4])
    about |= {"command": command, "date": time.strftime("%Y-%m-%d")}
    path.write_text(json.dumps({**about, "stages": stages}, indent=1) + "\n")
    print(f"results: {path}")


if __name__ == "__main__":
    main()
