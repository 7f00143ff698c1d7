// What must not change a bit of the results: threads, repetition, company in a pack, the future.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <thread>

#include "under_test.h"

namespace nsa::test {
namespace {

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const std::string suffix = dtype == DType::kFloat32 ? "_f32" : "_bf16";
    all.push_back({.name = "batched" + suffix,
                   .dtype = dtype,
                   .q_lens = {120, 120},
                   .kv_heads = 2,
                   .group = 4,
                   .cfg = small_config(),
                   .kind = CompressionKind::kMlp,
                   .rope = true});
    all.push_back({.name = "packed" + suffix,
                   .dtype = dtype,
                   .packed = true,
                   .q_lens = {0, 40, 1, 117, 7, 0, 64},
                   .slack = 9,
                   .kv_heads = 1,
                   .group = 7,
                   .dk = 72,
                   .dv = 64,
                   .cfg = small_config(),
                   .kind = CompressionKind::kLinear,
                   .rope = true});
    all.push_back({.name = "chunks" + suffix,
                   .dtype = dtype,
                   .packed = true,
                   .q_lens = {40, 0, 3, 60},
                   .k_lens = {130, 20, 3, 75},
                   .slack = 4,
                   .kv_heads = 3,
                   .group = 1,
                   .cfg = small_config(),
                   .kind = CompressionKind::kMlp,
                   .shared_weights = true});
  }
  return all;
}

void expect_same(const std::vector<Result>& a, const std::vector<Result>& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i)
    EXPECT_TRUE(same_bits(a[i].value, b[i].value)) << a[i].name << ": " << what;
}

class Invariance : public testing::TestWithParam<Case> {};

TEST_P(Invariance, Threads) {
  const Problem p(GetParam());
  const auto one = run_all(p, {.backend = Backend::kCPU, .num_threads = 1});
  for (const int threads : {1, 2, 5})
    expect_same(one, run_all(p, {.backend = Backend::kCPU, .num_threads = threads}),
                std::to_string(threads).append(" threads against 1"));
}

TEST_P(Invariance, TwoCallersAtOnce) {
  const Problem p(GetParam(), 1), other(GetParam(), 2);
  const auto expected = run_all(p), other_expected = run_all(other);
  std::vector<Result> results, other_results;
  std::thread first([&] { results = run_all(p); });
  std::thread second([&] { other_results = run_all(other); });
  first.join();
  second.join();
  expect_same(expected, results, "first caller");
  expect_same(other_expected, other_results, "second caller");
}

TEST_P(Invariance, PackedEqualsAlone) { expect_packed_equals_alone(Problem(GetParam())); }

/// Replaces every token after position t of every sequence, and the queries after it.
void change_future(Problem& p, std::int64_t t, double value) {
  for (const Sequence& s : sequences_of(p.c)) {
    const std::int64_t keys = std::min(t + 1, s.k_len),
                       queries = std::clamp<std::int64_t>(t + 1 - s.k_len + s.q_len, 0, s.q_len);
    for (const Tensor* k : {&p.k_cmp, &p.v_cmp, &p.k_slc, &p.v_slc, &p.k_swa, &p.v_swa}) {
      const TensorView part = part_of(*k, Rows::kKeys, s);
      fill_value(slice(part, part.rank - 3, keys, s.k_len), value);
    }
    for (const Tensor* q : {&p.q, &p.gates, &p.o_cmp, &p.o_slc, &p.o_swa, &p.d_o}) {
      const TensorView part = part_of(*q, Rows::kQueries, s);
      fill_value(slice(part, part.rank - 3, queries, s.q_len), value);
    }
  }
}

TEST_P(Invariance, FutureChangesNothing) {
  Problem p(GetParam());
  p.compress();
  const auto before = run_all(p);
  const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
  for (const auto& [t, value] :
       {std::pair<std::int64_t, double>{0, nan}, {7, 1e30}, {31, nan}, {66, -inf}, {99, nan}}) {
    Problem changed(GetParam());
    change_future(changed, t, value);
    changed.compress();
    const auto after = run_all(changed);
    for (const Sequence& s : sequences_of(p.c))
      for (std::size_t i = 0; i < before.size(); ++i) {
        // Of the gradients only those of queries look at the past alone.
        const Rows rows = before[i].rows;
        if (rows != Rows::kQueries && rows != Rows::kLse) continue;
        const std::int64_t queries = std::clamp<std::int64_t>(t + 1 - s.k_len + s.q_len, 0, s.q_len);
        const TensorView a = part_of(before[i].value, rows, s), b = part_of(after[i].value, rows, s);
        const int dim = rows == Rows::kLse ? a.rank - 1 : a.rank - 3;
        EXPECT_TRUE(agree(slice(a, dim, 0, queries), slice(b, dim, 0, queries), !std::isfinite(value)))
            << before[i].name << " up to " << t << " of sequence " << s.index << ", future = " << value;
      }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, Invariance, testing::ValuesIn(supported(cases())),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace nsa::test
