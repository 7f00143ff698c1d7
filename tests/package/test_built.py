"""The files that `make wheel` put into dist/."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WHEEL, SDIST = next(ROOT.glob("dist/*.whl")), next(ROOT.glob("dist/*.tar.gz"))
MB = 1e6


def test_the_tag_of_the_wheel():
    found = re.fullmatch(r"nsa-[0-9.]+-py3-none-manylinux_2_([0-9]+)_(x86_64|aarch64)\.whl", WHEEL.name)
    assert found, WHEEL.name
    assert int(found[1]) <= 34, "what Debian 12 builds runs on Ubuntu 22.04 and RHEL 9"


def test_the_wheel_has_no_library_of_others():
    names = zipfile.ZipFile(WHEEL).namelist()
    assert sorted(name for name in names if ".so" in name) == ["nsa/_C.so", "nsa/libnsa.so.0"]
    assert "nsa/py.typed" in names
    assert WHEEL.stat().st_size < 100 * MB, "PyPI's limit for a file"


def test_the_wheel_uses_the_stable_abi_of_torch_2_10():
    done = subprocess.run(["torch-abi-audit", "nsa", "--json", "--check", "torch"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (library,) = (file["torch"] for file in json.loads(done.stdout)["bundled_libs"] if file["torch"]["uses_torch"])
    assert library["stable"] and library["min_torch_version"] == "2.10.0" and not library["unknown_shim_symbols"]


def test_what_the_sdist_has():
    with tarfile.open(SDIST) as archive:
        files = {member.name.partition("/")[2] for member in archive if member.isfile()}
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    parts = ("cmake/", "include/", "python/", "src/", "tests/python/")
    others = {"CHANGELOG.md", "CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml"}
    assert files - {"PKG-INFO"} == {name for name in tracked.split("\0") if name.startswith(parts) or name in others}
    assert SDIST.stat().st_size < 2 * MB


def test_the_sdist_configures_without_git_and_network(tmp_path):
    """`make wheel` has built the wheel from it."""
    alone = ["unshare", "--map-root-user", "--net"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this process may not make a network namespace")
    with tarfile.open(SDIST) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    options = ["-DNSA_BUILD_PYTHON=ON", "-DNSA_BUILD_LM=OFF", "-DNSA_BUILD_TESTS=OFF", f"-DNSA_PYTHON={sys.executable}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = [*alone, "cmake", "-S", source, "-B", tmp_path / "build", "-G", "Ninja", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not shutil.which("ccache"), reason="compiles the program, for half an hour without ccache")
def test_the_program_in_the_package(tmp_path):
    pip = [sys.executable, *"-m pip install -q --no-deps --no-index --no-build-isolation --target".split()]
    environment = {**os.environ, "NSA_LM": "1", "CCACHE_BASEDIR": str(ROOT)}
    subprocess.run([*pip, tmp_path, ROOT], env=environment, check=True)
    alone = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([tmp_path / "bin" / "nsa", "--version"], env=alone, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("nsa "), done.stderr
    find = "import nsa.train; print(nsa.train.find_library())"
    done = subprocess.run([sys.executable, "-c", find], env=alone, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"{tmp_path}/nsa/lib/libnsa_program.so\n", done.stderr


def test_what_the_release_workflow_builds():
    command = ["cibuildwheel", "--print-build-identifiers", "--platform", "linux", "--archs", "x86_64,aarch64"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["cp312-manylinux_x86_64", "cp312-manylinux_aarch64"]
