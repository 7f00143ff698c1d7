// The elementwise steps of a block on a GPU, in one pass each instead of torch's several. There are kernels in builds
// with CUDA, for bfloat16 activations of widths that are multiples of 8; for anything else the caller uses torch's
// operations.
#pragma once

#include <ATen/core/Tensor.h>

namespace nsa::lm {

bool rotation_is_fused(const at::Tensor& x);
/// x (rows, heads, D) turned by direction * the angles of cos, sin (rows, D / 2).
at::Tensor fused_rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, float direction);

bool swiglu_is_fused(const at::Tensor& x);
/// silu(gate) * up of x = (gate, up), (rows, 2 * width) -> (rows, width).
at::Tensor fused_swiglu(const at::Tensor& x);
/// The gradient of x.
at::Tensor fused_swiglu_backward(const at::Tensor& d_y, const at::Tensor& x);

bool norm_is_fused(const at::Tensor& x, at::ScalarType dtype);
/// y = x * scale * weight (rows, width), x in float32, y in bfloat16; scale (rows) = 1 / sqrt(mean x^2 + eps).
struct Normed {
  at::Tensor y, scale;
};
Normed fused_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
/// The gradients of x and weight.
struct NormGradients {
  at::Tensor d_x, d_weight;
};
NormGradients fused_norm_backward(const at::Tensor& d_y, const at::Tensor& x, const at::Tensor& weight,
                                  const at::Tensor& scale);

}  // namespace nsa::lm
