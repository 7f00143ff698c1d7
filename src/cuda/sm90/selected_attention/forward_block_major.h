// Selected attention, block-major (forward_block_major.cu): arguments, work items and the size of its buffers.
#pragma once

#include <algorithm>

#include "cuda/common/params.h"

namespace nsa::cuda::sm90::selected_attention {

struct BlockMajorArgs {
  SelectedArgs selected;
  InverseIndex lists;
  LoopOrder loop_order;
  void* scratch;  // QueryBuffers::bytes()
};

/// 64 keys of a block of one KV head, and queries that selected it.
struct alignas(16) BlockItem {
  const int* list;  // the queries
  int count;        // of them; 0: there is no more work
  int batch, kv_head;
  int block, tile;  // of the sequence; of the block
  int first_key, keys;
  int key_row, query_row;  // of the first key, and of the sequence's first query, in the tensors
  int shift;               // position of the sequence's first query
  int buffer_row;          // of the sequence's first query, from the buffer's first one on
  int unused[3];
};
static_assert(sizeof(BlockItem) == 64);

/// Where the thread blocks of a buffer find their next item.
struct BlockQueue {
  int next, end;
};

/// A buffer is some query rows (of all sequences, one behind the other) and KV heads. The scratch holds the partials of
/// one buffer at a time; a partial is the attention of a query row to one key tile: output and lse.
struct QueryBuffers {
  static constexpr std::int64_t kPartials = 1 << 20;  // of a buffer, unless a query has more
  static constexpr std::int64_t kPlanned = 1 << 20;   // items that are planned at once, unless a buffer has more
  static constexpr int kItemTiles = 8;                // tiles of 64 query rows that an item may have

  int group;                   // G
  int partials;                // of a query head: entries of a row of indices, times key tiles of a block
  std::int64_t all_rows;       // of all sequences
  int rows = 0, kv_heads = 0;  // of a buffer
  int heads_of_buffer = 0;     // query heads
  int by_rows = 0, count = 0;  // buffers of a KV head; of all
  int most;                    // queries of an item
  int planned = 0;             // buffers whose items are planned at once
  std::int64_t items = 0;      // of a buffer, an upper bound
  std::int64_t partial_bytes;  // output and lse

  QueryBuffers(const Geometry& g, const InverseIndex& lists, int topk, std::int64_t value_dim)
      : group(g.group),
        partials(topk * lists.tiles_per_block),
        most(64 / g.group * kItemTiles),
        partial_bytes(value_dim * 2 + sizeof(float)) {
    const RowPrefix all = end_prefix(g);
    all_rows = all.q;
    if (all.q == 0 || g.kv_heads == 0) return;
    const std::int64_t row = std::int64_t{group} * partials, limit = std::max<std::int64_t>(kPartials / row, 1);
    by_rows = static_cast<int>((all.q + limit - 1) / limit);
    rows = static_cast<int>((all.q + by_rows - 1) / by_rows);
    kv_heads = static_cast<int>(std::clamp<std::int64_t>(kPartials / (row * all.q), 1, g.kv_heads));
    heads_of_buffer = kv_heads * group;
    count = by_rows * ((g.kv_heads + kv_heads - 1) / kv_heads);
    const std::int64_t blocks = all.k / lists.block_size + all.sequences;
    items = kv_heads * (blocks + rows * std::int64_t{lists.width} / most) * lists.tiles_per_block;
    planned = static_cast<int>(std::clamp<std::int64_t>(kPlanned / items, 1, count));
  }

  std::int64_t buffer_partials() const { return std::int64_t{rows} * heads_of_buffer * partials; }
  std::int64_t bytes() const {
    return planned * (items * sizeof(BlockItem) + sizeof(BlockQueue)) + buffer_partials() * partial_bytes;
  }
};

}  // namespace nsa::cuda::sm90::selected_attention
