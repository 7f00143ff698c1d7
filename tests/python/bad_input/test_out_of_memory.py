"""Memory that runs out at any allocation of any operator: an error that says so, and the next call has the same bits.

A process of its own runs this file with fail_allocation.cpp preloaded. By default some allocations of each operator
fail; NSA_ADVERSARIAL=1 tries every one.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # of the process of its own

from test_operators import arguments, ops  # noqa: E402

SOME = 8  # allocations of each operator


@pytest.mark.slow
@pytest.mark.bits
@pytest.mark.skipif(not sys.platform.startswith("linux") or not shutil.which("g++"), reason="needs Linux and g++")
def test_every_operator(tmp_path):
    library = tmp_path / "fail_allocation.so"
    source = HERE / "fail_allocation.cpp"
    subprocess.run(["g++", "-std=c++20", "-O2", "-fPIC", "-shared", source, "-o", library, "-ldl"], check=True)
    environment = os.environ | {"LD_PRELOAD": str(library), "NSA_BACKEND": "cpu", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, str(library)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    operators, failures = map(int, done.stdout.split())
    assert operators == len([*arguments()]) and failures > 150
    print(f"{failures} allocations of {operators} calls")


def main(library):
    hook = ctypes.CDLL(library)

    def copied(arguments):
        return [t.detach().clone() if isinstance(t, torch.Tensor) else t for t in arguments]

    def tensors(values):
        values = values if isinstance(values, (tuple, list)) else (values,)
        return [t for t in values if isinstance(t, torch.Tensor)]

    def same(result, given, expected):
        found = tensors(result) + tensors(given)
        return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, expected, strict=True))

    torch.manual_seed(0)
    torch.set_num_threads(2)
    operators = failures = 0
    for name, given in arguments():
        operator, operators = getattr(ops, name).default, operators + 1
        first = copied(given)
        expected = tensors(operator(*first)) + tensors(first)
        again = copied(given)
        hook.fail_allocation(0)
        operator(*again)
        total = hook.count_allocations()
        every = os.environ.get("NSA_ADVERSARIAL") == "1" or total <= SOME
        for k in range(1, total + 1) if every else sorted({1 + i * (total - 1) // (SOME - 1) for i in range(SOME)}):
            now = copied(given)
            hook.fail_allocation(k)
            try:
                operator(*now)
            except (MemoryError, RuntimeError) as error:
                hook.count_allocations()
                text = str(error)
                assert any(words in text for words in ("memory", "bad_alloc")), (name, k, text)
                failures += 1
            else:
                # An allocation that the call can do without (std::stable_sort's), or of a thread that had one fewer.
                hook.count_allocations()
                assert same([], now, expected[-len(tensors(now)) :]), (name, k)
                now = copied(given)  # a step has changed its cache
            assert same(operator(*now), now, expected), (name, k, "the next call differs")
    print(operators, failures)


if __name__ == "__main__":
    main(sys.argv[1])
