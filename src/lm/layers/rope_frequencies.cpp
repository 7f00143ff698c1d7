#include "lm/layers/rope_frequencies.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"

namespace nsa::lm {
namespace {

double scaled(const RopeScaling& scaling, double frequency) {
  if (scaling.type == RopeType::kDefault) return frequency;
  if (scaling.type == RopeType::kLinear) return frequency / scaling.factor;
  const double rotations = scaling.original_context * frequency / (2 * std::numbers::pi);
  const double high = std::clamp(
      (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0);
  return frequency * (high + (1 - high) / scaling.factor);
}

}  // namespace

const char* name_of(RopeType type) {
  switch (type) {
    case RopeType::kDefault:
      return "default";
    case RopeType::kLinear:
      return "linear";
    case RopeType::kLlama3:
      return "llama3";
  }
  return "unknown";
}

RopeType rope_type(const std::string& name) {
  for (const auto type : {RopeType::kDefault, RopeType::kLinear, RopeType::kLlama3}) {
    if (name == name_of(type)) return type;
  }
  throw base::Error(fmt::format("rope_type = '{}': must be default, linear or llama3", name));
}

std::vector<double> rope_frequencies(std::int64_t head_dim, double theta, const RopeScaling& scaling) {
  std::vector<double> frequencies(static_cast<std::size_t>(head_dim / 2), 0);
  const auto turning = static_cast<std::int64_t>(scaling.partial_rotary_factor * static_cast<double>(head_dim) / 2);
  for (std::int64_t j = 0; j < turning; ++j) {
    const double exponent = -2.0 * static_cast<double>(j) / static_cast<double>(head_dim);
    frequencies[static_cast<std::size_t>(j)] = scaled(scaling, std::pow(theta, exponent));
  }
  return frequencies;
}

}  // namespace nsa::lm
