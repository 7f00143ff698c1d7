// Continuing a text.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lm/generate/sampler.h"
#include "lm/model/model.h"

namespace nsa::lm {

struct GenerateOptions {
  std::int64_t max_tokens = 500;
  std::int64_t stop_token = -1;  // generation ends with it; -1: none
  bool cached = true;            // false: the whole forward again for each token
  SamplerConfig sampler;
};

struct Generated {
  std::vector<std::int64_t> tokens;  // without the prompt
  std::vector<double> margins;       // highest logit minus the second, for each token
  double prefill_seconds = 0, decode_seconds = 0;
};

/// `prompt` holds at least one token; `on_token` is called with each new token as soon as it is known and stops the
/// generation by returning false. Throws Failure when logits are not finite.
Generated generate(const Model& model, const std::vector<std::int64_t>& prompt, const GenerateOptions& options,
                   const std::function<bool(std::int64_t)>& on_token);

}  // namespace nsa::lm
