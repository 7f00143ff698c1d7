#include "lm/generate/sampler.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "base/error.h"

namespace nsa::lm {

void SamplerConfig::validate() const {
  if (!(temperature >= 0 && std::isfinite(temperature))) {
    throw base::Error(fmt::format("temperature = {}: must be >= 0", temperature));
  }
  if (top_k < 0) throw base::Error(fmt::format("top_k = {}: must be >= 0", top_k));
  if (!(top_p > 0 && top_p <= 1)) throw base::Error(fmt::format("top_p = {}: must be in (0, 1]", top_p));
}

std::int64_t most_likely(std::span<const float> logits) {
  return std::max_element(logits.begin(), logits.end()) - logits.begin();
}

double margin(std::span<const float> logits) {
  const auto best = most_likely(logits);
  double second = -INFINITY;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (static_cast<std::int64_t>(i) != best) second = std::max(second, static_cast<double>(logits[i]));
  }
  return static_cast<double>(logits[static_cast<std::size_t>(best)]) - second;
}

std::int64_t Sampler::sample(std::span<const float> logits) {
  if (config_.temperature == 0) return most_likely(logits);
  std::vector<std::size_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return logits[a] > logits[b]; });
  if (config_.top_k > 0) order.resize(std::min(order.size(), static_cast<std::size_t>(config_.top_k)));

  std::vector<double> weights;
  double total = 0;
  for (const std::size_t token : order) {
    weights.push_back(
        std::exp((static_cast<double>(logits[token]) - static_cast<double>(logits[order[0]])) / config_.temperature));
    total += weights.back();
  }
  double kept = 0;
  std::size_t count = 0;
  while (count < weights.size() && kept < config_.top_p * total) kept += weights[count++];

  double left = random_.uniform() * kept;
  std::size_t i = 0;
  while (i + 1 < count && left >= weights[i]) left -= weights[i++];
  return static_cast<std::int64_t>(order[i]);
}

}  // namespace nsa::lm
