// The products of a block with the elementwise steps in front of them. Without gradients, with a few rows of bfloat16
// on a GPU, as a decode step has them, each is one kernel of our own (docs/findings/decoding/generate_step.md).
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lm/layers/norm.h"
#include "lm/layers/rope.h"

namespace nsa::lm {

/// A matrix (columns, depth) of a product.
struct Factor {
  at::Tensor matrix;
  bool settled = false;  // no kernel in the stream may be writing it yet: it may be read ahead
};

/// x (rows, depth) -> (rows, columns).
at::Tensor product(const at::Tensor& x, const Factor& factor);

/// `in` with its sum made, and the product of its norm.
struct NormedProduct {
  at::Tensor x, y;
};
NormedProduct norm_and_product(const Residual& in, const at::Tensor& weight, double eps, const Factor& factor);

/// swiglu(x), and its product.
at::Tensor swiglu_and_product(const at::Tensor& x, const Factor& factor);

/// split_heads(x, groups, rotation), of whose last group, one head, come gates: sigmoid(biased_silu(last, bias)
/// matrix^T + gate_bias), (rows, columns).
struct HeadsAndGates {
  std::vector<at::Tensor> heads;
  at::Tensor gates;
};
HeadsAndGates split_heads_and_gates(const at::Tensor& x, const std::vector<HeadGroup>& groups, const Rotation& rotation,
                                    const at::Tensor& bias, const Factor& factor, const at::Tensor& gate_bias);

}  // namespace nsa::lm
