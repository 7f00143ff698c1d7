#!/usr/bin/env python3
"""Prepares a machine for `make`: Debian packages, then a virtual environment with the Python packages.

Nothing is fetched when nothing is missing, so a second run (and every run on a machine that has it all) works offline.
Needs only a Python 3.10 without extras; whatever cannot be had ends in one message that says what to do.
"""

import argparse
import glob
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUNDLE = ROOT / "bundle" / "usr"  # of `make bundle`; CMake looks there too
INCLUDE_FOLDERS = ["/usr/include", "/usr/local/include", str(BUNDLE / "include")]
INCLUDE_FOLDERS += os.environ.get("CPATH", "").split(":")

# Debian package -> how to see that what is needed of it is there.
PROGRAMS = {"g++": "g++"}
COMFORTS = {"git": "git", "ccache": "ccache"}  # a build offline does without
HEADERS = {
    "libcli11-dev": "CLI/CLI.hpp",
    "libfmt-dev": "fmt/core.h",
    "nlohmann-json3-dev": "nlohmann/json.hpp",
    "libtomlplusplus-dev": "toml++/toml.h",
    "zlib1g-dev": "zlib.h",
    "libgtest-dev": "gtest/gtest.h",
}
# SentencePiece for `nsa train --tokenizer`, and its trainer for the tests. Installed if apt can; optional.
OPTIONAL = {"libsentencepiece-dev": "/usr/include/sentencepiece_processor.h", "sentencepiece": "/usr/bin/spm_train"}
# Further Debian packages for `make docs`, `make lint`, `make wheel`, `make build CUDA=1` without nvcc and .ci/run. The
# Python packages are the dependency groups of pyproject.toml.
EXTRA = {
    "aarch64": {
        "g++-aarch64-linux-gnu": "/usr/bin/aarch64-linux-gnu-g++",
        "googletest": "/usr/src/googletest/CMakeLists.txt",
        "qemu-user": "/usr/bin/qemu-aarch64",
    },
    "cuda": {},
    "docs": {"doxygen": "/usr/bin/doxygen"},
    "lint": {"clang-tidy": "/usr/bin/clang-tidy"},
    "tsan": {"clang": "/usr/bin/clang++", "libomp-dev": "/usr/lib/llvm-*/lib/libarcher.so"},
    "wheel": {"doxygen": "/usr/bin/doxygen"},
}

GB = 1e9
# Measured on Debian 12 with torch 2.11.0 from PyPI; see "Set-up" in CONTRIBUTING.md.
DOWNLOAD, DISK, BUILD_DISK = 2.8 * GB, 5.0 * GB, 1.0 * GB

# Run inside the environment, whose pip reads TOML also with Python 3.10: prints the requirements of the groups
# argv[2:] of pyproject.toml that it does not meet. A build tool on PATH is as good as PyPI's.
SEE_WHAT_IS_MISSING = """
import importlib.metadata as metadata, re, shutil, subprocess, sys
from pip._vendor.packaging.requirements import Requirement
try:
    import tomllib
except ImportError:
    from pip._vendor import tomli as tomllib
torch, *groups = sys.argv[1:]
with open("pyproject.toml", "rb") as file:
    listed = tomllib.load(file)["dependency-groups"]
for line in (line for group in groups for line in listed.get(group, [])):
    if line.startswith("torch==") and torch == "system":
        line = "torch>=2.10"
    requirement = Requirement(line)
    if requirement.marker and not requirement.marker.evaluate():
        continue
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        found = None
    if found is None and requirement.name in ("cmake", "ninja") and shutil.which(requirement.name):
        answer = subprocess.run([requirement.name, "--version"], capture_output=True, text=True).stdout
        found = re.search(r"[0-9]+[0-9.]*[0-9]", answer).group()
    if found is None or not requirement.specifier.contains(found, prereleases=True):
        print(requirement, "" if found is None else "(found " + found + ")", sep="\\t")
"""


def stop(*lines):
    print("\nset-up stopped:", *lines, sep="\n  ", file=sys.stderr)
    sys.exit(1)


def say(text):
    print(f"[set-up] {text}", flush=True)


def run(command, **keywords):
    say(" ".join(map(str, command)))
    return subprocess.run(command, **keywords).returncode == 0


def has_header(name):
    return any(folder and os.path.exists(os.path.join(folder, name)) for folder in INCLUDE_FOLDERS)


def has_module(name, python=sys.executable):
    command = [python, "-c", f"import {name}"]
    return os.path.exists(python) and subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


def missing_debian_packages(need_venv, purpose, offline):
    programs = PROGRAMS if offline else PROGRAMS | COMFORTS
    missing = [package for package, program in programs.items() if not shutil.which(program)]
    missing += [package for package, header in HEADERS.items() if not has_header(header)]
    if need_venv:
        missing.append("python3-venv")
    return missing + [package for package, path in EXTRA.get(purpose, {}).items() if not glob.glob(path)]


def install_debian_packages(missing, offline, sudo):
    """Installs with apt-get as root or a sudo without password; else stops with the command to run."""
    if not missing:
        return
    names = " ".join(missing)
    by_hand = f"sudo apt-get update && sudo apt-get install -y --no-install-recommends {names}"
    if not shutil.which("apt-get"):
        stop(f"missing: {names}", "Those are Debian's names; this system has no apt-get: install their equivalents.")
    if offline:
        stop(
            f"missing Debian packages, and OFFLINE=1 forbids fetching them: {names}",
            "`make bundle` on a machine with a network makes a folder bundle/ with all headers among them.",
        )
    if not may_install(sudo):
        stop(f"missing Debian packages: {names}", "Run this line, then make again (make SUDO=1 runs it):", by_hand)
    if not apt_install(missing):
        stop(f"apt-get could not install: {names}", "Its message is above. By hand:", by_hand)


def may_install(sudo):
    return bool(shutil.which("apt-get")) and (os.geteuid() == 0 or sudo)


def apt_install(packages):
    say(f"Debian packages to install: {' '.join(packages)}")
    prefix = [] if os.geteuid() == 0 else ["sudo", "-n"]
    apt = [*prefix, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q"]
    no_input = {"stdin": subprocess.DEVNULL}
    run([*apt, "update"], **no_input)  # a failing mirror need not matter: the install below decides
    return run([*apt, "install", "-y", "--no-install-recommends", *packages], **no_input)


def install_optional_packages(offline, sudo):
    missing = [package for package, path in OPTIONAL.items() if not os.path.exists(path)]
    if missing and (offline or not may_install(sudo) or not apt_install(missing)):
        say(f"going on without {' '.join(missing)}: nsa train --tokenizer FILE.model needs libsentencepiece-dev")


def make_venv(venv, torch):
    """Creates the environment; for TORCH=system it also sees the packages of the Python that runs this."""
    # Without ensurepip (Debian's python3-venv) it uses the pip of the system's torch.
    options = [] if has_module("ensurepip") else ["--without-pip"]
    ready = has_module("pip", venv / "bin" / "python")
    if not ready and not run([sys.executable, "-m", "venv", *options, str(venv)]):
        stop(f"python3 -m venv could not create {venv}; its message is above")
    if torch == "system":
        folders = [folder for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))]
        (own,) = venv.glob("lib/python*/site-packages")
        (own / "system-torch.pth").write_text("\n".join(folders) + "\n")


def missing_python_packages(venv, torch, groups):
    answer = subprocess.run(
        [venv / "bin" / "python", "-c", SEE_WHAT_IS_MISSING, torch, *groups], cwd=ROOT, capture_output=True, text=True
    )
    if answer.returncode:
        stop(f"{venv} does not work; remove the folder and run make again. Python says:", answer.stderr.strip())
    return [line.split("\t")[0] for line in answer.stdout.splitlines()]


def check_disk():
    """Says what the first set-up fetches, and refuses before anything is downloaded, not in the middle of it."""
    need = DISK + DOWNLOAD + BUILD_DISK  # pip keeps the downloaded files while it unpacks
    free = shutil.disk_usage(ROOT).free
    say(
        f"torch and the other Python packages: {DOWNLOAD / GB:.1f} GB to download, {DISK / GB:.1f} GB on disk; "
        f"with the download and the build {need / GB:.1f} GB must be free, there are {free / GB:.1f} GB"
    )
    if free < need:
        stop(f"{ROOT} has {free / GB:.1f} GB free, {need / GB:.1f} GB are needed (the download is removed afterwards)")


def install_python_packages(venv, torch, offline, purpose):
    missing = missing_python_packages(venv, torch, ["build", purpose] if purpose else ["build"])
    if not missing:
        say(f"{venv} has all Python packages")
        return
    if torch == "system" and any(requirement.startswith("torch") for requirement in missing):
        stop(f"TORCH=system, but {sys.executable} has no torch >= 2.10; name another interpreter by PYTHON=")
    say(f"Python packages to install: {', '.join(missing)}")
    # Wheels of gigabytes are unpacked in TMPDIR, and /tmp is often a small tmpfs; pip's cache would double the space.
    temporary = ROOT / "build" / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    command = [venv / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["--no-index"] if offline else []
    done = run([*command, *missing], env={**os.environ, "TMPDIR": str(temporary)}, stdin=subprocess.DEVNULL)
    shutil.rmtree(temporary, ignore_errors=True)
    if not done:
        stop(
            "pip could not install: " + " ".join(missing),
            "OFFLINE=1 takes wheels only from PIP_FIND_LINKS."
            if offline
            else "Is PyPI reachable? pip's message is above.",
            "A torch that is installed already is used with: make TORCH=system PYTHON=/path/to/python3 build",
        )


def make_cuda_root(venv):
    """A CUDA toolkit in VENV/cuda, of links: the wheels' files where nvcc and CMake look for them."""
    answer = subprocess.run([venv / "bin" / "python", "-c", "import sys; print(*sys.path, sep='\\n')"],
                            capture_output=True, text=True, check=True)  # fmt: skip
    wheels = [pathlib.Path(folder) / "nvidia" / "cu13" for folder in answer.stdout.splitlines() if folder]
    root = venv / "cuda"
    shutil.rmtree(root, ignore_errors=True)
    for part in ("bin", "include", "lib", "nvvm"):
        (root / part).mkdir(parents=True)
        for file in [file for wheel in wheels for file in wheel.glob(f"{part}/*")]:
            if not (root / part / file.name).exists():
                (root / part / file.name).symlink_to(file)
    (root / "lib64").symlink_to("lib")  # nvcc.profile says lib64
    for library in sorted((root / "lib").glob("*.so.*")):  # the linker and CMake want libcudart.so
        name = root / "lib" / (library.name.split(".so.")[0] + ".so")
        if not name.exists():
            name.symlink_to(library.name)
    if not run([root / "bin" / "nvcc", "--version"], stdout=subprocess.DEVNULL):
        stop(f"{root}/bin/nvcc does not run; its message is above")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--venv", type=pathlib.Path, default=ROOT / ".venv", help="folder of the environment")
    option(
        "--torch",
        choices=["pypi", "system"],
        default="pypi",
        help="torch from PyPI at the pinned version, or this Python's",
    )
    option("--offline", action="store_true", help="fetch nothing; stop when something is missing")
    option("--sudo", action="store_true", help="install Debian packages with sudo, which must ask for no password")
    option("--for", dest="purpose", choices=sorted(EXTRA), help="purpose that needs further packages")
    options = parser.parse_args()
    if sys.version_info < (3, 10):  # noqa: UP036 - this file is what tells an older Python
        stop(f"Python 3.10 or newer is needed, {sys.executable} is {sys.version.split()[0]}; name another by PYTHON=")
    venv = options.venv.absolute()
    if options.torch == "pypi" and not list(venv.glob("lib/python*/site-packages/torch")):
        check_disk()
    pip = has_module("ensurepip") or (options.torch == "system" and has_module("pip"))
    need_venv = not pip and not has_module("pip", venv / "bin" / "python")
    missing = missing_debian_packages(need_venv, options.purpose, options.offline)
    install_debian_packages(missing, options.offline, options.sudo)
    install_optional_packages(options.offline, options.sudo)
    make_venv(venv, options.torch)
    install_python_packages(venv, options.torch, options.offline, options.purpose)
    if options.purpose == "cuda":
        make_cuda_root(venv)


if __name__ == "__main__":
    main()
