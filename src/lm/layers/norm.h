// RMSNorm in one pass over memory each way, and the residual stream that it reads. torch's takes three to six times as
// long on a CPU: docs/findings/training/speed.md.
#pragma once

#include <ATen/core/Tensor.h>

namespace nsa::lm {

/// x / sqrt(mean(x^2) + eps) * weight, per row of the float32 x (rows, hidden), in float32 and then cast to `dtype`
/// (float32 or bfloat16). Differentiable; the same bits with any number of threads.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, at::ScalarType dtype);

/// The residual stream between two norms: x, float32 (rows, hidden), and what the layer behind x adds to it, in the
/// compute dtype; undefined at the start. The norm that comes next adds it while it reads both.
struct Residual {
  at::Tensor x, added;
};

/// x with `added` in it, and rms_norm of that.
struct Normed {
  at::Tensor x, y;
};
Normed add_and_norm(const Residual& in, const at::Tensor& weight, double eps, at::ScalarType dtype);

}  // namespace nsa::lm
