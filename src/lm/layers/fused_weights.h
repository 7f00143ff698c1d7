// Fused weights: the parameters in the dtype of the linear layers, concatenated where layers share an input.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace nsa::lm {

/// Copies in `dtype`, the tensors of a group one below the other; an undefined tensor, alone in its group, stays
/// undefined. Differentiable. On a GPU one kernel copies all, and one the gradients.
std::vector<at::Tensor> concat_cast(const std::vector<std::vector<at::Tensor>>& groups, at::ScalarType dtype);

}  // namespace nsa::lm
