// How selected_d_kv cuts the lists of the inverse index into items, and what that takes.
//
// The rows of a query are read once for every block that it chose. For these reads to meet in L2
// the queries of a sequence are cut into query groups, and the items of a query group follow each other: the thread
// blocks that run at the same time then walk the same queries. Within a query group long lists are cut once more. Where
// a query has few rows there is one query group: an item's rows would not be worth its partial sums. A window
// (SelectedWindows) is one, too. Otherwise the cut depends on the sequence alone.
#pragma once

#include <algorithm>

#include "cuda/common/params.h"
#include "cuda/sm90/common/d_kv_item.h"
#include "cuda/sm90/common/row_terms.h"

namespace nsa::cuda::sm90::selected_attention {

inline constexpr int kQueryGroups = 2,
                     kMinQueryGroup = 2048;  // query groups of a sequence; queries for which one is enough
inline constexpr int kQueryGroupRows = 8;    // rows of a query for which more than one pays
inline constexpr int kMinItem = 1024;        // queries that an item may have in any case

struct ListCut {
  int chunks;        // of the inverse index
  int query_group;   // chunks of a query group
  int query_groups;  // at least one
  int most;          // queries of an item

  /// heads: rows of a query in a tile. `window`: the queries are a window of several.
  __host__ __device__ ListCut(int q_len, int heads, bool window) {
    const int chunk = InverseIndex::chunk(q_len), wanted = (q_len + kMinQueryGroup - 1) / kMinQueryGroup;
    chunks = (q_len + chunk - 1) / chunk;
    query_groups = wanted < 1 || heads < kQueryGroupRows || window ? 1 : wanted < kQueryGroups ? wanted : kQueryGroups;
    query_group = (chunks + query_groups - 1) / query_groups;
    most = query_group * chunk / 16 > kMinItem ? query_group * chunk / 16 : kMinItem;
  }
};

/// Of a KV head of a sequence.
struct ItemCounts {
  int items[kQueryGroups];
  int partials;  // key tiles with several items have a partial sum for each
  int sums;      // such key tiles
};

/// Where the thread blocks find their next item.
struct ItemQueue {
  int next, end;
  int sums;  // key tiles with several items
};

/// Work of a call. Lines are the KV heads, the sequences of each one after the other.
struct ListWork {
  int lines = 0;
  std::int64_t items = 0, partials = 0, sums = 0;  // upper bounds

  /// `window`: as of ListCut.
  ListWork(const Geometry& g, const InverseIndex& lists, bool window) : lines(g.kv_heads * g.batches) {
    const RowPrefix all = end_prefix(g);
    const std::int64_t tiles = (all.k / lists.block_size + all.sequences) * lists.tiles_per_block;
    const int most = g.cu_q ? kMinItem : ListCut(g.q_len, HeadPacking(g.group).heads, window).most;
    const std::int64_t entries = all.q * lists.width;
    // In a window only lists of more than `most` queries are cut, into less than twice what their length makes.
    const std::int64_t lists_cut =
        window ? 2 * entries / most : lists_by_query_groups(g, lists.block_size) + entries / most;
    partials = g.kv_heads * lists_cut * lists.tiles_per_block;
    items = g.kv_heads * tiles + partials;
    sums = partials / 2;
  }

  /// Blocks that a query group sees, of all query groups and sequences of a KV head; in packed calls those of sequences
  /// that may have several parts of a list.
  static std::int64_t lists_by_query_groups(const Geometry& g, std::int64_t block_size) {
    if (!g.cu_q) {
      const ListCut cut(g.q_len, HeadPacking(g.group).heads, false);
      std::int64_t lists_cut = 0;
      for (int i = 1; i <= cut.query_groups; ++i) {
        const int end = std::min(i * cut.query_group * InverseIndex::chunk(g.q_len), g.q_len);
        lists_cut += (end + g.k_len - g.q_len + block_size - 1) / block_size;
      }
      return lists_cut * g.batches;
    }
    // A query group ends a chunk after its even share at the latest, a sixteenth of the sequence if it is one of
    // several. Such sequences have more than kMinQueryGroup queries, those with a cut list more than kMinItem.
    const std::int64_t queries = std::min(g.total_q, g.total_k);
    const std::int64_t seen = kQueryGroups * g.total_k - queries * (kQueryGroups - 1) / 2 + queries * kQueryGroups / 16;
    return seen / block_size + kQueryGroups * (queries / kMinItem + 1);
  }
  std::int64_t bytes() const {
    return items * sizeof(KeyItem) + lines * sizeof(ItemCounts) + sizeof(ItemQueue) + sums * sizeof(int);
  }
};

/// The schedule of a call: items in the order line, query group, key tile.
struct ListSchedule {
  BackwardArgs branch;
  RowTerms terms;
  HeadPacking packing;
  KeyItem* items;
  ItemCounts* counts;  // (lines)
  ItemQueue* queue;
  int* sums;  // the first items of key tiles with several

  ListSchedule(const BackwardArgs& b, const ListWork& work)
      : branch(b),
        terms(b.geometry, b.row_terms),
        packing(b.geometry.group),
        items(static_cast<KeyItem*>(b.schedule)),
        counts(reinterpret_cast<ItemCounts*>(items + work.items)),
        queue(reinterpret_cast<ItemQueue*>(counts + work.lines)),
        sums(reinterpret_cast<int*>(queue + 1)) {}
};

cudaError_t make_schedule(const ListSchedule& schedule, cudaStream_t stream);

}  // namespace nsa::cuda::sm90::selected_attention
