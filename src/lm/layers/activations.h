// Activations of the feed-forward network and the gates, differentiable; one kernel each on CUDA.
#pragma once

#include <ATen/core/Tensor.h>

namespace nsa::lm {

/// silu(gate) * up of x = (gate, up), (rows, 2 * n) -> (rows, n).
at::Tensor swiglu(const at::Tensor& x);

/// silu(x + bias), x (rows, n), bias (n).
at::Tensor biased_silu(const at::Tensor& x, const at::Tensor& bias);

}  // namespace nsa::lm
