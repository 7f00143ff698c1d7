// The sampling of a decode step on the CPU, against torch's operators and sorted tokens.
#include <ATen/TensorOperators.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>
#include <vector>

#include "base/random.h"
#include "lm/generate/sampler.h"
#include "lm/generate/step_ends.h"

namespace nsa::lm {
namespace {

TEST(MostLikelyTokens, AreThoseOfTorch) {
  at::manual_seed(1);
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const std::int64_t columns : {2, 257, 5000}) {  // in 16 bits the highest of 5000 are often equal
      const auto logits = at::randn({20, columns + 3}).to(dtype).narrow(1, 0, columns),
                 tokens = at::zeros({20}, at::kLong);
      const auto numbers = most_likely_tokens(logits, tokens);
      const auto best = std::get<0>(logits.topk(2, 1)).to(at::kDouble);
      EXPECT_TRUE(tokens.equal(logits.argmax(1)));
      EXPECT_TRUE(numbers[0].equal(tokens.to(at::kDouble)));
      EXPECT_TRUE(numbers[1].equal(best.select(1, 0) - best.select(1, 1)));
      EXPECT_TRUE(numbers[2].eq(1).all().item<bool>());
    }
  }
}

TEST(MostLikelyTokens, SayWhichRowsAreNotFinite) {
  for (const float value : {NAN, INFINITY, -INFINITY}) {
    const auto logits = at::randn({3, 300}), tokens = at::zeros({3}, at::kLong);
    logits[1][299] = value;
    const auto finite = most_likely_tokens(logits, tokens)[2];
    EXPECT_TRUE(finite[0].item<double>() == 1 && finite[1].item<double>() == 0 && finite[2].item<double>() == 1);
  }
}

TEST(MostLikelyTokens, HaveNoSecondInAVocabularyOfOne) {
  const auto tokens = at::zeros({1}, at::kLong);
  EXPECT_EQ(most_likely_tokens(at::zeros({1, 1}), tokens)[1].item<double>(), INFINITY);
}

/// By the definition: all tokens sorted, of equals the lower one first.
std::int64_t drawn_from_sorted(const std::vector<float>& logits, const SamplerConfig& config, double uniform) {
  std::vector<std::size_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) { return logits[a] > logits[b]; });
  if (config.top_k > 0) order.resize(std::min(order.size(), static_cast<std::size_t>(config.top_k)));
  std::vector<double> weights;
  for (const std::size_t token : order) {
    weights.push_back(std::exp((double{logits[token]} - double{logits[order[0]]}) / config.temperature));
  }
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  double kept = 0;
  std::size_t count = 0, i = 0;
  while (count < weights.size() && kept < config.top_p * total) kept += weights[count++];
  for (double left = uniform * kept; i + 1 < count && left >= weights[i]; ++i) left -= weights[i];
  return static_cast<std::int64_t>(order[i]);
}

TEST(Sampler, DrawsFromTheSortedTokens) {
  for (const std::int64_t size : {1, 2, 50, 3000}) {
    const auto drawn = (4 * at::randn({size})).round();  // many are equal
    const std::vector<float> logits(drawn.const_data_ptr<float>(), drawn.const_data_ptr<float>() + size);
    for (const int top_k : {0, 1, 7, 4000}) {
      for (const double top_p : {1e-9, 0.3, 0.95, 1.0}) {
        const SamplerConfig config{.temperature = 1.5, .top_k = top_k, .top_p = top_p, .seed = 5};
        Sampler sampler(config);
        base::Random random(config.seed);
        for (int i = 0; i < 20; ++i) {
          EXPECT_EQ(sampler.sample(logits), drawn_from_sorted(logits, config, random.uniform()))
              << top_k << " " << top_p;
        }
      }
    }
  }
}

}  // namespace
}  // namespace nsa::lm
