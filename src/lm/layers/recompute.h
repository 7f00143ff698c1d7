// Activation checkpointing: a layer that keeps its inputs alone and runs again in the backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace nsa::lm {

/// Integer outputs have no gradient. The parameters it reads are leaves.
using Layer = std::function<std::vector<at::Tensor>(at::TensorList)>;

/// layer(inputs). Nothing that it computes on the way stays: the backward calls it again, so it must compute the same
/// then, and what it refers to must live as long. Gradients reach the inputs and the parameters.
std::vector<at::Tensor> recomputed(Layer layer, at::TensorList inputs);

}  // namespace nsa::lm
