// How d_kv cuts the queries of the compressed branch: every query that sees a key tile is in one item of it, and the
// partial sums are added in the same order whether dS is stored in few spans or in many or (as in a packed call) not at
// all. Sums are their own formulas here. And where dS of the selection lies. Needs no device.
#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/operations/query_spans.h"
#include "cuda/portable/d_kv_items.cuh"
#include "cuda/sm90/selected_attention/gather_plan.cuh"
#include "cuda/sm90/selected_attention/own_entries.h"

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
      const auto [slot, fresh] =
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

TEST(SelectedWindows, EveryQueryOnceAndWithinTheMemory) {
  constexpr std::int64_t kRow = 100;
  for (const bool packed : {false, true})
    for (const int length : {1, 127, 1000, 1024, 5000, 16384, 70001})
      for (const int batches : {1, 3}) {
        const int offset = 0;
        Geometry g = geometry_of(16, length, length);
        g.batches = batches;
        if (packed) g.cu_q = &offset, g.total_q = std::int64_t{length} * batches;
        const std::int64_t all = std::int64_t{length} * batches;
        for (const std::int64_t rows : {0, 999, 1024, 1500, 16384, 1 << 20}) {
          const std::vector<QuerySpan> windows = selected_windows(g, kRow, rows * kRow + kRow / 2);
          EXPECT_EQ(windows.empty(), rows < 1024 && rows < (packed ? all : length));
          std::vector<int> seen(static_cast<std::size_t>(all));
          for (const QuerySpan& w : windows) {
            EXPECT_LE((packed ? 1 : w.sequences) * std::int64_t{w.count}, rows);
            for (int b = 0; b < (packed ? 1 : w.sequences); ++b)
              for (int i = 0; i < w.count; ++i)
                ++seen.at(static_cast<std::size_t>(std::int64_t{w.sequence + b} * length + w.first + i));
          }
          for (const int times : seen) ASSERT_EQ(times, windows.empty() ? 0 : 1);
        }
      }
}

TEST(SelectedWindows, OfAnyNumberOfHeads) {
  const auto counts = [](Geometry g) {
    std::vector<int> counts;
    for (const QuerySpan& w : selected_windows(g, selected_ds_row(g, 16, 64), selected_ds_budget(g)))
      counts.push_back(w.count);
    return counts;
  };
  for (const int length : {1000, 16384, 16385, 65536, 131072}) {
    Geometry g = geometry_of(16, length, length);
    const std::vector<int> expected = counts(g);
    EXPECT_EQ(std::reduce(expected.begin(), expected.end()), length);
    for (const int kv_heads : {1, 2, 4, 16}) {
      g.kv_heads = kv_heads, g.heads = 16 * kv_heads;
      EXPECT_EQ(counts(g), expected) << length << " queries, " << kv_heads << " KV heads";
    }
  }
}

TEST(SelectedDs, EveryElementHasAPlaceWhereItIsLookedFor) {
  // Halves of words by where they lie: what d_kv has in its accumulators, and what the A operand of d_q wants.
  using Element = std::tuple<int, std::int64_t, int, int>;  // slice, entry, head, key of a plane
  constexpr int kEntries = 21;
  for (const int group : {2, 4, 6, 8, 12, 14, 16, 32, 64}) {
    const SelectedDs ds(kEntries, group);
    const int heads = std::min(group, 16), slices = group / heads, queries = 64 / heads;
    std::map<std::int64_t, Element> stored;
    for (int slice = 0; slice < slices; ++slice)
      for (const auto& [from, to] : {std::pair(0, 13), {13, 14}, {14, kEntries}})
        for (int entry = from; entry < to; entry += queries)
          for (int lane = 0; lane < 32; ++lane)
            for (int r = 2 * (lane % 4); r < std::min(queries, to - entry) * heads; r += 8)
              for (int word = 0; word < 2; ++word)
                for (int half = 0; half < 2; ++half) {
                  const std::int64_t at = ds.offset(heads, slice, entry, 0) + SelectedDs::stored_vector(lane) +
                                          r / 8 * 8 * SelectedDs::kRow + word * 4 + half * 2;
                  const Element what{slice, entry + (r + half) / heads, (r + half) % heads, lane / 4 + 8 * word};
                  EXPECT_TRUE(stored.emplace(at, what).second);
                }
    EXPECT_EQ(stored.size(), static_cast<std::size_t>(kEntries * group * 16));
    EXPECT_EQ(stored.rbegin()->first + 2, ds.plane());
    for (int together = 1; together * heads <= 16; ++together)
      for (int lane = 0; lane < 32; ++lane) {
        const int row = lane / 4 * 2, query = row / heads;
        for (int slice = 0; slice < slices && query < together; ++slice)
          for (int entry = 0; entry < kEntries; ++entry)
            for (int word = 0; word < 4; ++word)
              for (int half = 0; half < 2; ++half) {
                const int head = row - query * heads;
                const std::int64_t at = ds.offset(heads, slice, entry, head) + SelectedDs::loaded_vector(lane);
                const Element wanted{slice, entry, head + half, 2 * (lane % 4) + word / 2 + word % 2 * 8};
                ASSERT_EQ(stored.at(at + word * 4 + half * 2), wanted);
              }
      }
  }
}

TEST(SelectedDs, EveryEntryHasALane) {
  namespace selected = sm90::selected_attention;
  for (const int warps : {12, 16})
    for (int group = 2; group <= 16; group += 2)
      for (int topk = 1; topk <= 64; ++topk) {
        const int together = selected::queries_of_warp(geometry_of(group, 1000, 1000), topk, warps);
        const selected::EntryLanes lanes(together);
        std::set<std::pair<int, int>> entries;
        for (int lane = 0; lane < 32; ++lane)
          for (int i = 0; i < selected::EntryLanes::kMax; ++i) {
            const int query = lanes.query(lane), rank = lanes.rank(lane, i);
            EXPECT_TRUE(lanes.mask(query) >> lane & 1);
            EXPECT_TRUE(entries.emplace(query, rank).second);
          }
        for (int query = 0; query < together; ++query)
          for (int rank = 0; rank < topk; ++rank) ASSERT_TRUE(entries.contains({query, rank})) << group << ", " << topk;
      }
}

}  // namespace
}  // namespace nsa::cuda::portable
