#!/usr/bin/env python3
"""Lays the package out as Hugging Face's `kernels` loads it from its hub: FOLDER/build/VARIANT, for the CPU.

    tools/hub_layout.py SDIST FOLDER

The operators get a namespace of their own, named after the sources, and so does libnsa: an installed package, or
another version from the hub, may be in the same process. Libraries keep their symbol tables, without which
kernel-abi-check sees nothing in them.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NAME = "native-sparse-attention"
VERSION = 1  # of the interface; the hub numbers its branches by it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sdist", type=Path, help="sources of the package, which `make wheel` puts into dist/")
    parser.add_argument("folder", type=Path, help="folder of the layout; its build/VARIANT is replaced")
    options = parser.parse_args()
    identity = hashlib.sha256(options.sdist.read_bytes()).hexdigest()[:8]
    namespace = f"{NAME.replace('-', '_')}_cpu_{identity}"
    variant = options.folder / "build" / f"torch-stable-abi210-cpu-{platform.machine()}-linux"
    shutil.rmtree(variant, ignore_errors=True)
    with tempfile.TemporaryDirectory() as work:
        settings = [f"cmake.define.NSA_TORCH_NAMESPACE={namespace}", "install.strip=false"]
        command = [sys.executable, *"-m pip wheel -q --no-deps --no-index --no-build-isolation".split(), "-w", work]
        command += [f"--config-settings={setting}" for setting in settings]
        environment = {**os.environ, "NSA_CUDA": "0", "TMPDIR": work, "CCACHE_BASEDIR": work}
        subprocess.run([*command, options.sdist.absolute()], check=True, env=environment)
        (wheel,) = Path(work).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(work, [name for name in archive.namelist() if name.startswith("nsa/")])
        shutil.copytree(Path(work) / "nsa", variant)
    metadata = {
        "id": namespace,
        "name": NAME,
        "version": VERSION,
        "license": "apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    print(variant)


if __name__ == "__main__":
    main()
