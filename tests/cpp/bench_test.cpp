// What the benchmark says of its tasks: costs against counts by loops, given selections, peers' times.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "bench/costs.h"
#include "bench/peers.h"
#include "bench/recorded_blocks.h"
#include "bench/selection.h"

namespace nsa::bench {
namespace {

constexpr std::int64_t kLength = 333;

/// Nothing is equal to anything else, so that no two numbers can be mistaken for each other.
bench::Dims small_dims() {
  Dims dims{.num_heads = 6, .num_kv_heads = 2, .head_dim = 24, .v_head_dim = 16, .bfloat16 = false};
  dims.nsa = {.kernel_size = 8,
              .kernel_stride = 4,
              .block_size = 16,
              .topk = 5,
              .init_blocks = 1,
              .local_blocks = 2,
              .window_size = 37};
  return dims;
}

/// Pairs of one head that see each other, found one by one.
struct Pairs {
  double compressed = 0, selected = 0, window = 0, causal = 0;
};

Pairs count_pairs(const Dims& dims) {
  const auto& cfg = dims.nsa;
  const auto chosen = chosen_blocks(Selection::kRandom, cfg, kLength, 1);
  Pairs pairs;
  for (std::int64_t t = 0; t < kLength; ++t) {
    for (std::int64_t i = 0; i * cfg.kernel_stride + cfg.kernel_size <= kLength; ++i)
      pairs.compressed += i * cfg.kernel_stride + cfg.kernel_size - 1 <= t;
    const auto* const row = &chosen[static_cast<std::size_t>(t * cfg.topk)];
    for (std::int64_t u = 0; u <= t; ++u) {
      pairs.causal += 1;
      pairs.window += t - u < cfg.window_size;
      pairs.selected += std::find(row, row + cfg.topk, u / cfg.block_size) != row + cfg.topk;
    }
  }
  return pairs;
}

/// GFLOP of products with these numbers of channels, each a multiplication and an addition per pair, head and channel.
double products(double pairs, std::initializer_list<std::int64_t> channels) {
  double flop = 0;
  for (const auto c : channels) {
    for (std::int64_t head = 0; head < small_dims().num_heads; ++head) flop += 2 * pairs * static_cast<double>(c);
  }
  return 1e-9 * flop;
}

TEST(BenchCosts, CountsTheProductsOfVisiblePairs) {
  const auto dims = small_dims();
  const auto pairs = count_pairs(dims);
  const Costs costs(dims, kLength);
  const auto dk = dims.head_dim, dv = dims.v_head_dim;
  const auto expect = [&](const char* name, double gflop) { EXPECT_NEAR(costs.of(name).gflop, gflop, 1e-12) << name; };
  expect("compressed_attention", products(pairs.compressed, {dk, dv}));
  expect("select_blocks", products(pairs.compressed, {dk}));
  expect("selected_attention", products(pairs.selected, {dk, dv}));
  expect("sliding_window_attention", products(pairs.window, {dk, dv}));
  expect("dense_forward", products(pairs.causal, {dk, dv}));
  // S, dP, dV, dQ, dK.
  expect("compressed_attention_backward", products(pairs.compressed, {dk, dv, dv, dk, dk}));
  expect("selected_attention_backward", products(pairs.selected, {dk, dv, dv, dk, dk}));
  expect("sliding_window_attention_backward", products(pairs.window, {dk, dv, dv, dk, dk}));
  expect("dense_forward_backward", products(pairs.causal, {dk, dv, dk, dv, dv, dk, dk}));
  // Stages on their own: S and dP in both.
  expect("selected attention: dQ", products(pairs.selected, {dk, dv, dk}));
  expect("selected attention: dK, dV", products(pairs.selected, {dk, dv, dv, dk}));
  expect("compressed attention: dK, dV", products(pairs.compressed, {dk, dv, dv, dk}));
  expect("sliding window: dK, dV", products(pairs.window, {dk, dv, dv, dk}));
  expect("compressed and window: dQ", products(pairs.compressed + pairs.window, {dk, dv, dk}));

  const double all = pairs.compressed + pairs.selected + pairs.window;
  const auto compress = costs.of("compress", CompressionKind::kMlp),
             back = costs.of("compress_backward", CompressionKind::kMlp);
  EXPECT_NEAR(costs.of("forward", CompressionKind::kMlp).gflop, products(all, {dk, dv}) + compress.gflop, 1e-12);
  EXPECT_NEAR(costs.of("forward_backward", CompressionKind::kMlp).gflop,
              products(all, {dk, dv, dk, dv, dv, dk, dk}) + compress.gflop + back.gflop, 1e-12);
  EXPECT_THROW(costs.of("anything else"), std::logic_error);
}

TEST(BenchCosts, CountsThePhiOfEveryBlock) {
  const auto dims = small_dims();
  const Costs costs(dims, kLength);
  double mean = 0, linear = 0, mlp = 0, mlp_backward = 0;
  for (std::int64_t i = 0; i * dims.nsa.kernel_stride + dims.nsa.kernel_size <= kLength; ++i) {
    for (std::int64_t head = 0; head < dims.num_kv_heads; ++head) {
      for (const auto d : {dims.head_dim, dims.v_head_dim}) {
        const auto token = static_cast<double>(d), flat = token * dims.nsa.kernel_size;
        mean += flat;
        linear += 2 * flat * token;
        mlp += 2 * flat * 2 * token + 2 * 2 * token * token;
        mlp_backward += 3 * 2 * flat * 2 * token + 2 * 2 * 2 * token * token;
      }
    }
  }
  EXPECT_NEAR(costs.of("compress").gflop, 1e-9 * mean, 1e-12);
  EXPECT_NEAR(costs.of("compress", CompressionKind::kLinear).gflop, 1e-9 * linear, 1e-12);
  EXPECT_NEAR(costs.of("compress_backward", CompressionKind::kLinear).gflop, 2e-9 * linear, 1e-12);
  EXPECT_NEAR(costs.of("compress", CompressionKind::kMlp).gflop, 1e-9 * mlp, 1e-12);
  EXPECT_NEAR(costs.of("compress_backward", CompressionKind::kMlp).gflop, 1e-9 * mlp_backward, 1e-12);
}

TEST(BenchCosts, CountsTheBytesOfEveryTensorOnce) {
  const auto dims = small_dims();
  const Costs costs(dims, kLength);
  const std::int64_t h = dims.num_heads, kv = dims.num_kv_heads, dk = dims.head_dim, dv = dims.v_head_dim;
  const std::int64_t blocks = dims.nsa.num_compressed(kLength);
  const std::int64_t q = kLength * h * dk * 4, o = kLength * h * dv * 4, gates = kLength * h * 3 * 4;
  const std::int64_t k = kLength * kv * dk * 4, v = kLength * kv * dv * 4, row = kLength * h * 4;
  const std::int64_t k_c = blocks * kv * dk * 4, v_c = blocks * kv * dv * 4, indices = kLength * kv * 5 * 4;
  const auto expect = [&](const char* name, std::int64_t bytes) { EXPECT_EQ(costs.of(name).bytes, bytes) << name; };
  expect("compress", k + v + k_c + v_c);
  expect("compressed_attention", q + k_c + v_c + o + row);
  expect("select_blocks", q + k_c + row + indices);
  expect("selected_attention", q + k + v + indices + o + row);
  expect("sliding_window_attention", q + k + v + o + row);
  expect("combine", 3 * o + gates + o);
  expect("selected_attention_backward", q + k + v + indices + o + row + o + q + k + v);
  expect("forward", q + k + v + gates + o);
  expect("forward_backward", q + k + v + gates + o + o + q + k + v + gates);
  expect("dense_forward", q + k + v + o);
  expect("compressed attention, selection", q + k_c + v_c + o + row + indices);
  expect("sliding window, combine", q + k + v + o + o + gates + o);
  expect("gates, row terms", o + 3 * o + gates + gates + 6 * row);
  expect("selected attention: dQ", q + o + k + v + indices + 3 * row + q);
  expect("sliding window: dK, dV", q + o + k + v + 3 * row + k + v);
  expect("compressed and window: dQ", q + o + k_c + v_c + k + v + 6 * row + q + q);
  const auto pairs = count_pairs(dims);
  EXPECT_EQ(costs.of("selected_attention").gathered, static_cast<std::int64_t>(pairs.selected) * kv * (dk + dv) * 4);
}

TEST(BenchSelection, ChoosesAscendingBlocksWithTheForcedOnes) {
  const NSAConfig cfg;
  constexpr std::int64_t length = 8192, heads = 2;
  for (const auto selection : {Selection::kRandom, Selection::kClustered, Selection::kModelLike}) {
    const auto all = chosen_blocks(selection, cfg, length, heads);
    ASSERT_EQ(all.size(), static_cast<std::size_t>(length * heads * cfg.topk));
    for (std::int64_t row = 0; row < length * heads; ++row) {
      const auto begin = all.begin() + row * cfg.topk, end = begin + cfg.topk;
      const auto own = static_cast<std::int32_t>(row / heads / cfg.block_size);
      const std::set<std::int32_t> blocks(begin, std::find(begin, end, -1));
      ASSERT_EQ(static_cast<std::int32_t>(blocks.size()), std::min(own + 1, cfg.topk)) << row;
      ASSERT_TRUE(std::equal(blocks.begin(), blocks.end(), begin)) << row;
      ASSERT_TRUE(blocks.count(0) && blocks.count(own) && blocks.count(std::max(0, own - 1))) << row;
      ASSERT_LE(*blocks.rbegin(), own) << row;
    }
  }
  EXPECT_TRUE(chosen_blocks(Selection::kOwn, cfg, length, heads).empty());
}

double overlap_of(Selection selection, const NSAConfig& cfg, std::int64_t length, double target = kModelOverlap) {
  constexpr std::int64_t kv_heads = 2;
  const auto blocks = chosen_blocks(selection, cfg, length, kv_heads, target);
  return neighbour_overlap(blocks, cfg, kv_heads).value();
}

TEST(BenchSelection, OverlapCountsForcedBlocksOfQueriesWithAChoice) {
  const NSAConfig cfg{.block_size = 16, .topk = 3};
  const std::int64_t length = 66, choice = 48;  // 3 blocks of 16 are no choice
  std::vector<std::int32_t> blocks(static_cast<std::size_t>(length * 2 * 3), -1);
  const auto set = [&](std::int64_t t, std::int64_t head, std::initializer_list<std::int32_t> row) {
    std::copy(row.begin(), row.end(), blocks.begin() + (t * 2 + head) * 3);
  };
  EXPECT_FALSE(neighbour_overlap(std::span(blocks).first(choice * 2 * 3), cfg, 2));
  for (std::int64_t t = 0; t < length; ++t) {
    for (const std::int64_t head : {0, 1}) set(t, head, {0, 1, 2});
  }
  EXPECT_EQ(neighbour_overlap(blocks, cfg, 2), 1);
  set(50, 0, {0, 2, 3});  // differs from the query before and from the query behind
  set(65, 1, {0, 3, 4});
  EXPECT_DOUBLE_EQ(neighbour_overlap(blocks, cfg, 2).value(), 1 - 4. / (18 * 2 * 3));
}

TEST(BenchSelection, NeighboursShareThreeQuartersWhereTheyAreClustered) {
  EXPECT_LT(overlap_of(Selection::kRandom, {}, 32768), 0.33);
  EXPECT_NEAR(overlap_of(Selection::kClustered, {}, 32768), 0.75, 0.02);
}

TEST(BenchSelection, ModelLikeNeighboursShareWhatIsAskedFor) {
  const NSAConfig paper, recipe{.kernel_size = 8, .kernel_stride = 8, .block_size = 32, .topk = 32};
  for (const auto& cfg : {paper, recipe}) {
    for (const double target : {0.66, 0.8, 0.94}) {
      EXPECT_NEAR(overlap_of(Selection::kModelLike, cfg, 4096, target), target, 0.005);
    }
    EXPECT_NEAR(overlap_of(Selection::kModelLike, cfg, 32768), 0.8, 0.005);
  }
  const NSAConfig unforced{.topk = 4, .init_blocks = 0, .local_blocks = 1};
  EXPECT_NEAR(overlap_of(Selection::kModelLike, unforced, 16384, 0.5), 0.5, 0.01);
}

TEST(BenchSelection, ModelLikeReachesFromRandomToTheSameBlocks) {
  const double random = overlap_of(Selection::kRandom, {}, 4096);
  EXPECT_GT(random, 0.5);
  EXPECT_NEAR(overlap_of(Selection::kModelLike, {}, 4096, 0.1), random, 0.01);
  EXPECT_NEAR(overlap_of(Selection::kModelLike, {}, 4096, random + 0.02), random + 0.02, 0.003);
  EXPECT_GT(overlap_of(Selection::kModelLike, {}, 4096, 1), 0.995);  // all but the own block where it begins
}

TEST(BenchSelection, ChoosesForTheLastQueriesAlone) {
  const NSAConfig cfg;
  constexpr std::int64_t first = 20000, length = first + 16, heads = 8;
  for (const auto selection : {Selection::kRandom, Selection::kClustered, Selection::kModelLike}) {
    const auto last = chosen_blocks(selection, cfg, length, heads, 0.8, first);
    ASSERT_EQ(last.size(), static_cast<std::size_t>((length - first) * heads * cfg.topk));
    for (std::size_t i = 0; i < last.size(); ++i) ASSERT_TRUE(last[i] >= 0 && last[i] <= (length - 1) / cfg.block_size);
    if (selection == Selection::kModelLike) {
      EXPECT_NEAR(neighbour_overlap(last, cfg, heads, first).value(), 0.8, 0.03);
    } else {
      const auto all = chosen_blocks(selection, cfg, length, heads);
      EXPECT_TRUE(std::equal(last.rbegin(), last.rend(), all.rbegin()));
    }
  }
  EXPECT_TRUE(chosen_blocks(Selection::kModelLike, cfg, first, heads, 0.8, first).empty());
}

class RecordedBlocksTest : public testing::Test {
 protected:
  ~RecordedBlocksTest() override { std::remove(path_.c_str()); }

  void write(std::vector<std::int32_t> blocks, std::int64_t kv_heads = 2) {
    const auto length = static_cast<std::int64_t>(blocks.size()) / (kv_heads * 3);
    const RecordedBlocks recorded{.length = length, .kv_heads = kv_heads, .topk = 3, .blocks = std::move(blocks)};
    write_blocks(path_, {{4, recorded}}, cfg_);
  }
  std::string refusal(int layer, const NSAConfig& cfg) {
    try {
      read_blocks(path_, layer, cfg);
    } catch (const base::Error& error) {
      return error.what();
    }
    return "";
  }

  const NSAConfig cfg_{.block_size = 16, .topk = 3};
  std::string path_ = testing::TempDir() + "recorded_blocks_test.safetensors";
};

TEST_F(RecordedBlocksTest, ReplaysALayerForAnyNumberOfHeads) {
  const auto blocks = chosen_blocks(Selection::kModelLike, cfg_, 500, 2);
  write(blocks);
  const auto recorded = read_blocks(path_, 4, cfg_);
  EXPECT_EQ(recorded.of(500, 2), blocks);
  const auto wide = recorded.of(300, 3);
  ASSERT_EQ(wide.size(), 300u * 3 * 3);
  for (std::size_t t = 0; t < 300; ++t) {
    for (std::size_t i = 0; i < 3; ++i) {
      ASSERT_EQ(wide[t * 9 + 3 + i], blocks[t * 6 + 3 + i]);
      ASSERT_EQ(wide[t * 9 + 6 + i], blocks[t * 6 + i]);
    }
  }
}

TEST_F(RecordedBlocksTest, RefusesBlocksOfAnotherShape) {
  EXPECT_NE(refusal(4, cfg_).find("recorded_blocks_test.safetensors"), std::string::npos);  // no file
  write({0, -1, -1, 0, -1, -1});
  EXPECT_EQ(refusal(4, cfg_), "");
  EXPECT_NE(refusal(0, cfg_).find("has no tensor layers.0"), std::string::npos);
  EXPECT_NE(refusal(4, {.block_size = 32, .topk = 3}).find("block_size = 16, here it is 32"), std::string::npos);
  EXPECT_NE(refusal(4, {.block_size = 16, .topk = 4}).find("topk = 3, here it is 4"), std::string::npos);
  write({0, -1, -1, 0, 1, -1});
  EXPECT_NE(refusal(4, cfg_).find("query 0 has block 1: must be at most 0, or -1"), std::string::npos);
}

/// Four queries of MiniMax-M3 have 22.1 blocks in all where neighbours share 0.874 (vLLM #55372).
TEST(BenchSelection, FourModelLikeQueriesHaveTheUnionOfAModel) {
  const NSAConfig cfg{.block_size = 128};
  constexpr std::int64_t length = 32768;
  const auto blocks = chosen_blocks(Selection::kModelLike, cfg, length, 1, 0.874);
  double all = 0, tiles = 0;
  for (std::int64_t t = cfg.topk * cfg.block_size; t < length; t += 4, ++tiles) {
    const auto begin = blocks.begin() + t * cfg.topk;
    all += static_cast<double>(std::set<std::int32_t>(begin, begin + 4 * cfg.topk).size());
  }
  EXPECT_NEAR(all / tiles, 22.1, 0.5);
}

class BenchPeersTest : public testing::Test {
 protected:
  ~BenchPeersTest() override { std::remove(path_.c_str()); }

  void write(const std::string& settings, const std::string& stages) {
    std::ofstream(path_) << R"({"gpu": "GPU", "settings": {"num_heads": 16, "num_kv_heads": 1, "head_dim": 128, )"
                         << R"("v_head_dim": 128, "dtype": "bfloat16")" << settings << R"(}, "lengths": {"64": )"
                         << R"({"stages": {)" << stages << "}}}}";
  }
  std::string refusal(const Dims& dims, const std::string& gpu) {
    try {
      Peers(path_, dims, gpu);
    } catch (const base::Error& error) {
      return error.what();
    }
    return "";
  }

  std::string path_ = testing::TempDir() + "bench_peers_test.json";
};

TEST_F(BenchPeersTest, TellsTheFastestOfThoseWhoHaveAllParts) {
  write("", R"("sliding window": {"nsa": {"forward": 1}, "a": {"forward": 3}, "b": {"forward": 2},
                                  "c": {"forward": 1}},
               "combine": {"nsa": {"forward": 1}, "a": {"forward": 1}, "b": {"forward": 4}},
               "end to end, random": {"nsa": {"forward": 1, "backward": 1}, "a": {"forward": 9, "backward": null},
                                 "b": {"forward": 10, "backward": 20}})");
  const Peers peers(path_, Dims{}, "GPU, compute capability 9.0");
  const auto best = [&](const char* op, Selection selection = Selection::kOwn) {
    const auto found = peers.best(op, 64, selection);
    return found ? found->name + " " + std::to_string(found->seconds).substr(0, 5) : "none";
  };
  EXPECT_EQ(best("sliding window, combine"), "a 0.004");
  EXPECT_EQ(best("sliding_window_attention"), "c 0.001");
  EXPECT_EQ(best("forward"), "a 0.009");
  EXPECT_EQ(best("forward_backward"), "b 0.030");
  EXPECT_EQ(best("forward", Selection::kClustered), "none");
  EXPECT_EQ(best("selected attention: dQ"), "none");
  EXPECT_FALSE(peers.best("forward", 128, Selection::kOwn));
}

TEST_F(BenchPeersTest, RefusesWhatIsNotAboutTheSame) {
  EXPECT_NE(refusal({}, "GPU").find("cannot be read"), std::string::npos);
  write("", "");
  EXPECT_EQ(refusal({}, "GPU"), "");
  EXPECT_NE(refusal({}, "another").find("measured on GPU, not on this device"), std::string::npos);
  EXPECT_NE(refusal({.num_kv_heads = 4}, "GPU").find("num_kv_heads = 1, here it is 4"), std::string::npos);
  std::ofstream(path_) << "{}";
  EXPECT_NE(refusal({}, "GPU").find("not a result of bench/peers/peers.py"), std::string::npos);
}

}  // namespace
}  // namespace nsa::bench
