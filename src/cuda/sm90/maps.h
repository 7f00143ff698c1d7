// Tensor maps: how the copy engine finds boxes of rows in a tensor.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "cuda/common/geometry.cuh"

namespace nsa::cuda::sm90 {

/// Whether the copy engine can read 16-bit elements laid out like this: strides and address multiples of 16 bytes.
bool mappable(const Strided& t);

/// Boxes of 64 columns x `box_heads` heads x `box_rows` rows (at most 256 each) of a 16-bit tensor of `columns` x
/// `heads` x `rows` x `batches`, with the 128-byte swizzle: in shared memory rows of 128 bytes, heads fastest. What
/// lies outside of the tensor becomes zeros. The boxes of a row of tiles are panels of wgmma.cuh's tiles.
cudaError_t make_map(CUtensorMap& map, const Strided& t, int columns, int heads, std::int64_t rows, int batches,
                     int box_heads, int box_rows);

/// Query rows (q, d_o) or key rows (k, v) of a call, whole tensors: in packed calls boxes cross sequences.
inline std::int64_t query_rows(const Geometry& g) { return g.cu_q ? g.total_q : g.q_len; }
inline int tensor_batches(const Geometry& g) { return g.cu_q ? 1 : g.batches; }

}  // namespace nsa::cuda::sm90
