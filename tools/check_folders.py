#!/usr/bin/env python3
"""Do includes run one way, and is a folder a namespace? check_folders.py

ARROWS is the order of folders: a file may include files of its own folder, the public headers (nsa/) and the folders
named there. A folder without an entry belongs to the nearest one above it that has one. NAMESPACES has the folders
whose namespace is not their path; files in them share it. A file may open further namespaces.
"""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
FAMILIES = ["range_attention", "select_blocks", "selected_attention", "compress", "decode"]
LM = [f"lm/{folder}" for folder in ["layers", "model", "data", "generate", "run", "train", "probes"]]
PROGRAM = ["base", "bridge"]
ARROWS = {
    "base": [],
    "bridge": ["base"],
    "lm/baselines": PROGRAM,
    "lm/layers": PROGRAM,
    "lm/model": [*PROGRAM, *LM[:1]],
    "lm/data": [*PROGRAM, *LM[:2]],
    "lm/generate": [*PROGRAM, *LM[:2]],
    "lm/run": [*PROGRAM, *LM[:4]],
    "lm/train": [*PROGRAM, *LM[:5]],
    "lm/probes": [*PROGRAM, *LM[:6]],
    "bench": PROGRAM,
    "replay": PROGRAM,
    "cli": [*PROGRAM, *LM, "lm/baselines", "bench", "replay"],
    "core": [],
    "reference": ["core"],
    "cpu": ["core"],
    "cuda": ["core"],
    "cuda/common": ["core"],
    "cuda/portable": ["core", "cuda/common"],
    "cuda/sm90/common": ["core", "cuda/common"],
    **{f"cuda/sm90/{family}": ["core", "cuda/common", "cuda/sm90/common"] for family in FAMILIES},
    "cuda/sm90": ["core", "cuda/common", *(f"cuda/sm90/{family}" for family in FAMILIES)],
    "cuda/operations": [
        "core",
        "cuda/common",
        "cuda/portable",
        "cuda/sm90",
        "cuda/sm90/common",
        *(f"cuda/sm90/{family}" for family in FAMILIES),
    ],
}
NAMESPACES = {
    "core": "nsa",
    "cpu/kernels": "nsa::cpu::NSA_ISA",
    "cuda/common": "nsa::cuda",
    "cuda/operations": "nsa::cuda",
    "cuda/portable": "nsa::cuda::portable",
    "cuda/sm90/common": "nsa::cuda::sm90",
    "cuda/sm90/decode": "nsa::cuda::sm90::decode",
    "lm": "nsa::lm",
}


def owner(path: str, folders: Iterable[str] = ARROWS) -> str | None:
    """The one of these folders that a file of src/ belongs to."""
    parts = path.split("/")[:-1]
    above = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((folder for folder in above if folder in folders), None)


def namespace(path: str) -> str:
    shared = owner(path, NAMESPACES)
    return NAMESPACES[shared] if shared else "nsa::" + "::".join(path.split("/")[:-1])


def main() -> int:
    files = subprocess.run(["git", "-C", SOURCE, "ls-files"], check=True, capture_output=True, text=True).stdout
    wrong = []
    for name in files.splitlines():
        own = owner(name)
        if own is None or not re.search(r"\.(h|cuh|cpp|cu)$", name) or not (SOURCE / name).is_file():
            continue
        text = (SOURCE / name).read_text()
        opened = re.findall(r"^namespace (nsa[\w:]*) \{", text, re.MULTILINE)
        if opened and not any((space + "::").startswith(namespace(name) + "::") for space in opened):
            wrong.append(f"src/{name}: must open namespace {namespace(name)}, opens {', '.join(opened)}")
        for number, line in enumerate(text.splitlines(), 1):
            include = re.match(r'#include "([^"]+)"', line)
            if not include or include[1].startswith("nsa/"):
                continue
            if owner(include[1]) not in [own, *ARROWS[own]]:
                wrong.append(f"src/{name}:{number}: {own} may not include {include[1]}")
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
