// Which calls the kernels of compute capability 9.0 serve. Needs no device.
#include <gtest/gtest.h>

#include <initializer_list>
#include <tuple>

#include "cuda/portable/instances.h"
#include "cuda/sm90/heuristics.h"

namespace nsa::cuda::sm90 {
namespace {

AttentionDesc call() {
  AttentionDesc c;
  c.dtype = DType::kBFloat16;
  c.key_dim = c.value_dim = 128;
  c.group = 16;
  c.block_size = 64;
  c.topk = 16;
  c.selection = NSAConfig{};
  return c;
}

TEST(Heuristics, TheDefaultsHaveEveryKernel) {
  const Kernels k = choose_kernels(call());
  EXPECT_TRUE(k.range_forward && k.window_combine && k.compressed_select && k.selected_query_major);
  EXPECT_TRUE(k.range_d_q && k.range_d_kv && k.selected_d_q && k.selected_d_kv);
}

TEST(Heuristics, NoneForFloat32OrOtherGroupsOrLayouts) {
  AttentionDesc c = call();
  c.dtype = DType::kFloat32;
  EXPECT_FALSE(any(choose_kernels(c)));
  c = call(), c.group = 24;
  EXPECT_FALSE(any(choose_kernels(c)));
  c = call(), c.tma_compatible = false;
  EXPECT_FALSE(any(choose_kernels(c)));
}

TEST(Heuristics, EveryCallWithoutThemHasAReason) {
  EXPECT_EQ(unsupported_reason(call()), nullptr);
  EXPECT_EQ(selected_unsupported_reason(call()), nullptr);
  EXPECT_EQ(selection_unsupported_reason(call()), nullptr);
  AttentionDesc c = call();
  c.dtype = DType::kFloat32;
  EXPECT_STREQ(unsupported_reason(c), "neither bfloat16 nor float16");
  c = call(), c.key_dim = 80;
  EXPECT_STREQ(unsupported_reason(c), "head dims other than 64/64, 128/128 and 192/128");
  c = call(), c.topk = 65;
  EXPECT_STREQ(selected_unsupported_reason(c), "more than 64 blocks for a query");
  EXPECT_EQ(unsupported_reason(c), nullptr);
}

TEST(Heuristics, ADescriptionNamesTheKernelsOrTheReason) {
  const std::string defaults = describe_kernels({});
  EXPECT_NE(defaults.find("compressed_attention: sm90 range_attention"), std::string::npos) << defaults;
  EXPECT_NE(defaults.find("selected_attention: sm90 query-major or over unions, as the indices decide, d_q"),
            std::string::npos)
      << defaults;
  const std::string small = describe_kernels({.num_heads = 8});
  EXPECT_NE(small.find("selected_attention: sm90 block-major"), std::string::npos) << small;
  const std::string odd = describe_kernels({.key_dim = 80, .phi = CompressionKind::kMean});
  EXPECT_NE(odd.find("sliding_window_attention: portable kernels: head dims other"), std::string::npos) << odd;
  EXPECT_NE(odd.find("compress: portable kernels: the mean has no GEMM"), std::string::npos) << odd;
  EXPECT_EQ(describe_kernels({.num_heads = 6}), "num_kv_heads = 4: must divide num_heads = 6");
}

TEST(Heuristics, SmallGroups) {
  AttentionDesc c = call();
  for (int group = 1; group < 16; ++group) {
    c.group = group;
    const Kernels k = choose_kernels(c);
    EXPECT_TRUE(k.range_forward && k.compressed_select && (k.selected_query_major || k.selected_block_major)) << group;
    EXPECT_TRUE(k.range_d_q && k.range_d_kv && k.selected_d_q && k.selected_d_kv) << group;
  }
}

TEST(Heuristics, DsOfTheSelectionIsStoredForEvenGroups) {
  AttentionDesc c = call();
  for (const int group : {1, 2, 3, 4, 6, 7, 8, 12, 15, 16, 32, 64}) {
    c.group = group;
    EXPECT_EQ(choose_kernels(c).selected_d_q_of_ds != nullptr, group % 2 == 0) << group;
  }
  c = call(), c.block_size = 16;
  EXPECT_FALSE(choose_kernels(c).selected_d_q_of_ds);
}

TEST(Heuristics, LoopOrderOfSelectedAttention) {
  AttentionDesc c = call();
  for (const int group : {1, 2, 3, 4, 7, 8, 16, 32}) {
    c.group = group;
    EXPECT_EQ(choose_kernels(c).selected_block_major != nullptr, group <= 7) << group;
    EXPECT_EQ(choose_kernels(c).selected_query_major != nullptr, group >= 3) << group;  // with both the indices decide
  }
  // Tiles over unions: groups that fill 64 rows, lists that fit into shared memory.
  for (const auto& [group, topk, there] : {std::tuple{4, 16, false},
                                           {8, 42, true},
                                           {8, 43, false},
                                           {12, 16, false},
                                           {16, 16, true},
                                           {16, 64, true},
                                           {64, 32, true}}) {
    c.group = group, c.topk = topk;
    EXPECT_EQ(choose_kernels(c).selected_union != nullptr, there) << group << ", " << topk;
  }
  c = call(), c.group = 1, c.topk = 65;
  EXPECT_FALSE(choose_kernels(c).selected_block_major || choose_kernels(c).selected_query_major);
}

TEST(Heuristics, WideKeys) {
  if (!cuda::portable::attention_kernels(DType::kBFloat16, 192, 128))
    GTEST_SKIP() << "a build without kernels for keys of 192";
  AttentionDesc c = call();
  c.key_dim = 192;
  const Kernels k = choose_kernels(c);
  EXPECT_TRUE(k.range_forward && k.window_combine && k.compressed_select && k.selected_query_major);
  EXPECT_TRUE(k.range_d_q && k.range_d_kv && k.selected_d_q && k.selected_d_kv);
}

TEST(Heuristics, OtherBlocks) {
  AttentionDesc c = call();
  c.block_size = 16;
  const Kernels k = choose_kernels(c);
  EXPECT_TRUE(k.range_forward && k.range_d_q);
  EXPECT_FALSE(k.selected_query_major || k.selected_d_q || k.selected_d_kv);
}

TEST(Heuristics, CompressionAndSelectionBlocks) {
  AttentionDesc c = call();
  const auto selects = [&](int l, int d, int block_size) {
    c.selection->kernel_size = l, c.selection->kernel_stride = d, c.selection->block_size = block_size;
    return choose_kernels(c).compressed_select != nullptr;
  };
  for (const int d : {16, 32, 64}) {
    for (const int strides : {1, 2, 4, 8}) EXPECT_TRUE(selects(d, d, strides * d) && selects(2 * d, d, strides * d));
    EXPECT_TRUE(selects(3 * d, d, 4 * d) && selects(4 * d, d, 4 * d));
    EXPECT_TRUE(selects(2 * d, d, 3 * d) && selects(2 * d, d, 16 * d));
  }
  EXPECT_TRUE(selects(8, 4, 32) && selects(4, 4, 16));
  EXPECT_FALSE(selects(12, 4, 32) || selects(8, 4, 64));  // the scratch would be too large
  EXPECT_TRUE(selects(64 * 16, 16, 128 * 16));
  EXPECT_FALSE(selects(65 * 16, 16, 128 * 16));  // more keys to a block than a window has
}

TEST(Heuristics, LargeGroups) {
  AttentionDesc c = call();
  for (const int group : {32, 48, 192}) {
    c.group = group;
    EXPECT_TRUE(choose_kernels(c).compressed_select) << group;
  }
  c.group = 208;
  EXPECT_FALSE(choose_kernels(c).compressed_select);
}

TEST(Heuristics, ChunksBehindACache) {
  const ChunkDesc good{.attention = call(), .tokens = 8192};
  EXPECT_EQ(unsupported_reason(good), nullptr);
  const auto why = [&](const auto& change) {
    ChunkDesc c = good;
    change(c);
    return std::string(unsupported_reason(c) ? unsupported_reason(c) : "");
  };
  const std::string few = "few packed new tokens for so many sequences";
  EXPECT_EQ(why([](ChunkDesc& c) { c.sequences = 64; }), "");
  EXPECT_EQ(why([](ChunkDesc& c) { c.packed_rows = 200, c.tokens = 200; }), "");
  EXPECT_EQ(why([](ChunkDesc& c) { c.packed_rows = 8192, c.sequences = 16; }), "");
  EXPECT_EQ(why([&](ChunkDesc& c) { c.packed_rows = 8192, c.sequences = 17; }), few);
  EXPECT_EQ(why([](ChunkDesc& c) { c.tokens = 127; }), "few new tokens");
  EXPECT_EQ(why([](ChunkDesc& c) { c.tokens = 128; }), "");
  EXPECT_EQ(why([](ChunkDesc& c) { c.attention.dtype = DType::kFloat32; }), "neither bfloat16 nor float16");
  EXPECT_EQ(why([](ChunkDesc& c) { c.attention.block_size = 16; }), "blocks other than of 32, 64 or 128 tokens");
  EXPECT_EQ(why([](ChunkDesc& c) { c.attention.selection->kernel_size = 48; }), "");
  EXPECT_EQ(
      why([](ChunkDesc& c) { c.attention.selection->kernel_size = 12, c.attention.selection->kernel_stride = 4; }),
      "a stride of compression below 8");
}

TEST(Heuristics, Compression) {
  const CompressDesc good{DType::kBFloat16, CompressionKind::kMlp, 128, 256, 1600, true};
  EXPECT_TRUE(choose_kernels(good).compress);
  CompressDesc c = good;
  c.kind = CompressionKind::kLinear, c.hidden = 128;
  EXPECT_TRUE(choose_kernels(c).compress);
  for (const auto& change : std::initializer_list<void (*)(CompressDesc&)>{
           [](CompressDesc& c) { c.kind = CompressionKind::kMean; }, [](CompressDesc& c) { c.dim = 96; },
           [](CompressDesc& c) { c.hidden = 520; }, [](CompressDesc& c) { c.hidden = 20; },
           [](CompressDesc& c) { c.dtype = DType::kFloat32; }, [](CompressDesc& c) { c.rows = 0; },
           [](CompressDesc& c) { c.tma_compatible = false; }}) {
    c = good, change(c);
    EXPECT_FALSE(choose_kernels(c).compress);
  }
}

TEST(Heuristics, TilesOfCompressedRows) {
  const auto rows = [](std::int64_t segments, std::int64_t hidden = 256) {
    return compress::compress_tile_rows(true, 128, hidden, segments, 8, 132);
  };
  EXPECT_EQ(rows(32), 64);    // 8k tokens: twice as many SMs
  EXPECT_EQ(rows(128), 128);  // one round of 128 rows, or two of 64
  EXPECT_EQ(rows(256), 128);
  EXPECT_EQ(rows(256, 384), 64);  // too many accumulators for 128 rows
  EXPECT_EQ(compress::compress_tile_rows(false, 128, 128, 32, 8, 132), 128);
}

StepDesc step() {
  StepDesc d;
  d.key_dim = d.value_dim = 128;
  d.group = 16, d.capacity = 65536;
  d.hidden_k = d.hidden_v = 256;
  return d;
}

TEST(Heuristics, StepsOfTheDefaultsHaveTwoKernels) {
  const StepKernels k = choose_kernels(step());
  EXPECT_TRUE(k.attend && k.append_compress);
  StepDesc d = step();
  d.float8 = true;
  const StepKernels float8 = choose_kernels(d);
  EXPECT_TRUE(float8.attend && float8.attend != k.attend && float8.append_compress == k.append_compress);
  const std::string defaults = describe_kernels({});
  EXPECT_NE(defaults.find("decode: sm90 append_compress and step_attend"), std::string::npos) << defaults;
  EXPECT_NE(defaults.find("prefill: sm90 as nsa_attention"), std::string::npos) << defaults;
}

TEST(Heuristics, StepsOfEveryGroupHaveThem) {
  for (const bool float8 : {false, true})
    for (const int group : {1, 5, 16, 17, 32, 33, 48, 64, 80, 128}) {
      StepDesc d = step();
      d.float8 = float8, d.group = group;
      EXPECT_EQ(unsupported_reason(d), nullptr) << group;
      const StepKernels k = choose_kernels(d);
      EXPECT_TRUE(k.attend && k.append_compress) << group;
      EXPECT_EQ(decode::step_tiles(group), group > 16 ? 2 : 1);
      EXPECT_EQ(decode::step_clusters(group), (group + 31) / 32);
    }
}

TEST(Heuristics, EveryStepWithoutThemHasAReason) {
  const auto with = [](auto&& change) {
    StepDesc d = step();
    change(d);
    return d;
  };
  EXPECT_STREQ(unsupported_reason(with([](auto& d) { d.dtype = DType::kFloat32; })), "neither bfloat16 nor float16");
  EXPECT_STREQ(unsupported_reason(with([](auto& d) { d.key_dim = 80; })),
               "head dims other than 64/64, 128/128 and 192/128");
  EXPECT_STREQ(unsupported_reason(with([](auto& d) { d.cfg.block_size = 48; })),
               "blocks other than of 32, 64 or 128 tokens");
  EXPECT_STREQ(unsupported_reason(with([](auto& d) { d.cfg.topk = 65; })), "more than 64 blocks for a query");
  EXPECT_STREQ(unsupported_reason(with([](auto& d) { d.cfg.kernel_stride = 64, d.cfg.kernel_size = 64; })),
               "blocks of less than 2 or more than 16 compressed keys");
  EXPECT_STREQ(unsupported_reason(with([](auto& d) { d.cfg.kernel_size = 96; })),
               "compression blocks longer than a selection block and a stride");
  EXPECT_STREQ(unsupported_reason(with([](auto& d) { d.tma_compatible = false; })),
               "addresses or strides that are no multiples of 16 bytes, or strides of more than 2 GiB");
  EXPECT_STREQ(unsupported_reason(with([](auto& d) { d.capacity = 1 << 24; })),
               "a cache of too many tokens for a sequence");
  const StepDesc odd = with([](auto& d) { d.hidden_k = 320; });
  EXPECT_EQ(unsupported_reason(odd), nullptr);
  EXPECT_NE(append_compress_unsupported_reason(odd), nullptr);
  EXPECT_TRUE(choose_kernels(odd).attend && !choose_kernels(odd).append_compress);
}

TEST(Heuristics, ClustersAreSmallerWhereThereAreManyQueries) {
  using Shape = std::pair<int, int>;  // thread blocks of a cluster, warps
  const auto shape = [](std::int64_t queries, auto&& change) {
    StepDesc d = step();
    d.queries = queries;
    change(d);
    EXPECT_EQ(unsupported_reason(d), nullptr);
    EXPECT_EQ(choose_kernels(d).shape, cluster_shape(d));
    return Shape(cluster_shape(d).ranks, cluster_shape(d).warps);
  };
  const auto of = [&](std::int64_t queries) { return shape(queries, [](auto&) {}); };
  const Shape invariant(8, 4);
  EXPECT_EQ(of(1), Shape(8, 8));
  EXPECT_EQ(of(15), Shape(8, 8));  // as many as an H100 or H200 holds at once
  EXPECT_EQ(of(16), Shape(4, 8));
  EXPECT_EQ(of(30), Shape(4, 8));
  EXPECT_EQ(of(32), Shape(8, 4));
  EXPECT_EQ(of(45), Shape(8, 4));
  EXPECT_EQ(of(64), Shape(2, 8));
  EXPECT_EQ(of(66), Shape(2, 8));
  for (const std::int64_t queries : {67, 128, 132, 133, 2048}) EXPECT_EQ(of(queries), Shape(1, 8));
  for (const std::int64_t queries : {1, 4, 32, 128, 2048})
    EXPECT_EQ(shape(queries, [](auto& d) { d.batch_invariant = true; }), invariant);
  // Thread blocks of two tiles, and of e4m3, which take half of the memory.
  const auto pairs = [](auto& d) { d.group = 20; };
  EXPECT_EQ(shape(4, pairs), invariant);
  EXPECT_EQ(shape(64, pairs), Shape(2, 8));
  EXPECT_EQ(shape(128, [](auto& d) { d.float8 = true; }), Shape(2, 8));
  // What a thread block caches for the selection leaves no space for smaller clusters.
  const auto capacity = [&](std::int64_t queries, std::int64_t tokens) {
    return shape(queries, [&](auto& d) { d.capacity = tokens; });
  };
  EXPECT_EQ(capacity(128, 131072), Shape(2, 8));
  EXPECT_EQ(capacity(128, 262144), Shape(8, 4));
  EXPECT_EQ(capacity(4, 1 << 20), Shape(8, 4));
  EXPECT_EQ(shape(4, [](auto& d) { d.num_sms = 7; }), Shape(1, 8));
}

TEST(Heuristics, LongSequencesAreFirstWhereClustersWait) {
  StepDesc d = step();
  const auto longest_first = [&](std::int64_t queries, std::int64_t capacity) {
    d.queries = queries, d.capacity = capacity;
    return choose_kernels(d).longest_first;
  };
  EXPECT_FALSE(longest_first(1, 65536));
  EXPECT_FALSE(longest_first(132, 65536));
  EXPECT_TRUE(longest_first(133, 65536));
  EXPECT_TRUE(longest_first(128, 131072));  // clusters of two thread blocks, of which 66 are there at once
}

TEST(Heuristics, TwoKeyTilesAtOnceWhereFaster) {
  StepDesc d = step();
  const auto key_tiles = [&](std::int64_t queries) {
    d.queries = queries;
    return choose_kernels(d).shape.key_tiles;
  };
  EXPECT_EQ(key_tiles(1), 2);
  EXPECT_EQ(key_tiles(32), 1);   // 8 x 4
  EXPECT_EQ(key_tiles(66), 2);   // 2 x 8
  EXPECT_EQ(key_tiles(132), 1);  // 1 x 8, all at once
  EXPECT_EQ(key_tiles(133), 2);
  d.float8 = true;
  for (const std::int64_t queries : {1, 32, 66, 132, 133}) EXPECT_EQ(key_tiles(queries), 2);  // clusters
  d.capacity = 8192;
  EXPECT_EQ(key_tiles(133), 1);  // 1 x 8, two thread blocks on an SM
  d = step();
  d.key_dim = 192;
  for (const std::int64_t queries : {1, 32, 66, 132, 133}) EXPECT_EQ(key_tiles(queries), 1);
  d.key_dim = 128, d.group = 20;
  for (const std::int64_t queries : {1, 32, 66, 132, 133}) EXPECT_EQ(key_tiles(queries), 1);
}

TEST(Heuristics, QueriesShareWhatTheyReadWhereThereAreMany) {
  const auto shares = [](std::int64_t queries, std::int64_t tokens, auto&& change) {
    StepDesc d = step();
    d.queries = queries, d.tokens = tokens, d.chooses = false;
    change(d);
    EXPECT_EQ(unsupported_reason(d), nullptr);
    EXPECT_EQ(choose_kernels(d).shape, cluster_shape(d));
    return cluster_shape(d) == decode::kSharedQueries;
  };
  const auto of = [&](std::int64_t queries, std::int64_t tokens) { return shares(queries, tokens, [](auto&) {}); };
  const auto with = [&](auto&& change) { return shares(2048, 16, change); };
  EXPECT_TRUE(of(2048, 16));
  EXPECT_TRUE(of(512, 4));
  EXPECT_FALSE(of(512, 2));  // half of the rows would be idle
  EXPECT_FALSE(of(512, 1));
  EXPECT_TRUE(of(200, 4));
  EXPECT_FALSE(of(198, 4));  // the thread blocks of single queries are done sooner
  const auto choosing = [](auto& d) { d.chooses = true; };
  EXPECT_TRUE(shares(2048, 16, choosing));
  EXPECT_TRUE(shares(332, 4, choosing));
  EXPECT_FALSE(shares(330, 4, choosing));  // the compressed keys are multiplied twice
  EXPECT_TRUE(with([](auto& d) { d.key_dim = d.value_dim = 64; }));
  EXPECT_TRUE(with([](auto& d) { d.group = 1; }));
  EXPECT_TRUE(with([](auto& d) { d.capacity = 131072; }));
  EXPECT_FALSE(with([](auto& d) { d.capacity = 262144; }));
  EXPECT_FALSE(with([](auto& d) { d.group = 17; }));
  EXPECT_FALSE(with([](auto& d) { d.key_dim = 192; }));
  EXPECT_FALSE(with([](auto& d) { d.float8 = true; }));
  EXPECT_FALSE(with([](auto& d) { d.batch_invariant = true; }));
  StepDesc d = step();
  d.chooses = false, d.queries = 512, d.tokens = 4;  // 128 thread blocks
  EXPECT_FALSE(choose_kernels(d).longest_first);
  d.tokens = 16;
  EXPECT_FALSE(choose_kernels(d).longest_first);
  d.tokens = 5;  // two thread blocks for the five queries of a sequence
  EXPECT_TRUE(choose_kernels(d).longest_first);
}

TEST(Heuristics, LargeGroupsWantShorterCaches) {
  StepDesc d = step();
  const auto longest = [&](std::int64_t group) {
    d.group = group;
    for (d.capacity = 1 << 14; unsupported_reason(d) == nullptr;) d.capacity *= 2;
    return d.capacity / 2;
  };
  EXPECT_GE(longest(16), 1 << 20);
  EXPECT_GE(longest(32), 1 << 19);
  EXPECT_LT(longest(32), longest(16));
  EXPECT_GE(longest(64), 1 << 18);
  EXPECT_GE(longest(128), 1 << 17);
  EXPECT_LT(longest(128), longest(33));
}

}  // namespace
}  // namespace nsa::cuda::sm90

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
