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
  // A heap, because a draw seldom gets far into a large vocabulary: sorting all of it would take most of the time.
  std::vector<std::size_t> left(logits.size()), order;
  std::iota(left.begin(), left.end(), 0);
  const auto comes_later = [&](std::size_t a, std::size_t b) {
    return logits[a] < logits[b] || (logits[a] == logits[b] && a > b);
  };
  std::make_heap(left.begin(), left.end(), comes_later);
  const auto weight = [&, highest = static_cast<double>(logits[left[0]])](std::size_t token) {
    return std::exp((static_cast<double>(logits[token]) - highest) / config_.temperature);
  };
  // The token with the i-th highest logit.
  const auto token_at = [&](std::size_t i) {
    while (order.size() <= i) {
      std::pop_heap(left.begin(), left.end(), comes_later);
      order.push_back(left.back());
      left.pop_back();
    }
    return order[i];
  };

  const bool all = config_.top_k == 0 || static_cast<std::size_t>(config_.top_k) >= logits.size();
  const std::size_t candidates = all ? logits.size() : static_cast<std::size_t>(config_.top_k);
  double total = 0;
  for (std::size_t i = 0; i < candidates; ++i) total += weight(all ? i : token_at(i));
  double kept = config_.top_p < 1 ? 0 : total;
  std::size_t count = config_.top_p < 1 ? 0 : candidates;
  while (count < candidates && kept < config_.top_p * total) kept += weight(token_at(count++));

  double drawn = random_.uniform() * kept;
  std::size_t i = 0;
  for (; i + 1 < count; ++i) {
    const double share = weight(token_at(i));
    if (drawn < share) break;
    drawn -= share;
  }
  return static_cast<std::int64_t>(token_at(i));
}

}  // namespace nsa::lm
