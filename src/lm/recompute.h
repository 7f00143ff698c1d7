// Activation checkpointing: a layer that keeps its input alone and runs again in the backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace nsa::lm {

/// Of one tensor; integer outputs have no gradient. The parameters it reads are leaves.
using Layer = std::function<std::vector<at::Tensor>(const at::Tensor&)>;

/// layer(x). Nothing that it computes on the way stays: the backward calls it again, so it must compute the same then,
/// and what it refers to must live as long. Gradients reach x and the parameters.
std::vector<at::Tensor> recomputed(Layer layer, const at::Tensor& x);

}  // namespace nsa::lm
