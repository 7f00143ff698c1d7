// Choosing the next token from its logits.
#pragma once

#include <cstdint>
#include <span>

#include "base/random.h"

namespace nsa::lm {

struct SamplerConfig {
  double temperature = 0.8;  // 0: the most likely token
  int top_k = 0;             // of the k most likely; 0: all
  double top_p = 1.0;        // of the fewest most likely ones that together reach p
  std::uint64_t seed = 0;

  /// Throws Error naming the option.
  void validate() const;
};

class Sampler {
 public:
  explicit Sampler(const SamplerConfig& config) : config_(config), random_(config.seed) {}

  std::int64_t sample(std::span<const float> logits);

 private:
  SamplerConfig config_;
  base::Random random_;
};

/// The token of highest logit, the lower one of equals.
std::int64_t most_likely(std::span<const float> logits);
/// Highest logit minus the second.
double margin(std::span<const float> logits);

}  // namespace nsa::lm
