// Linear layers of the language model on the CPU, against float64.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include "lm/layers/linear.h"

namespace nsa::lm {
namespace {

void expect_products(const at::Tensor& y, const at::Tensor& x, const at::Tensor& matrix) {
  ASSERT_EQ(y.sizes(), at::IntArrayRef({x.size(0), matrix.size(0)}));
  const auto wide_x = x.to(at::kDouble), wide = matrix.to(at::kDouble).t();
  const auto bound = wide_x.matmul(wide).abs() * 0x1p-8 + wide_x.abs().matmul(wide.abs()) * 0x1p-16;
  EXPECT_TRUE((y.to(at::kDouble) - wide_x.matmul(wide)).abs().le(bound).all().item<bool>()) << x.sizes();
}

TEST(Linear, PackedMatricesGiveTheProducts) {
  const at::NoGradGuard no_grad;
  at::manual_seed(1);
  for (const std::int64_t columns : {1, 48, 257, 1536}) {
    const auto matrix = at::randn({columns, 1024}, at::kBFloat16), layout = packed(matrix);
    for (const std::int64_t rows : {0, 1, 2, 9, 300}) {
      const auto x = at::randn({rows, 1024}, at::kBFloat16);
      expect_products(linear(x, LinearWeight{layout}), x, matrix);
    }
    const auto norm = at::rand({1024}), x = at::randn({3, 1024});
    const auto out = norm_and_linear({x, {}}, norm, 1e-6, LinearWeight{layout});
    EXPECT_TRUE(out.y.equal(linear(rms_norm(x, norm, 1e-6, at::kBFloat16), LinearWeight{layout})));
  }
}

TEST(Linear, PackingIsForBfloat16WithAvx512) {
  const auto matrix = at::randn({64, 64});
  EXPECT_TRUE(packed(matrix).is_same(matrix));
#ifdef __x86_64__
  const bool expected =
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  EXPECT_EQ(packed(matrix.to(at::kBFloat16)).is_mkldnn(), expected);
#endif
}

TEST(Norm, OfASumHasTheBitsOfAddingFirst) {
  const at::NoGradGuard no_grad;
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const std::int64_t rows : {0, 1, 300}) {
      const auto x = at::randn({rows, 1000}), added = at::randn({rows, 1000}).to(dtype), weight = at::rand({1000});
      const auto out = add_and_norm({x, added}, weight, 1e-6, dtype);
      EXPECT_TRUE(out.x.equal(x + added));
      EXPECT_TRUE(out.y.equal(rms_norm(x + added, weight, 1e-6, dtype)));
    }
  }
}

TEST(SplitHeads, GivesTheSameBitsWithoutGradients) {
  const std::vector<HeadGroup> groups = {{4, 64, true}, {2, 64, false}, {2, 64, true}, {1, 24, false}};
  const auto x = at::randn({5, 536}, at::kBFloat16);
  const Rotation rotation{at::rand({5, 32}), at::rand({5, 32})};
  const auto expected = split_heads(x, groups, rotation);
  const at::NoGradGuard no_grad;
  const auto heads = split_heads(x, groups, rotation);
  for (std::size_t i = 0; i < groups.size(); ++i) EXPECT_TRUE(heads[i].equal(expected[i])) << i;
}

}  // namespace
}  // namespace nsa::lm
