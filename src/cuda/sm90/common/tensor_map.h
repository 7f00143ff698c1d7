// Tensor maps: how TMA finds boxes of rows in a tensor.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "cuda/common/geometry.cuh"

namespace nsa::cuda::sm90 {

/// Whether TMA can read 16-bit elements laid out like this: strides and address multiples of 16 bytes.
bool tma_compatible(const Strided& t);

/// Boxes of 64 columns x `box_heads` heads x `box_rows` rows (at most 256 each) of a 16-bit tensor of `columns` x
/// `heads` x `rows` x `batches`, with the 128-byte swizzle: in shared memory rows of 128 bytes, heads fastest. What
/// lies outside of the tensor becomes zeros. The boxes of a row of tiles are panels of wgmma.cuh's tiles.
cudaError_t make_tensor_map(CUtensorMap& map, const Strided& t, int columns, int heads, std::int64_t rows, int batches,
                            int box_heads, int box_rows);

/// Boxes of 64 columns of 64 rows of one head, in another order: row 8c + j after the first (c, j < 8) becomes row 8j +
/// c of the box. A 5-dimensional map; coordinates: column, first row / 8, first row % 8, head, batch. Rows beyond the
/// last group that it knows become zeros, so only boxes that lie within spread_rows() are to be read through it.
cudaError_t make_spread_tensor_map(CUtensorMap& map, const Strided& t, int columns, int heads, std::int64_t rows,
                                   int batches);
/// Box rows [first, first + 64) can be read if first / 8 * 8 + 64 <= spread_rows.
inline std::int64_t spread_rows(std::int64_t rows) { return rows < 15 ? 0 : (rows - 15) / 8 * 8 + 8; }

/// Boxes of 64 columns of `box_rows` rows (at most 256) of one head, `step` rows apart. A 5-dimensional map;
/// coordinates: column, first row % step, first row / step, head, batch. It has the rows whose number is below `rows`
/// rounded down to a multiple of `step`; for the residues below rows % step, which have one more, `last` is to be true.
cudaError_t make_step_tensor_map(CUtensorMap& map, const Strided& t, int columns, int heads, std::int64_t rows,
                                 int batches, int step, int box_rows, bool last);

/// Rows of whole tensors, of queries (q, d_o) and below of keys: in packed calls boxes cross sequences.
inline std::int64_t query_rows(const Geometry& g) { return g.cu_q ? g.total_q : g.q_len; }
/// Rows of a tensor of compressed keys. In packed calls total_k is their bound of the tokens: raw_total.
inline std::int64_t compressed_rows(const Geometry& g) {
  if (g.cu_q) return (g.total_k - g.kernel_size) / g.kernel_stride - 1;
  return g.k_len < g.kernel_size ? 0 : (g.k_len - g.kernel_size) / g.kernel_stride + 1;
}
/// Rows of a tensor of compressed or of raw keys.
inline std::int64_t key_rows(const Geometry& g, bool compressed) {
  return compressed ? compressed_rows(g) : g.cu_q ? g.total_k : g.k_len;
}
inline int tensor_batches(const Geometry& g) { return g.cu_q ? 1 : g.batches; }

}  // namespace nsa::cuda::sm90
