// How d_kv cuts the queries of the compressed branch: every query that sees a key tile is in one item of it, and the
// partial sums are added in the same order whether dS is stored in few spans or in many or (as in a packed call) not at
// all. Sums are their own formulas here. Needs no device.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/operations/query_spans.h"
#include "cuda/portable/d_kv_items.cuh"

namespace nsa::cuda::portable {
namespace {

std::string plus(const std::string& a, const std::string& b) {
  return a.empty() ? b : b.empty() ? a : "(" + a + "+" + b + ")";
}
std::string queries(int begin, int end) { return begin < end ? std::to_string(begin) + "-" + std::to_string(end) : ""; }

Geometry geometry_of(int group, int q_len, int k_len) {
  Geometry g;
  g.batches = 1;
  g.kv_heads = 2;
  g.group = group;
  g.heads = 2 * group;
  g.q_len = q_len;
  g.k_len = k_len;
  return g;
}

/// The sum of every key tile as d_kv and sum_partials make it, span by span. `seen`: [tile][query], how often.
std::vector<std::string> in_spans(const Geometry& g, std::int64_t ds_budget, std::vector<std::vector<int>>& seen) {
  const auto tiles = static_cast<std::size_t>(DsBuffer::key_tiles(g));
  std::vector<std::string> sums(tiles), chunk_sums(tiles), results(tiles);
  seen.assign(tiles, std::vector<int>(static_cast<std::size_t>(g.q_len)));
  for (const QuerySpan& span : spans_of(g, ds_budget)) {
    float here = 0;
    BackwardArgs args{};
    args.geometry = span_of(g, span);
    args.ds_buffer.q_len = g.q_len;
    args.ds_buffer.sums = &here;
    args.ds_buffer.first = span.first;
    cut(args);
    const DeviceSequence seq{0, 0, 0, args.geometry.q_len, 0, args.geometry.k_len};
    const int key_count = num_compressed(g, seq.k_len);
    std::map<std::int64_t, std::string> partials;
    for (int x = 0; x < args.items; ++x) {
      const KeyTile t = range_item(args, seq, key_count, x);
      if (t.count == 0) continue;
      EXPECT_EQ(t.query_begin * g.group % 32, 0);  // tiles of dS
      EXPECT_LT(t.partial + t.item, args.partial_items);
      const auto [place, fresh] =
          partials.emplace(t.partial + t.item, queries(span.first + t.query_begin, span.first + t.query_end));
      EXPECT_TRUE(fresh);
      for (int i = t.query_begin; i < t.query_end; ++i)
        ++seen[static_cast<std::size_t>(t.first / kKeyTile)][static_cast<std::size_t>(span.first + i)];
    }
    const int small = small_chunk(g.q_len), chunk = range_chunk(0, g.q_len);
    const int end = (span.first + seq.q_len + small - 1) / small * small;
    for (int x = 0; x < args.items; ++x) {
      const KeyTile t = range_item(args, seq, key_count, x);
      if (t.count == 0 || t.item != 0) continue;
      const auto tile = static_cast<std::size_t>(t.first / kKeyTile);
      for (int i = t.items - 1; i >= 0; --i) {
        const int query = end - (i + 1) * small;
        if (query % chunk == 0) chunk_sums[tile].clear();
        chunk_sums[tile] = plus(chunk_sums[tile], partials.at(t.partial + i));
        if ((query + small) % chunk == 0 || query + small >= g.q_len) sums[tile] = plus(sums[tile], chunk_sums[tile]);
      }
      if (span.first + seq.q_len == g.q_len) results[tile] = sums[tile];
    }
  }
  return results;
}

/// The same at once: an item adds its small chunks itself.
std::vector<std::string> at_once(const Geometry& g) {
  BackwardArgs args{};
  args.geometry = g;
  args.chunks = max_range_chunks(0, g.q_len);
  args.items = args.items_before(end_prefix(g));
  const DeviceSequence seq{0, 0, 0, g.q_len, 0, g.k_len};
  const int key_count = num_compressed(g, g.k_len), small = small_chunk(g.q_len);
  std::vector<std::map<int, std::string>> sums(static_cast<std::size_t>(DsBuffer::key_tiles(g)));  // by item
  for (int x = 0; x < args.items; ++x) {
    const KeyTile t = range_item(args, seq, key_count, x);
    if (t.count == 0) continue;
    std::string sum;
    int begin = t.query_begin;
    for (int i = begin + 1; i < t.query_end; ++i)
      if (i % small == 0) sum = plus(sum, queries(begin, i)), begin = i;
    const bool many = begin != t.query_begin;
    EXPECT_EQ(many_small_chunks(args, seq, t), many);
    EXPECT_TRUE((t.items == 1 && !many) || t.partial + t.item < args.partials_before(end_prefix(g)));
    sums[static_cast<std::size_t>(t.first / kKeyTile)][t.item] = plus(sum, queries(begin, t.query_end));
  }
  std::vector<std::string> results;
  for (const auto& of_tile : sums) {
    results.emplace_back();
    for (const auto& [item, sum] : of_tile) results.back() = plus(results.back(), sum);
  }
  return results;
}

class Partition : public testing::TestWithParam<std::tuple<int, int, int>> {};

TEST_P(Partition, EveryQueryOnceAndTheSameSums) {
  const auto [group, q_len, before] = GetParam();
  const Geometry g = geometry_of(group, q_len, q_len + before);
  std::vector<std::vector<int>> seen;
  const std::vector<std::string> expected = in_spans(g, std::int64_t{1} << 40, seen);
  for (std::size_t tile = 0; tile < seen.size(); ++tile) {
    const int first = static_cast<int>(tile) * kKeyTile * g.kernel_stride + g.kernel_size - 1 - before;
    for (int i = 0; i < q_len; ++i) {
      const int times = seen[tile][static_cast<std::size_t>(i)];
      ASSERT_TRUE(times == 1 || (times == 0 && i < first)) << "tile " << tile << ", query " << i << ": " << times;
    }
  }
  EXPECT_EQ(at_once(g), expected);
  for (const std::int64_t ds_budget : {0, 4 << 20, 64 << 20})
    EXPECT_EQ(in_spans(g, ds_budget, seen), expected) << ds_budget;
}

INSTANTIATE_TEST_SUITE_P(Lengths, Partition,
                         testing::Combine(testing::Values(16, 4, 1, 3, 24),
                                          testing::Values(1, 63, 300, 512, 513, 1500, 4096, 4097, 5000, 8192, 9000,
                                                          17000),
                                          testing::Values(0, 50, 3000)));

}  // namespace
}  // namespace nsa::cuda::portable
