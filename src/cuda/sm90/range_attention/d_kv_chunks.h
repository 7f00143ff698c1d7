// How range_d_kv cuts the queries of a key tile into chunks, and the partial sums that this takes.
#pragma once

#include <algorithm>

#include "cuda/common/partition.h"

namespace nsa::cuda::sm90::range_attention {

inline constexpr int kMaxChunks = 32, kRangeKeys = 128;  // of a key tile

/// Queries of a chunk in a sequence of q_len queries: short enough to fill the device, long enough for few partial
/// sums.
__host__ __device__ inline int least_chunk(int window) { return window > 0 ? 2048 : 256; }
__host__ __device__ inline int chunk_queries(int window, int q_len) {
  const int least = least_chunk(window), even = (q_len + kMaxChunks * 64 - 1) / (kMaxChunks * 64) * 64;
  return even > least ? even : least;
}
/// Chunks of a key tile in sequences of up to q_len queries.
__host__ __device__ inline int max_chunks(int window, int q_len) {
  const int least = least_chunk(window);
  const std::int64_t queries = window > 0 ? std::min<std::int64_t>(q_len, window + 127ll) : q_len;
  return static_cast<int>(std::clamp<std::int64_t>((queries + least - 1) / least, 1, kMaxChunks));
}
/// Work of a call: items, their chunks (the last one first), partial sums. Its key tiles lie in lines: of a sequence
/// and KV head if batched, of a KV head and all sequences one after the other if packed.
struct RangeWork {
  int tile;  // raw tokens from one key tile to the next
  int lines, key_tiles, chunks, items;
  int begin[kMaxChunks + 1];  // of the items of a chunk
  int least;                  // queries of a chunk
  std::int64_t partials;      // per KV head

  RangeWork(const Geometry& g, int window)
      : tile(window > 0 ? kRangeKeys : kRangeKeys * g.kernel_stride),
        lines(g.cu_q ? g.kv_heads : g.batches * g.kv_heads),
        key_tiles(static_cast<int>(g.cu_q ? tiles_before(end_prefix(g)) : key_tiles_of(g, window, g.k_len))),
        chunks(max_chunks(window, g.q_len)),
        begin{},
        least(least_chunk(window)),
        partials(chunks == 1 ? 0 : partials_before(end_prefix(g))) {
    const int chunk = chunk_queries(window, g.q_len);
    for (int from_end = 0; from_end < chunks; ++from_end) {
      int tiles = key_tiles;
      if (window == 0 && !g.cu_q) {  // the key tiles that the chunk sees are known
        const std::int64_t first = static_cast<std::int64_t>(chunks - 1 - from_end) * chunk;
        const std::int64_t length = std::min<std::int64_t>(first + chunk, g.q_len) + g.k_len - g.q_len;
        tiles = first < g.q_len || first == 0 ? key_tiles_of(g, window, length) : 0;  // keys without queries too
      }
      begin[from_end + 1] = begin[from_end] + tiles * lines;
    }
    items = begin[chunks];
  }

  static int key_tiles_of(const Geometry& g, int window, std::int64_t length) {
    const std::int64_t compressed = length < g.kernel_size ? 0 : (length - g.kernel_size) / g.kernel_stride + 1;
    return static_cast<int>(((window > 0 ? length : compressed) + kRangeKeys - 1) / kRangeKeys);
  }
  /// Key tiles of a packed line.
  __host__ __device__ std::int64_t tiles_before(const RowPrefix& at) const { return at.k / tile + at.sequences; }
  __host__ __device__ std::int64_t partials_before(const RowPrefix& at) const {
    return range_partials(at, tile, least, chunks);
  }
};

}  // namespace nsa::cuda::sm90::range_attention
