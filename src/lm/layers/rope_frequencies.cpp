#include "lm/layers/rope_frequencies.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"

namespace nsa::lm {
namespace {

/// Of pair `j`: 0 where it is slow and its frequency is over the factor, 1 where it is fast and as it is.
double yarn_ramp(const RopeScaling& scaling, double head_dim, double theta, double j) {
  const auto pair_of = [&](double rotations) {
    return head_dim * std::log(scaling.original_context / (rotations * 2 * std::numbers::pi)) / (2 * std::log(theta));
  };
  double low = pair_of(scaling.beta_fast), high = pair_of(scaling.beta_slow);
  if (scaling.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0), high = std::min(high, head_dim - 1);
  if (low == high) high += 0.001;
  return 1 - std::clamp((j - low) / (high - low), 0.0, 1.0);
}

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
    case RopeType::kYarn:
      return "yarn";
  }
  return "unknown";
}

RopeType rope_type(const std::string& name) {
  for (const auto type : {RopeType::kDefault, RopeType::kLinear, RopeType::kLlama3, RopeType::kYarn}) {
    if (name == name_of(type)) return type;
  }
  throw base::Error(fmt::format("rope_type = '{}': must be default, linear, llama3 or yarn", name));
}

std::vector<double> rope_frequencies(std::int64_t head_dim, double theta, const RopeScaling& scaling) {
  std::vector<double> frequencies(static_cast<std::size_t>(head_dim / 2), 0);
  const auto turning = static_cast<std::int64_t>(scaling.partial_rotary_factor * static_cast<double>(head_dim) / 2);
  for (std::int64_t j = 0; j < turning; ++j) {
    const double exponent = -2.0 * static_cast<double>(j) / static_cast<double>(head_dim);
    const double frequency = std::pow(theta, exponent);
    double& result = frequencies[static_cast<std::size_t>(j)];
    if (scaling.type == RopeType::kYarn) {
      const double high = yarn_ramp(scaling, static_cast<double>(head_dim), theta, static_cast<double>(j));
      result = frequency * (high + (1 - high) / scaling.factor);
    } else {
      result = scaled(scaling, frequency);
    }
  }
  return frequencies;
}

}  // namespace nsa::lm
