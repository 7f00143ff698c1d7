// Frequencies of rotary position embedding.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace nsa::lm {

enum class RopeType {
  kDefault,
  kLinear,  // all frequencies over the factor
  kLlama3,  // the low ones over the factor, the high ones as they are
  kYarn,    // the same with another ramp between them, and cosines and sines times attention_factor (2309.00071)
};

const char* name_of(RopeType type);
/// Throws Error naming what is allowed.
RopeType rope_type(const std::string& name);

/// How the frequencies differ from rope_theta's, by the names of transformers.
struct RopeScaling {
  RopeType type = RopeType::kDefault;
  double factor = 1;
  double low_freq_factor = 1, high_freq_factor = 4;  // llama3: rotations over the original context
  int original_context = 8192;                       // llama3, yarn: tokens
  double beta_fast = 32, beta_slow = 1;              // yarn: rotations over the original context
  bool truncate = true;                              // yarn: the ramp begins and ends at whole pairs
  double attention_factor = 1;                       // yarn
  double partial_rotary_factor = 1;                  // partial RoPE: fraction rotated, the fastest pairs (2410.06205)
  bool operator==(const RopeScaling&) const = default;
};

/// Of the head_dim / 2 pairs, radians per token: theta^(-2j / head_dim), scaled; 0 for pairs that are not rotated.
std::vector<double> rope_frequencies(std::int64_t head_dim, double theta, const RopeScaling& scaling);

}  // namespace nsa::lm
