// RMSNorm in one pass over memory each way.
#pragma once

#include <ATen/core/Tensor.h>

namespace nsa::lm {

/// x / sqrt(mean(x^2) + eps) * weight, per row of the float32 x (rows, hidden), in float32 and then cast to `dtype`
/// (float32 or bfloat16). Differentiable; the same bits with any number of threads.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, at::ScalarType dtype);

}  // namespace nsa::lm
