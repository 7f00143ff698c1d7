// Query rows of the kernels here: a tile of 64 rows is the heads of a group (up to sixteen of them) for neighbouring
// queries, heads fastest. A group of more than sixteen heads is cut into slices of sixteen.
#pragma once

#include "cuda/sm90/common/tensor_map.h"

namespace nsa::cuda::sm90 {

/// The 64 rows of a tile. Row r is query r / heads, head r % heads; rows from `rows` on have no use.
struct HeadPacking {
  int heads = 0;    // of a tile: min(G, 16)
  int queries = 0;  // of a tile: 64 / heads
  int rows = 0;     // of a tile that are used: heads * queries
  int slices = 0;   // of a group: G / heads
  FastDivmod by_heads;

  HeadPacking() = default;
  __host__ __device__ explicit HeadPacking(int group)
      : heads(group < 16 ? group : 16),
        queries(64 / heads),
        rows(heads * queries),
        slices(group / heads),
        by_heads(heads) {}

  /// r / heads by what a kernel has anyway.
  __device__ static int query_of(const Geometry& p, int r) { return p.group < 16 ? p.by_group.divide(r) : r / 16; }

  /// Boxes of this many rows, as whole tiles.
  cudaError_t make_tensor_map(CUtensorMap& map, const Strided& t, const Geometry& g, int columns) const {
    return sm90::make_tensor_map(map, t, columns, g.heads, query_rows(g), tensor_batches(g), heads, queries);
  }
};

/// Boxes of `rows` keys of one head.
inline cudaError_t make_key_tensor_map(CUtensorMap& map, const Strided& t, const Geometry& g, int columns,
                                       bool compressed, int rows) {
  return make_tensor_map(map, t, columns, g.kv_heads, key_rows(g, compressed), tensor_batches(g), 1, rows);
}

/// A tile of 64 rows x D elements as D / 64 panels (wgmma.cuh).
template <int D>
inline constexpr int kTileBytes = 64 * D * 2;
inline constexpr int kPanelBytes = 64 * 128;

}  // namespace nsa::cuda::sm90
