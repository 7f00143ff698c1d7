// How range_d_kv cuts the queries of a key tile into chunks, and the partial sums that this takes.
#pragma once

#include <algorithm>

#include "cuda/common/geometry.cuh"

namespace nsa::cuda::sm90 {

inline constexpr int kMaxChunks = 32;

/// Queries of a chunk in a sequence of q_len queries: short enough to fill the device, long enough for few partial
/// sums.
__host__ __device__ inline int chunk_queries(int window, int q_len) {
  const int least = window > 0 ? 2048 : 256, even = (q_len + kMaxChunks * 64 - 1) / (kMaxChunks * 64) * 64;
  return even > least ? even : least;
}
/// Chunks of a key tile in sequences of up to q_len queries.
inline int max_chunks(int window, int q_len) {
  const int least = window > 0 ? 2048 : 256;
  const std::int64_t queries = window > 0 ? std::min<std::int64_t>(q_len, window + 127ll) : q_len;
  return static_cast<int>(std::clamp<std::int64_t>((queries + least - 1) / least, 1, kMaxChunks));
}
/// Tiles of 128 keys per sequence, an upper bound.
inline int range_key_tiles(const Geometry& g, int window) {
  const int compressed = g.k_len < g.kernel_size ? 0 : (g.k_len - g.kernel_size) / g.kernel_stride + 1;
  return ((window > 0 ? g.k_len : compressed) + 127) / 128;
}
/// Work of a call: items, their chunks (the last one first), partial sums.
struct RangeWork {
  int key_tiles, chunks, items;
  int begin[kMaxChunks + 1];  // of the items of a chunk

  RangeWork(const Geometry& g, int window)
      : key_tiles(range_key_tiles(g, window)), chunks(max_chunks(window, g.q_len)), begin{} {
    const int chunk = chunk_queries(window, g.q_len);
    for (int from_end = 0; from_end < chunks; ++from_end) {
      int tiles = key_tiles;
      if (window == 0 && !g.cu_q) {  // the key tiles that the chunk sees are known
        const std::int64_t first = static_cast<std::int64_t>(chunks - 1 - from_end) * chunk;
        const std::int64_t length = std::min<std::int64_t>(first + chunk, g.q_len) + g.k_len - g.q_len;
        const std::int64_t keys = length < g.kernel_size ? 0 : (length - g.kernel_size) / g.kernel_stride + 1;
        tiles = first < g.q_len ? static_cast<int>((keys + 127) / 128) : 0;
      }
      begin[from_end + 1] = begin[from_end] + tiles * g.batches * g.kv_heads;
    }
    items = begin[chunks];
  }
  /// Floats of partial sums; width: Dk + Dv.
  std::int64_t partials(const Geometry& g, std::int64_t width) const {
    return chunks == 1 ? 0 : static_cast<std::int64_t>(g.batches) * g.kv_heads * key_tiles * chunks * 128 * width;
  }
};

}  // namespace nsa::cuda::sm90
