// What only a device has: keys cut into parts, graphs that replay a step, lengths and tables that are not checked.
#include <cmath>
#include <tuple>
#include <utility>

#include "device_steps.h"
#include "support/environment.h"

namespace nsa::test {
namespace {

/// Long enough for several parts of every branch.
StreamCase long_case(DType dtype = DType::kBFloat16) {
  return with(Backend::kCUDA, dtype, [](StreamCase& c) {
    c.dk = c.dv = 64;
    c.length = 700;
    c.kind = CompressionKind::kLinear;
    c.cfg = {4, 2, 16, 12, 1, 2, 300};
  });
}

/// Three stages of compressed keys for each thread block of a cluster, several for its window.
StreamCase clustered_case(std::int64_t group, DType dtype = DType::kBFloat16) {
  return hopper_case(group, 2300, {8, 2, 32, 12, 1, 2, 600}, dtype);
}
constexpr std::int64_t kClusteredStart = 2200;

TEST(DecodeSteps, PartsAreTheForward) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16})
    expect_forward(long_case(dtype), 600, {1, 2, 16, 1, 7, 16, 16, 1});
}

TEST(DecodeSteps, ClustersAreTheForward) {
  for (const std::int64_t group : {1, 3, 4, 16, 20, 32, 33, 64, 80}) {
    SCOPED_TRACE("groups of " + std::to_string(group));
    StreamCase c = clustered_case(group);
    c.kv_heads = group > 16 ? 1 : 2;
    expect_forward(c, kClusteredStart, {1, 2, 16, 1, 4, 7, 16, 3, 1});
  }
}

/// Calls body() with so many SMs (cluster_shape() goes by them) that steps of m tokens have clusters of
/// every shape, and thread blocks that share what several queries read.
template <class Body>
void with_every_shape(const StreamCase& c, std::int64_t m, const Body& body) {
  const std::int64_t clusters = c.batch * c.kv_heads * m * ((c.group + 31) / 32);
  for (const double share : {0.06, 0.7, 1.25, 2.5, 3.75, 5.0, 12.5}) {
    const std::string processors = std::to_string(std::lround(share * static_cast<double>(clusters)));
    SCOPED_TRACE(processors + " SMs");
    const Environment environment("NSA_CUDA_PROCESSORS", processors);
    body();
  }
}

TEST(DecodeSteps, ClustersInFloat8AreThePortableKernels) {
  for (const std::int64_t group : {1, 3, 16, 20, 32, 48})
    for (const std::int64_t page_size : {0, 16, 128}) {
      if (group > 32 && page_size != 16) continue;
      SCOPED_TRACE("groups of " + std::to_string(group) + ", pages of " + std::to_string(page_size));
      StreamCase c = in_float8(clustered_case(group));
      c.page_size = page_size;
      expect_portable(c, kClusteredStart, {1, 2, 16, 1, 4, 7, 16, 3, 1});
    }
  StreamCase c = in_float8(clustered_case(16));
  c.dk = c.dv = 128;
  c.cfg = {32, 16, 64, 12, 1, 2, 512};
  expect_portable(c, kClusteredStart, {1, 2, 16, 1, 4, 7, 16, 3, 1});
}

/// Head dim of the keys, group, whether the cache is in e4m3.
class StepShapes : public testing::TestWithParam<std::tuple<std::tuple<std::int64_t, std::int64_t>, bool>> {};
TEST_P(StepShapes, AreThePortableKernels) {
  const auto [dk, group] = std::get<0>(GetParam());
  StreamCase c = clustered_case(group, group == 3 || dk == 192 ? DType::kFloat16 : DType::kBFloat16);
  if (dk > 64) c.dk = dk, c.dv = 128, c.cfg = {32, 16, 64, 12, 1, 2, 512};
  if (std::get<1>(GetParam())) c = in_float8(c);
  expect_portable(c, kClusteredStart, {1, 16}, [&](const auto& body) { with_every_shape(c, 16, body); });
}
INSTANTIATE_TEST_SUITE_P(Every, StepShapes,
                         testing::Combine(testing::Values(std::tuple{64, 3}, std::tuple{64, 16}, std::tuple{64, 20},
                                                          std::tuple{128, 16}, std::tuple{192, 16}),
                                          testing::Bool()));

/// Every instance of step_attend on a short text, for the sanitizers.
class StepInstances : public testing::TestWithParam<std::tuple<DType, std::int64_t, std::int64_t>> {};
TEST_P(StepInstances, GiveWhatOneShapeGives) {
  const auto [dtype, dk, group] = GetParam();
  for (const bool float8 : {false, true}) {
    StreamCase c = hopper_case(group, 90, {16, 8, 32, 2, 0, 1, 40}, dtype);
    c.dk = dk, c.dv = dk == 192 ? 128 : dk;
    if (float8) c = in_float8(c);
    const Stream stream(c);
    const KVCache start = filled_cache(stream, 70);
    const auto feed = [&](const Tensor* blocks, Results& to) {
      KVCache cache = start;
      expect_ok(Feed{stream, cache, blocks}({4, 4}, to));
    };
    Results expected(c);
    {
      const Environment one_shape("NSA_BATCH_INVARIANT", "1");
      feed(nullptr, expected);
    }
    with_every_shape(c, 4, [&] {
      Results results(c);
      feed(&expected.indices, results);
      expect_close(slice(results.o, 1, 70, 74), slice(expected.o, 1, 70, 74), 0.01);
    });
  }
}
INSTANTIATE_TEST_SUITE_P(Every, StepInstances,
                         testing::Combine(testing::Values(DType::kBFloat16, DType::kFloat16),
                                          testing::Values(64, 128, 192), testing::Values(16, 20, 48)));

/// Every instance of append_compress: by hidden units, 0 for twice the head dims where these differ.
class AppendCompressInstances : public testing::TestWithParam<std::tuple<DType, std::int64_t>> {};
TEST_P(AppendCompressInstances, AreThePortableKernels) {
  const auto [dtype, hidden] = GetParam();
  for (const bool float8 : {false, true}) {
    SCOPED_TRACE(float8 ? "e4m3" : name_of(dtype));
    StreamCase c = hopper_case(4, 200, {16, 8, 32, 4, 1, 2, 40}, dtype);
    c.kind = CompressionKind::kMlp, c.hidden = hidden;
    if (hidden == 0) c.dk = 192, c.dv = 128;
    expect_portable(float8 ? in_float8(c) : c, 100, {16, 1, 7, 16, 3});
  }
}
INSTANTIATE_TEST_SUITE_P(Every, AppendCompressInstances,
                         testing::Combine(testing::Values(DType::kBFloat16, DType::kFloat16),
                                          testing::Values(0, 64, 128, 192, 256, 384, 512)));

/// More blocks of a thread block than it has threads; whether the cache is in e4m3.
class StepsOfManyBlocks : public testing::TestWithParam<bool> {};
TEST_P(StepsOfManyBlocks, AreThePortableKernels) {
  StreamCase c = hopper_case(4, 20100, {16, 8, 32, 16, 1, 2, 512});
  c.kv_heads = 1;
  if (GetParam()) c = in_float8(c);
  expect_portable(c, 20000, {1, 16}, [&](const auto& body) { with_every_shape(c, 16, body); });
}
INSTANTIATE_TEST_SUITE_P(Every, StepsOfManyBlocks, testing::Bool());

TEST(DecodeSteps, QueriesOfAnySizeInFloat8) {
  // Beyond float16, in which they are multiplied: a power of two that the softmax scale takes back changes no bit.
  const StreamCase c = in_float8(clustered_case(16));
  std::vector<Results> results;
  for (const int exponent : {0, 60, -70}) {
    Stream stream(c);
    for_each_index(stream.q, [&](const Index& i) { stream.q.set(i, std::ldexp(stream.q.get(i), exponent)); });
    KVCache cache = make_cache(c);
    Results& to = results.emplace_back(c);
    for (const std::int64_t m : {300, 1, 4})
      expect_ok(Feed{stream, cache, nullptr, std::ldexp(0.125, -exponent)}({m, m}, to));
    EXPECT_TRUE(same_bits(slice(to.o, 1, 0, 305), slice(results[0].o, 1, 0, 305))) << "2^" << exponent;
    EXPECT_TRUE(same_bits(slice(to.indices, 1, 0, 305), slice(results[0].indices, 1, 0, 305))) << "2^" << exponent;
  }
}

TEST(DecodeSteps, AChunkMayHaveMoreTokensThanAGridHasRows) {
  StreamCase c = long_case();
  c.batch = c.kv_heads = c.group = 1;
  c.length = (1 << 16) + 100;
  const Stream stream(c);
  const Forward forward(stream);
  KVCache cache = make_cache(c);
  Results results(c);
  expect_ok(Feed{stream, cache, &forward.indices}({c.length}, results));
  const auto last = [&](const TensorView& t) { return slice(t, 1, c.length - 200, c.length); };
  expect_close(last(results.o), last(forward.o), 0.01);
}

/// Few by few, several at once, beside another sequence or an idle one.
void expect_same_bits_in_any_step(const StreamCase& c, std::int64_t start, std::int64_t few = 1) {
  const Stream stream(c);
  KVCache one = filled_cache(stream, start), many = filled_cache(stream, start), idle = filled_cache(stream, start);
  Results by_one(c), by_many(c), by_idle(c);
  for (std::int64_t i = 0; i < 32; i += few) expect_ok(Feed{stream, one}({few, few}, by_one));
  for (const std::int64_t m : {16, 3, 13}) {
    expect_ok(Feed{stream, many}({m, m}, by_many));
    expect_ok(Feed{stream, idle}({m, 0}, by_idle));
  }
  const auto rows = [&](const TensorView& t, std::int64_t batch) {
    return slice(slice(t, 0, 0, batch), 1, start, start + 32);
  };
  EXPECT_TRUE(same_bits(rows(by_one.o, 2), rows(by_many.o, 2)));
  EXPECT_TRUE(same_bits(rows(by_one.indices, 2), rows(by_many.indices, 2)));
  EXPECT_TRUE(same_bits(rows(by_one.o, 1), rows(by_idle.o, 1)));
  expect_same_cache(one, many);
}

TEST(DecodeSteps, AQueryHasTheSameBitsInAnyStep) {
  const Environment one_shape("NSA_BATCH_INVARIANT", "1");
  expect_same_bits_in_any_step(long_case(), 600);
  for (const std::int64_t group : {4, 16, 20}) {
    SCOPED_TRACE("groups of " + std::to_string(group));
    StreamCase c = clustered_case(group);
    if (group == 16) c.kind = CompressionKind::kMlp;
    expect_same_bits_in_any_step(c, kClusteredStart);
    expect_same_bits_in_any_step(in_float8(c), kClusteredStart);
  }
}

/// Four queries of a sequence in a thread block (of a device so small that it has many).
struct SharedQueries : testing::Test {
  const Environment processors{"NSA_CUDA_PROCESSORS", "1"};
};

TEST_F(SharedQueries, AreTheOracle) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16})
    for (const std::int64_t dim : {64, 128}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + ", heads of " + std::to_string(dim));
      StreamCase c = hopper_case(dim == 64 ? 3 : 16, 700, {32, 16, 64, 6, 1, 2, 150}, dtype);
      c.dk = c.dv = dim, c.oracle_from = 620;
      expect_forward(c, c.oracle_from, {4, 16, 3, 13, 16, 7, 16});
    }
}

TEST_F(SharedQueries, OfALongTextAreTheOracle) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    SCOPED_TRACE(name_of(dtype));
    StreamCase c = hopper_case(4, 65536, {}, dtype);
    c.batch = 1, c.dk = c.dv = dtype == DType::kFloat16 ? 64 : 128;
    c.page_size = 128, c.kind = CompressionKind::kMean, c.oracle_from = c.length - 16;
    expect_forward(c, c.oracle_from, {16});
  }
}

TEST_F(SharedQueries, HaveTheSameBitsInAnyStep) {
  expect_same_bits_in_any_step(clustered_case(4), kClusteredStart, 4);
  StreamCase c = clustered_case(16, DType::kFloat16);
  c.dk = c.dv = 128, c.cfg = {32, 16, 64, 12, 1, 2, 512};
  expect_same_bits_in_any_step(c, kClusteredStart, 4);
}

/// Results of a step of eight tokens; blocks: given, and then no indices are wanted.
Results after_eight(const Stream& stream, const Tensor* blocks = nullptr) {
  KVCache cache = filled_cache(stream, kClusteredStart);
  Results results(stream.c);
  expect_ok(Feed{stream, cache, blocks, {}, blocks == nullptr}({8, 8}, results));
  return results;
}

TEST_F(SharedQueries, HaveTheSameBitsWithTheirBlocksGiven) {  // with which half of the thread blocks begin then
  for (const std::int64_t dim : {64, 128}) {
    StreamCase c = clustered_case(16);
    c.dk = c.dv = dim;
    const Stream stream(c);
    const Results chosen = after_eight(stream), given = after_eight(stream, &chosen.indices);
    const auto rows = [](const Results& results) { return slice(results.o, 1, kClusteredStart, kClusteredStart + 8); };
    EXPECT_TRUE(same_bits(rows(chosen), rows(given))) << "heads of " << dim;
  }
}

TEST_F(SharedQueries, DoNotSeeWhatTheOthersSee) {
  const StreamCase c = clustered_case(16);
  Stream stream(c);
  const auto rows = [&](const Results& results, std::int64_t first, std::int64_t last) {
    return slice(results.o, 1, kClusteredStart + first, kClusteredStart + last);
  };
  const auto value = [&](const Results& results, std::int64_t row) {
    return results.o.get({0, kClusteredStart + row, 0, 0});
  };
  const Results clean = after_eight(stream);
  // A token of the step, behind all queries but the last one.
  const Index token{0, kClusteredStart + 7, 0, 3};
  const double before = stream.v_swa.get(token);
  stream.v_swa.set(token, std::nan(""));
  const Results with_token = after_eight(stream);
  EXPECT_TRUE(same_bits(rows(with_token, 0, 7), rows(clean, 0, 7)));
  EXPECT_TRUE(std::isnan(with_token.o.get({0, kClusteredStart + 7, 0, 3})));
  EXPECT_TRUE(std::isfinite(value(with_token, 7)));
  stream.v_swa.set(token, before);
  // A block that one query alone has chosen.
  constexpr int kBlock = 20;
  Results chosen = after_eight(stream);
  for_each_index(chosen.indices, [&](const Index& i) {
    if (chosen.indices.get(i) == kBlock) chosen.indices.set(i, -1);
  });
  chosen.indices.set({0, kClusteredStart + 1, 0, 0}, kBlock);
  const Results given = after_eight(stream, &chosen.indices);
  stream.v_slc.set({0, kBlock * 32 + 5, 0, 0}, INFINITY);
  const Results with_block = after_eight(stream, &chosen.indices);
  EXPECT_TRUE(same_bits(rows(with_block, 0, 1), rows(given, 0, 1)));
  EXPECT_TRUE(same_bits(rows(with_block, 2, 8), rows(given, 2, 8)));
  EXPECT_FALSE(std::isfinite(value(with_block, 1)));
}

TEST_F(SharedQueries, ReplayedOrWithoutCapacity) {
  expect_replays_as_calls(clustered_case(16), kClusteredStart, 40, {4});
  expect_overflow(clustered_case(16), kClusteredStart, 4);
}

void expect_same_bits_beside_others(StreamCase c) {
  std::vector<Results> expected;
  for (const std::int64_t page_size : {48, 0, 16, 128}) {
    c.page_size = page_size;
    const Stream stream(c);
    std::size_t n = 0;
    for (const std::int64_t m : {1, 2, 5, 16}) {
      for (const bool beside : {false, true}) {
        KVCache cache = filled_cache(stream, kClusteredStart);
        Results results(c);
        for (int i = 0; i < 4; ++i) expect_ok(Feed{stream, cache}({m, beside ? (i % 2 ? m : 1) : 0}, results));
        if (page_size == 48 && !beside)
          expected.push_back(std::move(results));
        else {
          const auto rows = [&](const TensorView& t) {
            return slice(slice(t, 0, 0, 1), 1, kClusteredStart, kClusteredStart + 4 * m);
          };
          SCOPED_TRACE("m = " + std::to_string(m) + ", pages of " + std::to_string(page_size));
          EXPECT_TRUE(same_bits(rows(results.o), rows(expected[n].o))) << (beside ? "beside another" : "alone");
          EXPECT_TRUE(same_bits(rows(results.indices), rows(expected[n].indices)));
        }
      }
      ++n;
    }
  }
}

TEST(DecodeSteps, AQueryHasTheSameBitsBesideOthersAndPagedAnyhow) {  // of a step of the same shape
  expect_same_bits_beside_others(clustered_case(16));
  expect_same_bits_beside_others(in_float8(clustered_case(16)));
}

TEST(DecodeSteps, GraphReplaysAsLengthsGrow) {
  expect_replays_as_calls(long_case(), 505, 40, {1, 4});
  expect_replays_as_calls(clustered_case(16), kClusteredStart, 40, {1, 4});
  expect_replays_as_calls(in_float8(clustered_case(16)), kClusteredStart, 40, {1, 4});
  expect_replays_as_calls(clustered_case(16), kClusteredStart, 40, {1, 4}, true);
}

TEST(DecodeSteps, SixtyFourStepsRepeatBitForBit) {
  for (const bool clustered : {false, true}) {
    const StreamCase c = clustered ? clustered_case(4) : long_case();
    const std::int64_t start = clustered ? kClusteredStart : 600;
    const Stream stream(c);
    std::vector<KVCache> caches;
    std::vector<Results> results;
    for (int run = 0; run < 2; ++run) {
      caches.push_back(filled_cache(stream, start));
      results.emplace_back(c);
      for (int i = 0; i < 64; ++i) expect_ok(Feed{stream, caches.back()}({1, 1}, results.back()));
    }
    const auto rows = [&](const TensorView& t) { return slice(t, 1, start, start + 64); };
    EXPECT_TRUE(same_bits(rows(results[0].o), rows(results[1].o)));
    EXPECT_TRUE(same_bits(rows(results[0].indices), rows(results[1].indices)));
    expect_same_cache(caches[0], caches[1]);
  }
}

TEST(DecodeSteps, LengthsAndTablesOutOfBoundsSetOverflow) {
  expect_overflow(long_case(), 600, 2);
  expect_overflow(clustered_case(16), kClusteredStart, 2);
  expect_overflow(in_float8(clustered_case(16)), kClusteredStart, 2);
}

TEST(DecodeSteps, ForkOnTheDeviceIsThatOfTheHost) {
  for (const std::int64_t page_size : {0, 16}) {
    StreamCase c = page_size ? in_float8(long_case()) : long_case();
    c.page_size = page_size;
    const Stream stream(c);
    for (const std::int64_t below : {0, 3, 32}) {
      SCOPED_TRACE("pages of " + std::to_string(page_size) + ", " + std::to_string(below) + " below");
      KVCache host = make_cache(c);
      Results ignored(c);
      expect_ok(Feed{stream, host}({437, 0}, ignored));
      KVCache device = host;
      const std::int64_t length = 437 - below;
      expect_ok(host.fork(0, 1, length));
      // The pages that the host gave the child.
      for (const auto table : {&KVCacheView::block_table, &KVCacheView::block_table_c})
        assign(host.view().*table, device.view().*table);
      const auto fork_on_device = [](const ForkParams& p, const Context& context) { return fork(p, context); };
      expect_ok(on_device<ForkParams>({device.view(), c.cfg, 0, 1, length}, fork_on_device));
      expect_same_cache(host, device);
      expect_ok(device.check());
      // More than the parent has: refused.
      KVCache refused = device;
      expect_ok(on_device<ForkParams>({refused.view(), c.cfg, 0, 1, 438}, fork_on_device));
      EXPECT_EQ(refused.check().code(), StatusCode::kOutOfCapacity);
      expect_same_cache(device, refused);
    }
  }
}

TEST(DecodeSteps, TooLittleWorkspaceIsRefusedBeforeAnythingIsWritten) {
  const StreamCase c = long_case();
  const Stream stream(c);
  for (const bool rotate : {false, true}) {
    KVCache cache = filled_cache(stream, 40), before = cache;
    DeviceSteps steps(stream, cache, 2, rotate);
    steps.starve();
    steps.advance(40);
    EXPECT_EQ(steps.step().code(), StatusCode::kInvalidArgument);
    steps.fetch();
    expect_same_cache(cache, before);
  }
}

TEST(DecodeSteps, RotationBeyondTheTablesSetsOverflow) {
  for (const auto& [c, length] : {std::pair{long_case(), std::int64_t{600}}, {clustered_case(16), kClusteredStart}}) {
    Stream stream(c);
    KVCache cache = filled_cache(stream, length);
    for (Tensor* table : {&stream.rope_cos, &stream.rope_sin}) {
      Tensor first(DType::kFloat32, {length + 2, c.dk / 2});
      assign(slice(*table, 0, 0, length + 2), first);
      *table = std::move(first);
    }
    DeviceSteps steps(stream, cache, 2, true);
    steps.advance(length);
    expect_ok(steps.step());
    steps.fetch();
    expect_ok(cache.check());
    EXPECT_EQ(cache.length(0), length + 2);
    KVCache before = cache;
    steps.advance(length + 2);
    expect_ok(steps.step());
    steps.fetch();
    EXPECT_EQ(cache.check().code(), StatusCode::kOutOfCapacity);
    expect_same_cache(cache, before);
    for (const double x : values_of(steps.o())) ASSERT_EQ(x, 0);
  }
}

}  // namespace
}  // namespace nsa::test
