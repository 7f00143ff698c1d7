// Parameters and floating-point operations of a model, without making it.
#pragma once

#include <cstdint>

#include "lm/model/config.h"

namespace nsa::lm {

/// Parameters by what they are for.
struct ParameterCounts {
  std::int64_t phi = 0, gates = 0, extra_kv = 0, rest = 0;
  std::int64_t total() const { return phi + gates + extra_kv + rest; }
};

ParameterCounts parameter_counts(const ModelConfig& config);
/// The ffn_size with which `config` has as many parameters as `target`, within one column.
int ffn_size_of_equal_parameters(const ModelConfig& config, const ModelConfig& target);

/// Floating-point operations that a training step cannot do without: model FLOPs, as the field counts them.
struct ModelFlops {
  double rest = 0;  // of all but phi
  double phi = 0;   // N_c times for keys and for values, not once per token
};

/// Forward and backward of one sequence. Every matmul counts 2 * m * n * k, three times: once forward, and for the
/// gradients of its two factors. Attention counts the pairs of query and key that are visible (of the selected branch
/// topk blocks). Lookups, norms, softmax, block selection, and what an implementation computes
/// again in the backward, do not count.
ModelFlops training_flops(const ModelConfig& config, std::int64_t length);

}  // namespace nsa::lm
