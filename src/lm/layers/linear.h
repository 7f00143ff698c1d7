// Linear layers, each with the elementwise operation in front of it. Without gradients, few rows of bfloat16 on a GPU
// (a decode step) run as one skinny GEMM kernel (docs/findings/decoding/generate_step.md).
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lm/layers/norm.h"
#include "lm/layers/rope.h"

namespace nsa::lm {

/// The weight (columns, depth) of a linear layer.
struct LinearWeight {
  at::Tensor matrix;           // or packed()
  bool weights_ready = false;  // no kernel in the stream still writes it, so it may be prefetched
};

/// Fused weights: the parameters in the dtype of the linear layers, concatenated where layers share an input.
/// Copies in `dtype`, the tensors of a group one below the other; an undefined tensor, alone in its group, stays
/// undefined. Differentiable. On a GPU one kernel copies all, and one the gradients.
std::vector<at::Tensor> concat_cast(const std::vector<std::vector<at::Tensor>>& groups, at::ScalarType dtype);

/// The matrix in oneDNN's blocked layout, for linear layers without gradients: few rows take half of the time. The
/// matrix itself where that layout has no kernels: other types than bfloat16, a GPU, no AVX-512.
at::Tensor packed(const at::Tensor& matrix);

/// x (rows, depth) -> (rows, columns).
at::Tensor linear(const at::Tensor& x, const LinearWeight& weight);

/// The sum of `in`, and the linear layer of its norm.
struct NormedLinear {
  at::Tensor x, y;
};
NormedLinear norm_and_linear(const Residual& in, const at::Tensor& norm_weight, double eps, const LinearWeight& weight);

/// The linear layer of swiglu(x).
at::Tensor swiglu_and_linear(const at::Tensor& x, const LinearWeight& weight);

/// split_heads(x, groups, rotation), of whose last group, one head, come gates: sigmoid(biased_silu(last, bias)
/// matrix^T + gate_bias), (rows, columns).
struct HeadsAndGates {
  std::vector<at::Tensor> heads;
  at::Tensor gates;
};
HeadsAndGates split_heads_and_gates(const at::Tensor& x, const std::vector<HeadGroup>& groups, const Rotation& rotation,
                                    const at::Tensor& bias, const LinearWeight& weight, const at::Tensor& gate_bias);

}  // namespace nsa::lm
