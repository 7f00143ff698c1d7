"""Which backends there are, and what is said where one cannot run."""

import pathlib
import re
import subprocess
import sys

import pytest
import torch

import nsa
from devices import NO_CUDA
from nsa._registration import compressed_cu_seqlens_on_device
from problem import SMALL


def test_the_version_is_that_of_the_build():
    built = re.search(
        r"project\(nsa VERSION ([0-9.]+)", (pathlib.Path(__file__).parents[2] / "CMakeLists.txt").read_text()
    )
    assert nsa.__version__ == built[1]


@pytest.mark.parametrize("cuda", ["0", "1"])
def test_the_package_has_its_extension_with_and_without_cuda(monkeypatch, cuda):
    """What pyproject.toml says of builds with CUDA is added to what it says of all."""
    settings = pytest.importorskip("scikit_build_core.settings.skbuild_read_settings")
    monkeypatch.setenv("NSA_CUDA", cuda)
    reader = settings.SettingsReader.from_file(pathlib.Path(__file__).parents[2] / "pyproject.toml", {})
    defined = reader.settings.cmake.define
    assert (defined["NSA_BUILD_PYTHON"], defined["NSA_BUILD_CUDA"]) == ("ON", "ON" if cuda == "1" else "OFF")


def test_description():
    lines = nsa.describe_backends().splitlines()
    assert [line.split(":")[0] for line in lines[:4]] == ["cpu", "cuda", "reference", "chosen"]
    assert ("cannot run: " in lines[1]) == (nsa.device_count() == 0)
    assert lines[3].startswith("chosen: cpu")


def test_backends_are_data(monkeypatch):
    monkeypatch.delenv("NSA_BACKEND", raising=False)
    cpu, cuda, reference = nsa.backends()
    assert (cpu.name, cuda.name, reference.name) == ("cpu", "cuda", "reference")
    assert cpu.available and cpu.chosen and cpu.variant and cpu.reason is None and "bfloat16" in cpu.takes
    assert cuda.available == cuda.chosen == (nsa.device_count() > 0) == (cuda.reason is None)
    assert reference.available and not reference.chosen and reference.variant == "float64"
    assert nsa.describe_backends().startswith(f"cpu: {cpu.takes}; runs as {cpu.variant}\n")


def test_use_backend(monkeypatch):
    monkeypatch.setenv("NSA_BACKEND", "cpu")
    x = torch.randn(1, 5, 1, 7, dtype=torch.float64)  # which reference alone takes
    with nsa.use_backend("reference"):
        nsa.sliding_window_attention(x, x, x, 4)
        assert [backend.chosen for backend in nsa.backends()] == [False, False, True]
    with pytest.raises(NotImplementedError, match="backend cpu"):
        nsa.sliding_window_attention(x, x, x, 4)
    nsa.use_backend("reference")
    nsa.sliding_window_attention(x, x, x, 4)
    with pytest.raises(ValueError, match=r"^name = 'gpu': must be auto, cpu, cuda or reference$"):
        nsa.use_backend("gpu")
    if not nsa.device_count():
        with pytest.raises(ValueError, match=r"^name = 'cuda': cannot run here: .*"):
            nsa.use_backend("cuda")


ALONE = """
import sys
for absent in ("numpy", "transformers", "accelerate", "safetensors", "matplotlib"):
    sys.modules[absent] = None  # an import of it fails
import warnings
warnings.simplefilter("ignore")  # torch's warning about missing numpy
import torch
import nsa
layer = nsa.NativeSparseAttention(32, 4, 2, 8)
layer(torch.randn(1, 40, 32)).sum().backward()
cache = layer.make_cache(1, 64)
layer(torch.randn(1, 40, 32), cache=cache)
"""


def test_torch_is_all_that_it_needs():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_a_report_needs():
    done = subprocess.run([sys.executable, "-m", "nsa"], capture_output=True, text=True, check=True)
    for what in (f"nsa {nsa.__version__}", f"torch {torch.__version__}", "cpu: float32", "chosen: ", "CUDA devices"):
        assert what in done.stdout


def test_tensors_in_host_memory_do_not_run_on_cuda(monkeypatch):
    monkeypatch.setenv("NSA_BACKEND", "cuda")
    x = torch.randn(1, 5, 1, 64)
    with pytest.raises(NotImplementedError, match="backend cuda: tensors on the cpu: takes tensors on a CUDA device"):
        nsa.sliding_window_attention(x, x, x, 4)


@pytest.mark.skipif(not torch.cuda.is_available() or nsa.device_count() > 0, reason="needs a GPU and a build without")
def test_a_build_without_cuda_says_so():
    x = torch.randn(1, 5, 1, 64, device="cuda")
    with pytest.raises(RuntimeError, match="this build of libnsa has none"):
        nsa.sliding_window_attention(x, x, x, 4)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not nsa.device_count(), reason=NO_CUDA))]
)
def test_offsets_of_compressed_tokens_by_torch(device):
    """The formula for offsets on a device against the library's for offsets in host memory."""
    for _ in range(20):
        lengths = torch.randint(0, 40, (9,)) * torch.randint(0, 2, (9,))
        cu_seqlens = torch.cat((torch.zeros(1), lengths.cumsum(0))).int()
        for cfg in (SMALL, nsa.NSAConfig(3, 1, 16, 2, 0, 1, 64), nsa.NSAConfig(16, 16)):
            found = compressed_cu_seqlens_on_device(cu_seqlens.to(device), cfg.as_list())
            assert found.dtype == torch.int32 and torch.equal(found.cpu(), nsa.compressed_cu_seqlens(cu_seqlens, cfg))
    for refused in (cu_seqlens.long(), cu_seqlens[None], cu_seqlens[:0]):
        with pytest.raises(ValueError, match=r"cu_seqlens: int.* expected int32 \(B \+ 1\)"):
            compressed_cu_seqlens_on_device(refused.to(device), SMALL.as_list())
