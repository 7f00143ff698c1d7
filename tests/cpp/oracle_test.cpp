// The oracle against numbers worked out by hand and published test vectors.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/philox.h"
#include "support/tolerance.h"

namespace nsa::test {
namespace {

TEST(Philox, KnownAnswers) {  // of the Random123 distribution
  using Words = std::array<std::uint32_t, 4>;
  EXPECT_EQ(philox({0, 0, 0, 0}, 0), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, 0xffffffffffffffff),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0x299f31d0a4093822),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, GumbelIsFiniteWithTheRightMean) {
  double sum = 0;
  for (std::int64_t n = 0; n < 20000; ++n) {
    const double g = gumbel(1, n % 50, n / 50, 0, 2);
    ASSERT_TRUE(std::isfinite(g));
    sum += g;
  }
  EXPECT_NEAR(sum / 20000, 0.5772, 0.03);  // Euler's constant; the deviation of the mean is 0.009
}

TEST(Half, EveryNumberSurvives) {
  for (int bits = 0; bits < 0x10000; ++bits) {
    const Float16 h{static_cast<std::uint16_t>(bits)};
    const BFloat16 b{static_cast<std::uint16_t>(bits)};
    if (!std::isnan(to_float(h))) {
      ASSERT_EQ(to_float16(to_float(h)).bits, bits);
    }
    if (!std::isnan(to_float(b))) {
      ASSERT_EQ(to_bfloat16(to_float(b)).bits, bits);
    }
    if (!std::isnan(to_float(h))) {
      ASSERT_EQ(rounded(to_float(h), DType::kFloat16), to_float(h));
    }
  }
}

TEST(Half, RoundsToNearestEven) {
  EXPECT_EQ(rounded(1 + 0x1p-8, DType::kBFloat16), 1);
  EXPECT_EQ(rounded(1 + 0x3p-8, DType::kBFloat16), 1 + 0x1p-6);
  EXPECT_EQ(rounded(1 + 0x1p-8 + 0x1p-40, DType::kBFloat16), 1 + 0x1p-7);  // not rounded twice
  EXPECT_EQ(rounded(1 + 0x1p-11, DType::kFloat16), 1);
  EXPECT_EQ(rounded(0x1p-25, DType::kFloat16), 0);
  EXPECT_EQ(rounded(0x1.8p-24, DType::kFloat16), 0x1p-23);
  EXPECT_EQ(rounded(65519, DType::kFloat16), 65504);
  EXPECT_EQ(rounded(65520, DType::kFloat16), std::numeric_limits<double>::infinity());
  EXPECT_EQ(to_float(to_float16(65519)), 65504);
  EXPECT_TRUE(std::isnan(to_float(to_bfloat16(std::nanf("")))));
}

TEST(Float8, EveryCode) {
  // The definition: sign, four bits of exponent with bias 7, three of mantissa; no infinities, one NaN of each sign.
  for (int code = 0; code < 256; ++code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float x = to_float(Float8E4M3{static_cast<std::uint8_t>(code)});
    EXPECT_EQ(std::signbit(x), code >= 128);
    if ((code & 127) == 127) {
      EXPECT_TRUE(std::isnan(x));
      EXPECT_EQ(to_float8_e4m3(x).bits, code);
      continue;
    }
    const double magnitude = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
    EXPECT_EQ(std::fabs(x), magnitude) << code;
    EXPECT_EQ(to_float8_e4m3(x).bits, code);
    EXPECT_EQ(rounded(x, DType::kFloat8E4M3), x);
  }
}

TEST(Float8, RoundsToNearestEvenAndSaturates) {
  // Between two neighbours the middle goes to the even one, the next float on either side to the nearer one.
  for (int code = 0; code < 126; ++code) {
    const auto number = [&](int c) { return to_float(Float8E4M3{static_cast<std::uint8_t>(c)}); };
    const float middle = (number(code) + number(code + 1)) / 2;
    const int even = code % 2 ? code + 1 : code;
    for (const auto& [x, expected] :
         {std::pair{middle, even}, {std::nextafter(middle, 0.0f), code}, {std::nextafter(middle, 500.0f), code + 1}}) {
      EXPECT_EQ(to_float8_e4m3(x).bits, expected) << x;
      EXPECT_EQ(to_float8_e4m3(-x).bits, 128 + expected) << x;
      EXPECT_EQ(rounded(x, DType::kFloat8E4M3), number(expected)) << x;
    }
  }
  for (const float x : {448.0f, 464.0f, 480.0f, 1e30f, std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(to_float(to_float8_e4m3(x)), 448) << x;
    EXPECT_EQ(to_float(to_float8_e4m3(-x)), -448) << x;
    EXPECT_EQ(rounded(-x, DType::kFloat8E4M3), -448) << x;
  }
  EXPECT_TRUE(std::isnan(rounded(std::nan(""), DType::kFloat8E4M3)));
}

TEST(Oracle, VisibleCompressionBlocks) {
  // Query t sees block i exactly if i*d + l - 1 <= t: with equal keys the lse is the logarithm of their number.
  Problem p({.dtype = DType::kFloat64, .q_lens = {200}, .kv_heads = 1, .group = 1, .dk = 8, .dv = 8});
  fill_value(p.k_c, 0);
  const Tensor o = p.query_rows(1, 8, DType::kFloat64), lse = p.lse_rows(DType::kFloat64);
  CompressedAttentionParams f = p.compressed();
  f.o = o, f.lse = lse;
  ASSERT_TRUE(reference::run(f, Context{}).ok());
  EXPECT_EQ(lse.get({0, 0, 30}), -std::numeric_limits<double>::infinity());
  EXPECT_EQ(o.get({0, 30, 0, 0}), 0);
  EXPECT_EQ(lse.get({0, 0, 31}), 0);
  EXPECT_EQ(lse.get({0, 0, 46}), 0);
  EXPECT_NEAR(lse.get({0, 0, 47}), std::log(2), 1e-12);
  EXPECT_NEAR(lse.get({0, 0, 199}), std::log(11), 1e-12);  // 11 * 16 + 31 = 207 > 199
}

TEST(Oracle, ImportanceWeights) {
  // One compression block has all the probability: the blocks that it overlaps weigh overlap / d, for l = 32, d = 16,
  // l' = 64 by the pattern 1, 2, 2, 2, 1.
  const double expected[12][3] = {{2, 0, 0}, {2, 0, 0}, {2, 0, 0}, {1, 1, 0}, {0, 2, 0}, {0, 2, 0},
                                  {0, 2, 0}, {0, 1, 1}, {0, 0, 2}, {0, 0, 2}, {0, 0, 2}, {0, 0, 1}};
  Case c{
      .dtype = DType::kFloat64, .q_lens = {1}, .k_lens = {12 * 16 + 16}, .kv_heads = 1, .group = 2, .dk = 8, .dv = 8};
  for (std::int64_t i = 0; i < 12; ++i) {
    Problem p(c);
    fill_value(p.k_c, 0);
    fill_value(p.q, 1);
    fill_value(slice(p.k_c, 1, i, i + 1), 1000);
    fill_value(p.lse, 1000 * 8 / std::sqrt(8.0));
    const std::vector<double> importance = reference::importance(p.selection(), sequences_of(c)[0], 0, 0);
    for (std::size_t j = 0; j < 3; ++j)
      EXPECT_NEAR(importance[j], 2 * expected[i][j], 1e-3) << "blocks " << i << ", " << j;  // two heads; lse is float32
  }
}

TEST(Oracle, ForcedBlocks) {
  const NSAConfig cfg{.init_blocks = 1, .local_blocks = 2};
  const auto forced = [&](std::int64_t t) {
    std::vector<std::int64_t> blocks;
    for (std::int64_t j = 0; j <= t / 64; ++j)
      if (reference::is_forced(cfg, j, t)) blocks.push_back(j);
    return blocks;
  };
  using Blocks = std::vector<std::int64_t>;
  EXPECT_EQ(forced(0), (Blocks{0}));
  EXPECT_EQ(forced(64), (Blocks{0, 1}));  // one that is forced twice counts once
  EXPECT_EQ(forced(640), (Blocks{0, 9, 10}));
}

TEST(Oracle, EveryCandidateWhenTheyFit) {
  const Problem p({.dtype = DType::kFloat64, .q_lens = {260}, .kv_heads = 1, .group = 1, .dk = 8, .dv = 8});
  for (std::int64_t t : {0, 63, 64, 259})
    for (std::int64_t n = 0; n < 16; ++n)
      EXPECT_EQ(p.indices.get({0, t, 0, n}), n <= t / 64 ? n : -1) << "place " << n << " of the query at " << t;
}

TEST(Oracle, WindowIncludesTheQuery) {
  Problem p({.dtype = DType::kFloat64,
             .q_lens = {30},
             .kv_heads = 1,
             .group = 1,
             .dk = 8,
             .dv = 8,
             .cfg = {.window_size = 5}});
  fill_value(p.k_swa, 0);
  for (std::int64_t u = 0; u < 30; ++u) fill_value(slice(p.v_swa, 1, u, u + 1), static_cast<double>(u));
  const Tensor o = p.query_rows(1, 8, DType::kFloat64);
  SlidingWindowAttentionParams f = p.window();
  f.o = o;
  ASSERT_TRUE(reference::run(f, Context{}).ok());
  EXPECT_NEAR(o.get({0, 2, 0, 0}), 1, 1e-12);    // mean of 0, 1, 2
  EXPECT_NEAR(o.get({0, 20, 0, 0}), 18, 1e-12);  // mean of 16 ... 20
}

TEST(Oracle, TakesEveryType) {
  // The dtype decides what the inputs can hold and how the output is rounded, nothing else.
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const Problem p({.dtype = dtype, .q_lens = {40}, .cfg = small_config()});
    Problem wide({.dtype = DType::kFloat64, .q_lens = {40}, .cfg = small_config()});
    for (auto [from, to] : {std::pair{&p.q, &wide.q}, {&p.k_swa, &wide.k_swa}, {&p.v_swa, &wide.v_swa}})
      assign(*from, *to);
    const Tensor o = p.query_rows(4, 64, dtype), expected = wide.query_rows(4, 64, DType::kFloat64);
    SlidingWindowAttentionParams f = p.window(), wide_f = wide.window();
    f.o = o, wide_f.o = expected;
    ASSERT_TRUE(reference::run(f, Context{}).ok());
    ASSERT_TRUE(reference::run(wide_f, Context{}).ok());
    const std::vector<double> x = values_of(o), y = values_of(expected);
    for (std::size_t i = 0; i < x.size(); ++i) ASSERT_EQ(x[i], rounded(y[i], dtype)) << name_of(dtype);
  }
}

TEST(Oracle, PlainComputationRounds) {
  // With a precision the oracle is as far from itself as that precision, no further.
  const Problem p({.dtype = DType::kFloat64, .q_lens = {64}, .cfg = small_config()});
  const Tensor exact = p.query_rows(4, 64, DType::kFloat64), plain = p.query_rows(4, 64, DType::kFloat64);
  SlidingWindowAttentionParams f = p.window();
  for (const auto& [dtype, epsilon] : {std::pair{DType::kFloat32, 0x1p-24}, std::pair{DType::kBFloat16, 0x1p-8}}) {
    f.o = exact;
    ASSERT_TRUE(reference::run(f, DType::kFloat64).ok());
    f.o = plain;
    ASSERT_TRUE(reference::run(f, dtype).ok());
    const std::vector<double> a = values_of(exact), b = values_of(plain);
    double error = 0;
    for (std::size_t i = 0; i < a.size(); ++i) error = std::max(error, std::fabs(a[i] - b[i]));
    EXPECT_GT(error, epsilon / 8);
    EXPECT_LT(error, epsilon * 8);
  }
}

TEST(Tolerance, NoticesErrors) {
  Tensor x(DType::kFloat32, {2}), plain(DType::kFloat64, {2}), oracle(DType::kFloat64, {2});
  for (Tensor* t : {&x, &plain, &oracle}) fill_value(*t, 1);
  EXPECT_TRUE(within_bound(x, plain, oracle));
  x.set({1}, 1 + 2e-5);
  EXPECT_FALSE(within_bound(x, plain, oracle));
  plain.set({0}, 1 + 1e-5);  // the bound is per tensor
  EXPECT_TRUE(within_bound(x, plain, oracle));
  oracle.set({1}, std::nan(""));
  EXPECT_FALSE(within_bound(x, plain, oracle));
  x.set({1}, std::nan(""));
  EXPECT_TRUE(within_bound(x, plain, oracle));
  x.set({0}, std::nan(""));
  EXPECT_FALSE(within_bound(x, plain, oracle));
}

}  // namespace
}  // namespace nsa::test
