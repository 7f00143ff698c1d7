#!/usr/bin/env python3
"""Checks that a folder of tools/prebuilt.sh loads here and runs on every GPU: check_prebuilt.py FOLDER.

With --sources it only prints the hash of all that libnsa, the extension and the program are compiled from.
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def hash_of_sources():
    files = [ROOT / "CMakeLists.txt"]
    for folder in ("cmake", "include", "src", "python/csrc"):
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def main():
    if sys.argv[1:] == ["--sources"]:
        return print(hash_of_sources())
    folder = Path(sys.argv[1])
    about = json.loads((folder / "about.json").read_text())
    print(f"{folder}: {about}")
    if hash_of_sources() != about["sources"]:
        print(f"the sources here are others than those of commit {about['commit']} that this was built from")
    import torch

    import nsa
    from nsa.train import load_program

    load_program()
    subprocess.run([folder / "bin" / "nsa", "--version"], check=True)
    print(f"torch {torch.__version__}, nsa {nsa.__version__} and its program load; {nsa.device_count()} GPUs")
    if nsa.device_count() != torch.cuda.device_count():
        sys.exit(f"nsa finds {nsa.device_count()} GPUs, torch {torch.cuda.device_count()}")
    for device in range(nsa.device_count()):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            q, k, v = (
                torch.randn(1, 512, heads, 128, device=f"cuda:{device}", dtype=dtype, requires_grad=True)
                for heads in (16, 1, 1)
            )
            gates = torch.rand(1, 512, 16, 3, device=q.device, dtype=dtype)
            o = nsa.native_sparse_attention(q, k, v, gates)
            o.sum().backward()
            expected = nsa.reference.native_sparse_attention(*(t.detach().double() for t in (q, k, v, gates)))
            error = float((o.detach().double() - expected).norm() / expected.norm())
            print(f"cuda:{device} {torch.cuda.get_device_name(device)} {dtype}: relative error of o {error:.1e}")
            if not error < 0.02 or not torch.isfinite(q.grad).all():
                sys.exit("o or its gradient is wrong")


if __name__ == "__main__":
    main()
