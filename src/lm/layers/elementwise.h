// The elementwise steps of a block on a GPU, in one pass each instead of torch's several. There are kernels in builds
// with CUDA, for bfloat16 activations of widths that are multiples of 8; for anything else the caller uses torch's
// operations. A step of training at 32768 tokens took 10 ms of 219 more by torch's: docs/findings/training/speed.md.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace nsa::lm {

/// `from` (rows, heads, D) is written to `to`, rotated by direction * the angles: +1, -1 or, for a copy, 0.
struct RotaryCopy {
  at::Tensor from, to;
  float direction;
};
bool is_fused(const RotaryCopy& copy);
/// Up to eight in one pass; the angles are those of cos, sin (rows, D / 2).
void fused_rotary_copy(const std::vector<RotaryCopy>& copies, const at::Tensor& cos, const at::Tensor& sin);
namespace fused {
struct RotaryCopyArgs;
}
/// The same for a kernel that fuses it with its own work.
fused::RotaryCopyArgs rotary_copy_args(const std::vector<RotaryCopy>& copies, const at::Tensor& cos,
                                       const at::Tensor& sin);

// Activations of the feed-forward network and the gates, differentiable; one kernel each on CUDA.

/// silu(gate) * up of x = (gate, up), (rows, 2 * n) -> (rows, n).
at::Tensor swiglu(const at::Tensor& x);

/// silu(x + bias), x (rows, n), bias (n).
at::Tensor biased_silu(const at::Tensor& x, const at::Tensor& bias);

bool swiglu_is_fused(const at::Tensor& x);
/// silu(gate) * up of x = (gate, up), (rows, 2 * width) -> (rows, width).
at::Tensor fused_swiglu(const at::Tensor& x);
/// The gradient of x.
at::Tensor fused_swiglu_backward(const at::Tensor& d_y, const at::Tensor& x);

bool biased_silu_is_fused(const at::Tensor& x, const at::Tensor& bias);
/// silu(x + bias), (rows, width).
at::Tensor fused_biased_silu(const at::Tensor& x, const at::Tensor& bias);
/// The gradients of x and bias.
std::pair<at::Tensor, at::Tensor> fused_biased_silu_backward(const at::Tensor& d_y, const at::Tensor& x,
                                                             const at::Tensor& bias);

bool norm_is_fused(const at::Tensor& x, at::ScalarType dtype);
/// sum = x + added (rows, width) in float32, x itself where `added` is undefined; y = sum * scale * weight in bfloat16,
/// as `added` is; scale (rows) = 1 / sqrt(mean sum^2 + eps).
struct FusedNorm {
  at::Tensor sum, y, scale;
};
FusedNorm fused_norm(const at::Tensor& x, const at::Tensor& added, const at::Tensor& weight, double eps);
/// The gradients of x, of `added` (the same numbers in bfloat16; undefined unless asked for) and of weight.
struct FusedNormGradients {
  at::Tensor d_x, d_added, d_weight;
};
/// `d_sum` is what reached the sum by other ways than y; undefined: nothing.
FusedNormGradients fused_norm_backward(const at::Tensor& d_y, const at::Tensor& d_sum, const at::Tensor& sum,
                                       const at::Tensor& weight, const at::Tensor& scale, bool wants_d_added);

}  // namespace nsa::lm
