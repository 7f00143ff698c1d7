// Chunks of the prompt behind what a cache holds: on Hopper by the kernels of a forward pass.
#include <limits>
#include <string>

#include "device_steps.h"

namespace nsa::test {
namespace {

StreamCase chunk_case(std::int64_t group, DType dtype = DType::kBFloat16) {
  return hopper_case(group, 1100, {16, 8, 32, 6, 1, 2, 200}, dtype);
}

TEST(Prefill, ChunksAreTheForward) {
  for (const std::int64_t group : {1, 2, 4, 7, 16, 32}) {
    SCOPED_TRACE("groups of " + std::to_string(group));
    StreamCase c = chunk_case(group, group == 2 ? DType::kFloat16 : DType::kBFloat16);
    c.kv_heads = group > 16 ? 1 : 2;
    expect_forward(c, 0, {300, 17, 500, 64, 201, 18});
    expect_forward(c, 333, {500, 1, 200});  // a step between chunks
  }
  StreamCase wide = chunk_case(16);
  wide.dk = wide.dv = 128, wide.cfg = {32, 16, 64, 5, 1, 2, 512};
  for (const std::int64_t page_size : {0, 16, 128}) {
    wide.page_size = page_size;
    expect_forward(wide, 0, {140, 611, 30, 300});
  }
}

TEST(Prefill, ChunksInFloat8AreThePortableKernels) {
  for (const std::int64_t group : {1, 4, 32}) {
    SCOPED_TRACE("groups of " + std::to_string(group));
    const DType dtype = group == 4 ? DType::kFloat16 : DType::kBFloat16;
    expect_portable(in_float8(chunk_case(group, dtype)), 0, {300, 17, 500, 64, 201});
  }
  expect_portable(in_float8(chunk_case(16)), 333, {500, 1, 200});  // a step between chunks
}

TEST(Prefill, WideChunksInFloat8AreThePortableKernels) {
  StreamCase c = in_float8(chunk_case(8));
  c.dv = 128, c.cfg = {32, 16, 64, 5, 1, 2, 512};
  for (const std::int64_t page_size : {0, 16}) {
    c.page_size = page_size, c.dk = page_size == 16 ? 192 : 128;
    expect_portable(c, 0, {140, 611, 300});
  }
}

TEST(Prefill, ChunksInFloat8AreTheOracle) {
  StreamCase c = in_float8(chunk_case(2));
  c.batch = 1, c.length = 700;
  const Stream stream(c);
  const auto feed = [&](KVCache& cache, Results& results, const Tensor* given) {
    for (const std::int64_t m : {300, 17, 200, 150}) expect_ok(Feed{stream, cache, given}({m}, results));
  };
  KVCache own = make_cache(c), cache = make_cache(c);
  Results results(c), given(c);
  feed(own, results, nullptr);
  const Forward forward(stream, &own);
  feed(cache, given, &forward.indices);
  const auto fed = [](const TensorView& t) { return slice(t, 1, 0, 667); };
  expect_close(fed(given.o), fed(forward.o), 0.01);
  expect_alike(fed(results.indices), fed(forward.indices));
}

TEST(Prefill, AChunkMayHaveMoreTokensThanAGridHasRows) {
  StreamCase c = chunk_case(1);
  c.batch = c.kv_heads = 1;
  c.length = (1 << 16) + 100;
  const Stream stream(c);
  const Forward forward(stream);
  KVCache cache = make_cache(c);
  Results results(c);
  expect_ok(Feed{stream, cache, &forward.indices}({30}, results));
  expect_ok(Feed{stream, cache, &forward.indices}({c.length - 30}, results));
  const auto last = [&](const TensorView& t) { return slice(t, 1, c.length - 200, c.length); };
  expect_close(last(results.o), last(forward.o), 0.01);
}

void feed_chunks(const Stream& stream, KVCache& cache, Results& results,
                 const std::vector<std::vector<std::int64_t>>& chunks, const Tensor* given = nullptr) {
  for (const auto& counts : chunks) expect_ok(Feed{stream, cache, given}(counts, results));
}

TEST(Prefill, TheCacheHasTheBitsOfThePortableKernels) {
  for (const std::int64_t page_size : {48, 0, 16}) {
    StreamCase c = page_size == 16 ? in_float8(chunk_case(16)) : chunk_case(16);
    c.page_size = page_size;
    const Stream stream(c);
    const std::vector<std::vector<std::int64_t>> chunks{{130, 17}, {0, 300}, {513, 64}, {20, 140}};
    KVCache cache = make_cache(c), portable = make_cache(c);
    Results results(c), expected(c);
    feed_chunks(stream, cache, results, chunks);
    {
      const Environment wish("NSA_CUDA_KERNELS", "portable");
      feed_chunks(stream, portable, expected, chunks);
    }
    expect_same_cache(cache, portable);
    for (std::int64_t b = 0; b < 2; ++b) {
      const auto fed = [&](const TensorView& t) { return slice(slice(t, 0, b, b + 1), 1, 0, cache.length(b)); };
      expect_alike(fed(results.indices), fed(expected.indices));
    }
  }
}

TEST(Prefill, TheSameBitsBesideOthersPagedAnyhowAndAgain) {
  for (StreamCase c : {chunk_case(4), chunk_case(16), in_float8(chunk_case(16))}) {
    std::optional<Results> expected;
    for (const std::int64_t page_size : {48, 0, 16, 128})
      for (const std::int64_t beside : {0, 17, 300, 300}) {  // the last twice
        c.page_size = page_size;
        const Stream stream(c);
        KVCache cache = make_cache(c);
        Results results(c);
        feed_chunks(stream, cache, results, {{300, beside}, {200, beside}, {141, 0}});
        if (!expected) {
          expected.emplace(std::move(results));
          continue;
        }
        const auto rows = [](const TensorView& t) { return slice(slice(t, 0, 0, 1), 1, 0, 641); };
        SCOPED_TRACE("pages of " + std::to_string(page_size) + ", beside " + std::to_string(beside));
        EXPECT_TRUE(same_bits(rows(results.o), rows(expected->o)));
        EXPECT_TRUE(same_bits(rows(results.indices), rows(expected->indices)));
      }
  }
}

TEST(Prefill, AfterARollbackTheSameBits) {
  const StreamCase c = chunk_case(16);
  const Stream stream(c), other(c, 99);
  KVCache straight = make_cache(c), rolled = make_cache(c);
  Results expected(c), results(c), ignored(c);
  for (const std::int64_t m : {200, 150, 17}) {
    expect_ok(Feed{stream, straight}({m, m}, expected));
    expect_ok(Feed{stream, rolled}({m, m}, results));
    const std::int64_t length = rolled.length(0);
    expect_ok(Feed{other, rolled}({32, 0}, ignored));
    expect_ok(rolled.rollback(0, length));
  }
  const auto fed = [&](const TensorView& t) { return slice(t, 1, 0, 367); };
  EXPECT_TRUE(same_bits(fed(expected.o), fed(results.o)));
  EXPECT_TRUE(same_bits(fed(expected.indices), fed(results.indices)));
}

void expect_not_finite_where_seen(const StreamCase& c) {
  const Stream clean(c);
  Stream stream(c);
  const double bad = c.float8() ? std::nan("") : std::numeric_limits<double>::infinity();  // e4m3 has no infinity
  stream.v_swa.set({1, 390, 0, 3}, std::nan(""));
  stream.v_slc.set({1, 700, 1, 5}, bad);
  stream.v_cmp.set({1, 702, 1, 5}, -bad);
  const std::vector<std::vector<std::int64_t>> chunks{{300, 300}, {200, 200}, {400, 400}};
  const Forward forward(clean);
  KVCache cache = make_cache(c), sound = make_cache(c);
  Results results(c), expected(c);
  feed_chunks(stream, cache, results, chunks, &forward.indices);
  feed_chunks(clean, sound, expected, chunks, &forward.indices);
  const auto first = [](const TensorView& t) { return slice(t, 0, 0, 1); };
  EXPECT_TRUE(same_bits(slice(first(results.o), 1, 0, 900), slice(first(expected.o), 1, 0, 900)));
  // Of sequence 1 nothing before token 390; of head group 1, whose window is sound, nothing before 700.
  const auto heads = [&](const TensorView& t, std::int64_t kv_head, std::int64_t begin, std::int64_t end) {
    return slice(slice(slice(t, 0, 1, 2), 1, begin, end), 2, kv_head * c.group, (kv_head + 1) * c.group);
  };
  expect_close(heads(results.o, 0, 0, 390), heads(expected.o, 0, 0, 390), 0.01);
  expect_close(heads(results.o, 1, 0, 700), heads(expected.o, 1, 0, 700), 0.01);
  EXPECT_TRUE(std::isnan(results.o.get({1, 390, 0, 3})));
  EXPECT_TRUE(std::isnan(results.o.get({1, 589, 0, 3})));
  EXPECT_FALSE(std::isfinite(results.o.get({1, 700, c.group, 5})));
}

TEST(Prefill, ValuesThatAreNotFiniteStayWhereTheyAreSeen) {
  expect_not_finite_where_seen(chunk_case(16));
  expect_not_finite_where_seen(in_float8(chunk_case(16)));
}

void expect_overflow_of_one(const StreamCase& c) {
  const Stream stream(c);
  KVCache cache = make_cache(c), alone = make_cache(c);
  Results results(c), expected(c);
  expect_ok(Feed{stream, cache}({90, 90}, results));
  expect_ok(Feed{stream, alone}({90, 90}, expected));
  expect_ok(cache.reserve({240, 96}));
  expect_ok(Feed{stream, cache}({150, 150}, results, {}, 1, false));  // checks that o = 0 and indices = -1
  EXPECT_EQ(cache.length(0), 240);
  EXPECT_EQ(cache.length(1), 90);
  EXPECT_EQ(cache.check().code(), StatusCode::kOutOfCapacity);
  expect_ok(Feed{stream, alone}({150, 0}, expected));
  const auto fed = [](const TensorView& t) { return slice(slice(t, 0, 0, 1), 1, 0, 240); };
  EXPECT_TRUE(same_bits(fed(results.o), fed(expected.o)));
  EXPECT_TRUE(same_bits(fed(results.indices), fed(expected.indices)));
}

TEST(Prefill, OverflowOfASequenceLeavesTheOthersUnchanged) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16})
    for (const StreamCase& c : {chunk_case(16, dtype), in_float8(chunk_case(16, dtype))}) expect_overflow_of_one(c);
}

TEST(Prefill, LengthsAndTablesOutOfBoundsSetOverflow) { expect_overflow(chunk_case(16), 600, 130); }

TEST(Prefill, GraphReplaysAsLengthsGrow) {
  expect_replays_as_calls(chunk_case(16), 405, 520, {130});
  expect_replays_as_calls(chunk_case(4), 405, 520, {260});
  expect_replays_as_calls(in_float8(chunk_case(16)), 405, 520, {130});
}

}  // namespace
}  // namespace nsa::test
