// The weights of the compression function, and their start: exactly the mean of the block.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "nsa/operations.h"

namespace nsa::bridge {

/// Weights of the compression function; undefined tensors are absent.
struct CompressionTensors {
  CompressionKind kind = CompressionKind::kMlp;
  at::Tensor pe, w1, b1, w2, b2;

  /// In the dtype, and on the device if `options` has one.
  CompressionTensors to(const at::TensorOptions& options) const;
  CompressionWeights views() const;
};

/// M (sets, tokens * dim, dim), which averages over the tokens.
at::Tensor mean_weight(std::int64_t sets, std::int64_t tokens, std::int64_t dim);

/// Whether an MLP of E = hidden units can start as the mean of blocks of dim channels.
constexpr bool starts_as_mean(std::int64_t hidden, std::int64_t dim) { return hidden >= 2 * dim; }

/// Rewrites standard normal w1 (P, l*D, E) and w2 (P, E, D), without autograd. From E = 2D on: W1 = [M, -M, R] and
/// W2 = [I; -I; 0], which is the mean because SiLU(z) - SiLU(-z) = z; R ~ N(0, 1/(l*D)) is scaled from what is there.
/// For a smaller E: both scaled to Xavier's deviation.
void initialise_mlp(const at::Tensor& w1, const at::Tensor& w2, std::int64_t tokens);

}  // namespace nsa::bridge
