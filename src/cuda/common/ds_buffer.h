// dS of the compressed branch on its way from d_kv to range_d_q.
#pragma once

#include "cuda/common/partition.h"

namespace nsa::cuda {

/// dS of the compressed branch in 16-bit types, which d_kv leaves for range_d_q: without it that would have to make the
/// scores and dP a second time. Tiles of 16 query rows and 16 keys, each as d_kv has it, the A operand of dS^T, a
/// lane's four registers next to each other; key tiles of a tile of rows follow each other.
struct DsBuffer {
  static constexpr int kTile = 512;  // bytes

  char* tiles = nullptr;  // (KV head, row tiles, key tiles); null: not wanted
  // A batched call makes dK and dV for a span of the queries, a number of small chunks, at a time. Per (KV head,
  // sequence, key, element) the sum of the chunks before the span, and that of its first chunk's small ones before it.
  // Null: all queries at once.
  float *sums = nullptr, *chunk_sums = nullptr;
  std::int64_t sums_head = 0, sums_sequence = 0;  // elements
  int first = 0, q_len = 0;                       // the span's first query, and how many queries there are in all

  __host__ __device__ static std::int64_t rows_before(const Geometry& g, const RowPrefix& at) {
    return (at.q * g.group / 128 + at.sequences) * 8;
  }
  __host__ __device__ static int columns(const Geometry& g) { return key_tiles(g) * (kKeyTile / 16); }
  __host__ __device__ static int key_tiles(const Geometry& g) {
    return (num_compressed(g, g.k_len) + kKeyTile - 1) / kKeyTile;
  }
  static std::int64_t bytes(const Geometry& g) {
    return g.kv_heads * rows_before(g, end_prefix(g)) * columns(g) * kTile;
  }
  /// What a query row's tile and its first key's tile have in common for this lane.
  __device__ char* at(const Geometry& g, const DeviceSequence& seq, int kv_head, std::int64_t row, int key) const {
    const std::int64_t tile = kv_head * rows_before(g, end_prefix(g)) + rows_before(g, row_prefix(g, seq)) + row / 16;
    return tiles + (tile * columns(g) + key / 16) * kTile + threadIdx.x % 32 * 16;
  }
};

}  // namespace nsa::cuda
