// The sampling of a decode step on the CPU, against torch's operators.
#include <ATen/TensorOperators.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <tuple>

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

}  // namespace
}  // namespace nsa::lm
