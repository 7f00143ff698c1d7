"""The operations against nsa.reference, masked softmax in plain torch: outputs, lse, gradients, batched and packed."""

import pytest
import torch

import nsa
from problem import OPERATIONS, SMALL, Problem, assert_within_bound, cast, gradients, selection_errors

DTYPES = {
    "reference": (torch.float64, torch.float32),
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}
PROBLEMS = {
    "batched": Problem([(70, 70)] * 2),
    # Many of the small ones, so that the largest error is not a matter of luck.
    "one token": Problem([(1, 1)] * 40),
    "kernel_size - 1": Problem([(7, 7)] * 20),
    "kernel_size": Problem([(8, 8)] * 20),
    "kernel_size + 1": Problem([(9, 9)] * 20),
    "continued": Problem([(5, 83)] * 2),
    "packed": Problem([(70, 70), (0, 0), (33, 33), (1, 1), (8, 8)], packed=True),
    "packed and continued": Problem([(3, 41), (0, 9), (16, 16), (0, 0), (30, 77)], packed=True),
    "packed with a tail": Problem([(9, 20), (40, 40)], packed=True, tail=7),
    "no tokens": Problem([(0, 0)] * 2),
    "nothing packed": Problem([(0, 0)], packed=True),
    "one head": Problem([(50, 50)], heads=(1, 1)),
    "three heads a group": Problem([(50, 50)], heads=(6, 2), dims=(32, 16)),
    "seven heads a group": Problem([(40, 61)], heads=(7, 1)),
    "wide": Problem([(150, 150)], nsa.NSAConfig(32, 16, 64, 4, 1, 1, 33), heads=(16, 1), dims=(64, 64)),
    "uneven dims": Problem([(60, 60)], dims=(192, 128)),
    "kernel over block": Problem([(90, 90)], nsa.NSAConfig(48, 16, 16, 5, 2, 1, 1)),
    "stride 1": Problem([(30, 40)], nsa.NSAConfig(3, 1, 16, 2, 0, 1, 64)),
}


def check(backend, operation, problem, luck=1.0):
    """Output, lse, indices and gradients; for float64 the plain computation is the truth itself."""
    floor = 3e-5 if backend == "cuda" else 0.0  # one visible key: dP - delta is rounding noise there
    for dtype in DTYPES[backend]:
        inputs = problem.inputs(operation, dtype)
        truths, plains = cast(inputs, torch.float64), cast(inputs, dtype)
        actual = problem.by_library(operation, inputs, problem.random_indices())
        if operation == "nsa_attention":
            check_indices(problem, inputs["q"], inputs["k_c"], actual.indices)
        if operation == "native_sparse_attention":
            check_indices(problem, problem.rotated("q", inputs), problem.compressed(inputs)[0], actual.indices)
        truth = problem.by_masks(operation, truths, actual.indices)
        plain = problem.by_masks(operation, plains, actual.indices)
        assert actual.out.dtype == dtype
        assert_within_bound("out", actual.out, plain.out, truth.out, luck=luck)
        if actual.lse is not None:
            assert actual.lse.dtype == torch.float32 and not actual.lse.requires_grad
            torch.testing.assert_close(actual.lse.double(), truth.lse, rtol=1e-5, atol=1e-5)
        d_out = problem.random(*actual.out.shape).to(dtype)
        found = gradients(actual.out, inputs, d_out)
        plain_gradients, true_gradients = gradients(plain.out, plains, d_out), gradients(truth.out, truths, d_out)
        for name in inputs:
            assert found[name].dtype == dtype
            three = found[name], plain_gradients[name], true_gradients[name]
            assert_within_bound(f"d_{name}", *three, luck, floor)


def check_indices(problem, q, k_c, indices):
    for i, (_, sk) in enumerate(problem.lengths):
        rows, keys = (problem.part(name, t, i).detach().double() for name, t in (("q", q), ("k_c", k_c)))
        errors = selection_errors(problem.part("q", indices, i), rows, keys, problem.cfg, sk)
        assert not errors, errors[:3]
    assert (indices[sum(problem.q_lens) :] == -1).all()


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation(backend, operation, name):
    # In 16 bits compressed keys are rounded on the way: one element of d_q alone can be the largest error of all.
    check(backend, operation, PROBLEMS[name], luck=1.5 if operation == "native_sparse_attention" else 1.0)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("phi", ["mean", "linear", "mlp"])
@pytest.mark.parametrize("packed", [False, True])
def test_compress(backend, phi, shared, packed):
    lengths = [(40, 40), (3, 3), (25, 25)] if packed else [(40, 40)] * 2
    check(backend, "compress", Problem(lengths, packed=packed, phi=phi, shared_phi=shared))


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_selection_with_noise(backend, noise):
    problem = Problem([(150, 150), (60, 100)], packed=True, tail=3)
    inputs = problem.inputs("compressed_attention", torch.float32)
    _, lse = nsa.compressed_attention(*inputs.values(), SMALL, **problem.packing(inputs["q"]))
    q, k_c = inputs["q"], inputs["k_c"]
    seed = 2**63 + 12345
    indices = nsa.select_blocks(q, k_c, lse, SMALL, noise=noise, seed=seed, **problem.packing(inputs["q"]))
    exact = (t.detach().double() for t in (q, k_c, lse))
    options = {"noise": noise, "seed": seed, **problem.packing(q)}
    expected = nsa.reference.select_blocks(*exact, SMALL, **options)
    assert (indices == expected).all(-1).double().mean() >= 0.99
    if noise:
        assert not torch.equal(indices, nsa.select_blocks(q, k_c, lse, SMALL, **problem.packing(inputs["q"])))
