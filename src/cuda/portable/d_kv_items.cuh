// The work of d_kv: items, each a key tile and some of the queries that see it.
#pragma once

#include "cuda/common/params.h"

namespace nsa::cuda::portable {

/// Keys [first, first + count) of a sequence and the queries that may see them.
struct KeyTile {
  int first, count;
  int query_begin, query_end;  // a range of queries, or of entries of the list
  int query_start;             // the first that is walked; those before it follow at the end
  int item, items;             // this thread block's item, and how many the key tile has
  std::int64_t partial;        // where their partial sums are, if there are several
};

/// Whose item x of a KV head is; x becomes its number in the sequence.
__device__ inline DeviceSequence sequence_of_item(const BackwardArgs& args, int& x) {
  const Geometry& p = args.geometry;
  const auto first = [&](const RowPrefix& at) { return args.items_before(at); };
  const DeviceSequence seq = sequence_of(p, sequence_at(p, x, first));
  x -= static_cast<int>(first(row_prefix(p, seq)));
  return seq;
}

/// Which keys and queries item `x` of a range is about. Neighbouring items, which run at the same time, read the same
/// queries, so that these come from L2: of the compressed branch all key tiles are in turn for a
/// chunk of the queries; a tile of the window walks round from a query that it has in common with its neighbours.
__host__ __device__ inline KeyTile range_item(const BackwardArgs& args, const DeviceSequence& seq, int key_count,
                                              int x) {
  const Geometry& p = args.geometry;
  const int tiles = (key_count + kKeyTile - 1) / kKeyTile;
  if (x >= tiles * args.chunks) return {};
  const int tile = args.window ? x / args.chunks : x % tiles;
  const int first = tile * kKeyTile, count = min(key_count - first, kKeyTile);
  const int shift = seq.k_len - seq.q_len;  // position of query 0
  const std::int64_t begin =
      args.window ? first : static_cast<std::int64_t>(first) * p.kernel_stride + p.kernel_size - 1;
  const std::int64_t end = args.window ? static_cast<std::int64_t>(first) + count - 1 + args.window : seq.k_len;
  // Tiles of rows whose dS is stored begin at multiples of their length.
  const int even = args.window ? 1 : max(32 / (p.group & -p.group), 1);
  const int query_begin = static_cast<int>(max(begin - shift, std::int64_t{0})) / even * even;
  const int query_end = static_cast<int>(min(end - shift, static_cast<std::int64_t>(seq.q_len)));
  const int chunk = range_chunk(args.window, seq.q_len);
  const std::int64_t partial =
      args.partials_before(row_prefix(p, seq)) + tile * max_range_chunks(args.window, seq.q_len);
  if (args.window) {
    const int item = x % args.chunks, items = max((query_end - query_begin + chunk - 1) / chunk, 1);
    if (item >= items) return {};
    const int from = query_begin + item * chunk, to = min(from + chunk, query_end);
    const int round = (min(args.window, seq.q_len) + 126) / 64 * 64;  // at least the queries of a tile
    const int start = (from + round - 1) / round * round;
    return {.first = first,
            .count = count,
            .query_begin = from,
            .query_end = to,
            .query_start = items == 1 && start < to ? start : from,
            .item = item,
            .items = items,
            .partial = partial};
  }
  if (args.ds_buffer.sums) {
    const int small = small_chunk(args.ds_buffer.q_len), all = (seq.q_len + small - 1) / small, item = x / tiles;
    const int items = all - query_begin / small, at = all - 1 - item;
    if (item >= items) return {};
    const int from = max(query_begin, at * small);
    return {.first = first,
            .count = count,
            .query_begin = from,
            .query_end = min((at + 1) * small, query_end),
            .query_start = from,
            .item = item,
            .items = items,
            .partial = (static_cast<std::int64_t>(seq.index) * tiles + tile) * all};
  }
  // Chunks of all queries, the last ones, which all tiles see, first.
  const int last = (seq.q_len - 1) / chunk, least = min(query_begin / chunk, last);
  const int at = args.chunks - 1 - x / tiles;
  if (at < least || at > last) return {};
  const int from = max(query_begin, at * chunk);
  return {.first = first,
          .count = count,
          .query_begin = from,
          .query_end = min((at + 1) * chunk, query_end),
          .query_start = from,
          .item = at - least,
          .items = last - least + 1,
          .partial = partial};
}

/// The same for the selection: items of all key tiles follow each other, found by bisection.
__device__ inline KeyTile selected_item(const BackwardArgs& args, const DeviceSequence& seq, const SequenceLists& lists,
                                        int x) {
  const int tiles_per_block = args.lists.tiles_per_block;
  int low = 0, high = lists.blocks * tiles_per_block;  // item_begin[low] <= x < item_begin[high]
  if (x >= lists.item_begin[high]) return {};
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (lists.item_begin[middle] <= x ? low : high) = middle;
  }
  const int block = low / tiles_per_block, tile = low % tiles_per_block;
  const int first = block * args.block_size + tile * kKeyTile;
  const int count = min(min(first + kKeyTile, (block + 1) * args.block_size), seq.k_len) - first;
  if (count <= 0) return {};
  const int begin = lists.begin[block], end = lists.begin[block + 1];
  const int item = x - lists.item_begin[low], items = lists.item_begin[low + 1] - lists.item_begin[low];
  const int from = begin + item * kListChunk;
  return {.first = first,
          .count = count,
          .query_begin = from,
          .query_end = min(from + kListChunk, end),
          .query_start = from,
          .item = item,
          .items = items,
          .partial = args.partials_before(lists.entry + begin, lists.slot + block) + tile * items};
}

/// Is an item of the compressed branch, 16-bit types, the sum of several small chunks?
__host__ __device__ inline bool many_small_chunks(const BackwardArgs& args, const DeviceSequence& seq,
                                                  const KeyTile& tile) {
  const int small = small_chunk(seq.q_len);
  return !args.ds_buffer.sums && (tile.query_end - 1) / small > tile.query_begin / small;
}

/// Everything about the item of this thread block.
struct Item {
  DeviceSequence seq;
  int key_begin, key_count;  // rows of the sequence's keys
  SequenceLists lists;       // of the selection
  KeyTile tile;              // count 0: nothing to do
};
__device__ inline Item item_of(const BackwardArgs& args) {
  int x = blockIdx.x;
  Item item{sequence_of_item(args, x)};
  const DeviceSequence& seq = item.seq;
  const bool selected = args.indices.data != nullptr, compressed = !selected && args.window == 0;
  item.key_begin = compressed ? compressed_begin(args.geometry, seq.index) : seq.k_begin;
  item.key_count = compressed ? num_compressed(args.geometry, seq.k_len) : seq.k_len;
  if (selected) item.lists = lists_of(args.lists, args.geometry, seq, blockIdx.y);
  item.tile = selected ? selected_item(args, seq, item.lists, x) : range_item(args, seq, item.key_count, x);
  return item;
}

}  // namespace nsa::cuda::portable
