// How many parameters a model has, without making it.
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

}  // namespace nsa::lm
