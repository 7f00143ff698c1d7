"""The hub's layout, which tools/hub_layout.py made in the folder NSA_HUB, together with the installed package."""

import os
import subprocess
import sys
from pathlib import Path

import kernel_abi_check
import pytest
import torch
from kernels import get_local_kernel

import nsa

HUB = Path(os.environ["NSA_HUB"])


@pytest.fixture(scope="module")
def kernel():
    return get_local_kernel(HUB, backend="cpu")


def test_it_is_another_package_with_operators_and_libraries_of_its_own(kernel):
    assert Path(kernel.__file__).is_relative_to(HUB) and not Path(nsa.__file__).is_relative_to(HUB)
    assert kernel.NSAConfig is not nsa.NSAConfig and kernel.__version__ == nsa.__version__
    operators = torch._C._dispatch_get_all_op_names()
    namespaces = {name.partition("::")[0] for name in operators if name.endswith("::select_blocks")}
    assert len(namespaces) == 2 and "nsa" in namespaces
    libraries = {line.split()[-1] for line in open("/proc/self/maps") if "_C.so" in line or "native_sparse" in line}
    assert any(str(HUB) in name and name.endswith(".so.0") for name in libraries)


def results(package):
    torch.manual_seed(0)
    cfg = package.NSAConfig(8, 4, 16, 2, 0, 1, 32)
    layer = package.NativeSparseAttention(64, num_heads=4, num_kv_heads=2, head_dim=16, cfg=cfg)
    x = torch.randn(1, 96, 64, requires_grad=True)
    y = layer(x)
    y.square().sum().backward()
    cache = layer.make_cache(batch_size=1, max_length=128)
    with torch.no_grad():
        steps = [layer(part, cache=cache) for part in (x[:, :80], x[:, 80:81], x[:, 81:])]
    return [y.detach(), x.grad, *steps, *(p.grad for p in layer.parameters())]


def test_the_same_results(kernel):
    for ours, theirs in zip(results(nsa), results(kernel), strict=True):
        assert torch.equal(ours, theirs)


def test_compiled_and_refusals(kernel):
    q, k = torch.randn(1, 64, 2, 16), torch.randn(1, 64, 1, 16)

    def attention(package):
        return package.sliding_window_attention(q, k, k, 8)[0]

    run = torch.compile(lambda: attention(kernel), backend="aot_eager", fullgraph=True)
    assert torch.equal(run(), attention(nsa))
    with pytest.raises(ValueError, match="window_size"):
        kernel.sliding_window_attention(q, k, k, 0)


def test_alone(tmp_path):
    """Without the package: nothing in the layout imports it."""
    program = (
        f"import sys; sys.modules['nsa'] = None\nfrom pathlib import Path\nfrom kernels import get_local_kernel\n"
        f"print(get_local_kernel(Path({str(HUB)!r}), backend='cpu').describe_backends())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "runs as" in done.stdout, done.stderr


def test_kernel_abi_check():
    files = [kernel_abi_check.ObjectFile(file) for file in HUB.glob("build/*/*.so*")]
    assert len(files) == 2
    for file in files:
        assert file.check_manylinux("manylinux_2_34") == [] and file.check_python_abi("3.9") == []
        assert file.check_manylinux("manylinux_2_5"), "it sees symbols"
