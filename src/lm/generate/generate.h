// Continuing texts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "lm/generate/sampler.h"
#include "lm/model/model.h"

namespace nsa::lm {

struct GenerateOptions {
  std::int64_t max_tokens = 500;  // of each sequence
  std::int64_t stop_token = -1;   // a sequence ends with it; -1: none
  bool cached = true;             // false: a full forward for each token
  std::int64_t chunk = 0;         // most tokens of a prompt at a time; 0: default_chunk()
  bool fp8_cache = false;         // as in DecoderOptions
  bool graph = true;              // false: a step launches each of its kernels, also where a graph can hold them
  SamplerConfig sampler;          // every sequence's own; the first one's seed is `seed`
};

struct Generated {
  std::vector<std::int64_t> tokens;  // without the prompt
  std::vector<double> margins;       // highest logit minus the second, for each token
};

struct Generation {
  std::vector<Generated> sequences;
  double prefill_seconds = 0, decode_seconds = 0;
  bool graph = false;  // whether steps were launched as one
};

/// What is called with each new token of a sequence as soon as it is known; `last`: the sequence has no more. Returning
/// false stops generation.
using OnToken = std::function<bool(std::size_t sequence, std::int64_t token, bool last)>;

/// Tokens of each sequence in the cache.
std::int64_t capacity_of(const std::vector<std::vector<std::int64_t>>& prompts, const GenerateOptions& options);

/// Continues all prompts side by side. Each holds at least one token. Throws Failure when logits are not finite.
Generation generate(const Model& model, const std::vector<std::vector<std::int64_t>>& prompts,
                    const GenerateOptions& options, const OnToken& on_token);

}  // namespace nsa::lm
