// Decoding with a cache is the forward pass, however the tokens come; rollback and forks leave no trace.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <utility>

#include "decode_support.h"

namespace nsa::test {
namespace {

/// Rounding between two ways of computing the same thing.
double tolerance_of(DType dtype) { return dtype == DType::kFloat64 ? 1e-12 : dtype == DType::kFloat32 ? 1e-5 : 0.01; }

class Steps : public testing::Test {
 protected:
  explicit Steps(StreamCase of) : c(std::move(of)) {}

  StreamCase c;

  /// Given blocks: equal to the forward but for rounding. Own indices: equal but for ties within rounding.
  void expect_forward(const Stream& stream, const std::vector<std::vector<std::int64_t>>& steps) {
    KVCache filled = make_cache(c);
    Results ignored(c);
    if (c.float8())
      for (const auto& counts : steps) expect_ok(Feed{stream, filled}(counts, ignored));
    const Forward forward(stream, &filled);
    for (const bool given : {true, false}) {
      KVCache cache = make_cache(c);
      Results results(c);
      for (const auto& counts : steps)
        expect_ok(Feed{stream, cache, given ? &forward.indices : nullptr}(counts, results));
      for (std::int64_t b = 0; b < c.batch; ++b) {
        SCOPED_TRACE("sequence " + std::to_string(b) + (given ? ", given indices" : ""));
        const auto fed = [&](const TensorView& t) { return slice(slice(t, 0, b, b + 1), 1, 0, cache.length(b)); };
        if (given) {
          expect_close(fed(results.o), fed(forward.o), tolerance_of(c.dtype));
          expect_compressed(forward, cache, b);
        }
        const std::vector<double> own = values_of(fed(results.indices)), expected = values_of(fed(forward.indices));
        std::size_t same = 0;
        for (std::size_t i = 0; i < own.size(); ++i) same += own[i] == expected[i];
        const double share = static_cast<double>(same) / static_cast<double>(std::max<std::size_t>(own.size(), 1));
        RecordProperty("identical_indices_percent", static_cast<int>(100 * share));
        EXPECT_GE(own.empty() ? 1 : share, 0.99);
      }
      expect_ok(cache.check());
    }
  }

  /// A step's compressed tokens are those of compress, rotated: bitwise, or within rounding where kernels differ.
  void expect_compressed(const Forward& forward, KVCache& cache, std::int64_t b) {
    const KVCacheView view = cache.view();
    for (std::int64_t i = 0; i < c.cfg.num_compressed(cache.length(b)); ++i) {
      const std::int64_t page_size = view.k_c.size(1);
      const auto page = static_cast<std::int64_t>(
          view.block_table_c.as<std::int32_t>()[b * view.block_table_c.stride[0] + i / page_size]);
      const auto cached = [&](const TensorView& t) {
        return slice(slice(t, 0, page, page + 1), 1, i % page_size, i % page_size + 1);
      };
      const auto computed = [&](const TensorView& t) { return slice(slice(t, 0, b, b + 1), 1, i, i + 1); };
      if (c.float8()) {
        const Tensor key = quantised(computed(forward.k_c), c.k_scale);
        const Tensor value = quantised(computed(forward.v_c), c.v_scale);
        if (under_test.step_has_the_bits_of_compress()) {
          EXPECT_TRUE(same_bits(cached(view.k_c), key)) << "key " << i;
          EXPECT_TRUE(same_bits(cached(view.v_c), value)) << "value " << i;
        } else {
          expect_close(cached(view.k_c), key, 0.125);
          expect_close(cached(view.v_c), value, 0.125);
        }
        continue;
      }
      if (!under_test.step_has_the_bits_of_compress()) {
        SCOPED_TRACE("compressed token " + std::to_string(i));
        expect_close(cached(view.k_c), computed(forward.k_c), tolerance_of(c.dtype));
        expect_close(cached(view.v_c), computed(forward.v_c), tolerance_of(c.dtype));
        continue;
      }
      EXPECT_TRUE(same_bits(cached(view.k_c), computed(forward.k_c))) << "key " << i;
      EXPECT_TRUE(same_bits(cached(view.v_c), computed(forward.v_c))) << "value " << i;
    }
  }
};

class Decode : public Steps, public testing::WithParamInterface<StreamCase> {
 protected:
  Decode() : Steps(GetParam()) {}
};

TEST_P(Decode, TokenByToken) {
  const Stream stream(c);
  expect_forward(stream, std::vector<std::vector<std::int64_t>>(c.length, {1, 1}));
}

/// A share of the splits: on a GPU those of a long text take minutes.
constexpr int kShares = 4;
class EverySplit : public Steps, public testing::WithParamInterface<std::tuple<StreamCase, int>> {
 protected:
  EverySplit() : Steps(std::get<0>(GetParam())) {}
};

TEST_P(EverySplit, OfPrefillAndSteps) {
  const Stream stream(c);
  int number = 0;
  for (std::int64_t split = 1; split < c.length; split += 1 + split % 5) {
    if (number++ % kShares != std::get<1>(GetParam())) continue;
    SCOPED_TRACE("split " + std::to_string(split));
    std::vector<std::vector<std::int64_t>> steps{{split, split}};
    for (std::int64_t at = split, m = 1; at < c.length; at += m, m = m % kMaxDecodeTokens + 5) {
      m = std::min({m, c.length - at, std::int64_t{kMaxDecodeTokens}});
      steps.push_back({m, m});
    }
    expect_forward(stream, steps);
  }
}

TEST_P(Decode, ChunkedPrefill) {
  for (const std::int64_t chunk : {17, 33, 64}) {
    std::vector<std::vector<std::int64_t>> steps;
    for (std::int64_t at = 0; at < c.length; at += chunk) {
      const std::int64_t m = std::min(chunk, c.length - at);
      steps.push_back({m, m});
    }
    expect_forward(Stream(c), steps);
  }
}

TEST_P(Decode, RaggedStepsAndIdleSlots) {
  std::vector<std::vector<std::int64_t>> steps{{0, 40}, {0, 0}, {16, 0}, {3, 1}, {0, 7}, {9, 0}, {16, 16}, {40, 2}};
  expect_forward(Stream(c), steps);
}

TEST_P(Decode, RollbackThenAppendIsAsIfNeverAppended) {
  const Stream stream(c), other(c, 99);
  for (const std::int64_t back : {1, 5, 16, 32}) {
    KVCache straight = make_cache(c), rolled = make_cache(c);
    Results expected(c), results(c), ignored(c);
    for (const std::int64_t m : {41, 10, 1, 16}) {
      expect_ok(Feed{stream, straight}({m, m}, expected));
      expect_ok(Feed{stream, rolled}({m, m}, results));
      const std::int64_t length = rolled.length(0);
      for (std::int64_t rest = std::min(back, c.length - length); rest > 0; rest -= 16)
        expect_ok(Feed{other, rolled}({std::min<std::int64_t>(rest, 16), 0}, ignored));
      expect_ok(rolled.rollback(0, length));
    }
    const auto fed = [&](const TensorView& t) { return slice(t, 1, 0, straight.length(0)); };
    EXPECT_TRUE(same_bits(fed(expected.o), fed(results.o))) << back << " back";
    EXPECT_TRUE(same_bits(fed(expected.indices), fed(results.indices))) << back << " back";
  }
}

TEST_P(Decode, ForksOfASharedPrefixDiverge) {
  // Sequence 0 goes on with row 0 of the stream, its fork with row 1; alone, a sequence of the same tokens gives the
  // same bits. Lengths on both sides of the ends of pages and of compression blocks.
  const Stream stream(c), other(c, 99);
  for (const std::int64_t shared : {0, 7, 8, 31, 32, 33, 47, 48, 60}) {
    for (const std::int64_t below : {0, 3}) {  // the fork starts this much before the parent's end
      SCOPED_TRACE("shared " + std::to_string(shared) + ", " + std::to_string(below) + " below");
      KVCache cache = make_cache(c), alone = make_cache(c);
      Results results(c), expected(c), ignored(c);
      const Feed feed{stream, cache}, feed_alone{stream, alone};
      if (shared + below > 0) expect_ok(feed({shared + below, 0}, results));
      expect_ok(cache.fork(0, 1, shared));
      for (const std::int64_t m : {5, 16, 3}) expect_ok(feed({m, m}, results));
      // The parent goes back into what is shared and writes something else there; the child must not notice.
      const std::int64_t back = std::max<std::int64_t>(0, shared - 5);
      expect_ok(cache.rollback(0, back));
      expect_ok(Feed{other, cache}({5, 0}, ignored));
      expect_ok(feed({0, 1}, results));
      expect_ok(cache.rollback(0, back));
      expect_ok(feed({16, 0}, results));

      if (shared + below > 0) expect_ok(feed_alone({shared + below, 0}, expected));
      if (shared > 0) expect_ok(feed_alone({0, shared}, ignored, {0, 0}));
      for (const std::int64_t m : {5, 16, 3}) expect_ok(feed_alone({m, m}, expected));
      expect_ok(feed_alone({0, 1}, expected));
      const auto rows = [](const TensorView& t, std::int64_t b, std::int64_t begin, std::int64_t end) {
        return slice(slice(t, 0, b, b + 1), 1, begin, end);
      };
      const std::int64_t end = shared + 24;
      // What the parent rewrote are steps; alone, its prefix may have been a chunk.
      const std::int64_t steps = under_test.prefill_has_the_bits_of_steps ? 0 : shared + below;
      expect_close(rows(results.o, 0, 0, steps), rows(expected.o, 0, 0, steps), tolerance_of(c.dtype));
      if (under_test.chunks_compress_as_steps_do()) {
        EXPECT_TRUE(same_bits(rows(results.o, 0, steps, end + below), rows(expected.o, 0, steps, end + below)));
      } else {  // alone, some of the prefix was compressed as a chunk
        expect_close(rows(results.o, 0, steps, end + below), rows(expected.o, 0, steps, end + below),
                     tolerance_of(c.dtype));
      }
      EXPECT_TRUE(same_bits(rows(results.o, 1, shared, end + 1), rows(expected.o, 1, shared, end + 1)));
      EXPECT_TRUE(same_bits(rows(results.indices, 1, shared, end + 1), rows(expected.indices, 1, shared, end + 1)));
    }
  }
}

TEST_P(Decode, AKeptPrefixHasTheBitsOfItsTokens) {
  // The sequence that left the prefix goes back into it, writes something else and is released.
  if (c.page_size == 0 || c.page_size > 48) GTEST_SKIP() << "pages of up to 48 tokens only";
  const Stream stream(c), other(c, 99);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(c.length));
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(7 * i);
  for (const std::int64_t behind : {0, 9, 20}) {
    SCOPED_TRACE(std::to_string(behind) + " tokens behind the prefix");
    KVCache cache = make_cache(c, 0, 1), alone = make_cache(c);
    Results results(c), expected(c), ignored(c);
    const std::int64_t length = 48 / c.page_size * c.page_size;
    ASSERT_GT(length, 0);
    expect_ok(Feed{stream, cache}({length + behind, 0}, results));
    std::int64_t kept = 0, matched = 0;
    expect_ok(cache.keep_prefix(0, std::span(ids).first(static_cast<std::size_t>(length)), kept));
    EXPECT_EQ(kept, length);
    expect_ok(cache.rollback(0, length - 5));
    for (const std::int64_t m : {16, 2}) expect_ok(Feed{other, cache}({m, 0}, ignored));
    cache.release(0);
    expect_ok(Feed{other, cache}({40, 0}, ignored));
    expect_ok(cache.match_prefix(1, ids, matched));
    EXPECT_EQ(matched, length);
    EXPECT_EQ(cache.length(1), length);

    expect_ok(Feed{stream, alone}({0, length + behind}, ignored, {0, 0}));
    expect_ok(alone.rollback(1, length));
    for (const std::int64_t m : {5, 16, 3}) {
      expect_ok(Feed{stream, cache}({0, m}, results, {0, 0}));
      expect_ok(Feed{stream, alone}({0, m}, expected, {0, 0}));
    }
    const auto fed = [&](const TensorView& t) { return slice(slice(t, 0, 1, 2), 1, length, length + 24); };
    EXPECT_TRUE(same_bits(fed(results.o), fed(expected.o)));
    EXPECT_TRUE(same_bits(fed(results.indices), fed(expected.indices)));
  }
}

TEST_P(Decode, WithoutCapacityWritesNothingAndSetsOverflow) {
  if (c.page_size == 0) GTEST_SKIP() << "pages only";
  const Stream stream(c);
  KVCache cache = make_cache(c);
  Results results(c);
  const Feed feed{stream, cache};
  const std::int64_t page = c.page_size;
  expect_ok(feed({page - 2, page - 2}, results));
  expect_ok(cache.reserve({page + 8, page}));
  const KVCacheView view = cache.view();
  std::vector<Tensor> before;
  for (const TensorView& ring : {view.k_swa_ring, view.v_swa_ring, view.k_cmp_ring, view.v_cmp_ring}) {
    before.emplace_back(ring.dtype, shape_of(ring));
    std::memcpy(before.back().view().data, ring.data, static_cast<std::size_t>(ring.numel()) * size_of(ring.dtype));
  }
  // Sequence 1 has one page: three more tokens do not fit. Sequence 0 goes on.
  expect_ok(feed({3, 3}, results, {}, 1, false));
  EXPECT_EQ(cache.length(0), page + 1);
  EXPECT_EQ(cache.length(1), page - 2);
  std::size_t n = 0;
  for (const TensorView& ring : {view.k_swa_ring, view.v_swa_ring, view.k_cmp_ring, view.v_cmp_ring})
    EXPECT_TRUE(same_bits(slice(ring, 0, 1, 2), slice(before[n++], 0, 1, 2)));
  const Status status = cache.check();
  EXPECT_EQ(status.code(), StatusCode::kOutOfCapacity);
  EXPECT_EQ(status.message(), "a step exceeded the capacity of a sequence: reserve() before each step");
  expect_ok(cache.check());
  // With capacity, the sequence continues as if nothing had happened.
  expect_ok(feed({0, 3}, results));
  const Forward forward(stream, &cache);
  const auto fed = [&](const TensorView& t) { return slice(t, 1, 0, page + 1); };
  expect_close(fed(results.o), fed(forward.o), tolerance_of(c.dtype));
}

TEST_P(Decode, E4M3KeepsNaNAndSaturates) {
  if (!c.float8()) GTEST_SKIP() << "e4m3 only";
  Stream stream(c);
  const double infinity = std::numeric_limits<double>::infinity();
  stream.v_swa.set({0, 5, 0, 1}, std::nan(""));
  stream.v_slc.set({1, 6, 1, 2}, -infinity), stream.k_swa.set({1, 7, 1, 3}, infinity);
  KVCache cache = make_cache(c);
  Results results(c);
  for (const std::int64_t m : {4, 6}) expect_ok(Feed{stream, cache}({m, m}, results));
  for (const Index& i : {Index{0, 5, 0, 1}, {0, 9, 2, 1}}) EXPECT_TRUE(std::isnan(results.o.get(i)));
  for (const auto& [b, kv_head] : {std::pair{0, 1}, {1, 0}, {1, 1}})
    for (std::int64_t d = 0; d < c.dv; ++d) EXPECT_TRUE(std::isfinite(results.o.get({b, 9, kv_head * c.group, d})));
  const KVCacheView view = cache.view();
  const std::int64_t page = view.block_table.as<std::int32_t>()[view.block_table.stride[0]];
  EXPECT_EQ(get_element(view.v_slc, offset_of(view.v_slc, {page, 6, 1, 2})), -448);
  EXPECT_EQ(get_element(view.k_swa_ring, offset_of(view.k_swa_ring, {1, 7, 1, 3})), 448);
}

TEST_P(Decode, TheSameBitsWithAnyNumberOfThreads) {
  const Stream stream(c);
  Results one(c), three(c);
  for (const int threads : {1, 3}) {
    KVCache cache = make_cache(c);
    for (const std::int64_t m : {50, 16, 1, 1, 7})
      expect_ok(Feed{stream, cache}({m, m - 1}, threads == 1 ? one : three, {}, threads));
  }
  EXPECT_TRUE(same_bits(slice(one.o, 1, 0, 70), slice(three.o, 1, 0, 70)));
}

std::string name_of_case(const StreamCase& c) {
  return std::string(name_of(c.backend)) + "_" + name_of(c.dtype) + "_" + name_of(c.kind) + "_g" +
         std::to_string(c.group) + (c.page_size ? "_page" + std::to_string(c.page_size) : "_contiguous") +
         (c.rope ? "" : "_norope") + (c.float8() ? "_e4m3" : "");
}

INSTANTIATE_TEST_SUITE_P(Streams, Decode, testing::ValuesIn(decode_cases()),
                         [](const auto& info) { return name_of_case(info.param); });
INSTANTIATE_TEST_SUITE_P(Streams, EverySplit,
                         testing::Combine(testing::ValuesIn(decode_cases()), testing::Range(0, kShares)),
                         [](const auto& info) {
                           return name_of_case(std::get<0>(info.param)) + "_share" +
                                  std::to_string(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace nsa::test
