// Compressed attention and the choice of blocks by one kernel: compressed_select.cu.
#pragma once

#include <algorithm>

#include "cuda/portable/arguments.h"

namespace nsa::cuda::sm90 {

struct CompressedSelectArgs {
  portable::RangeArgs range;  // window = 0
  Strided indices;            // int32
  int topk, block_size, init_blocks, local_blocks;
  int* flag;      // range.redo.flag; the kernel sets it where an lse is NaN
  void* scratch;  // CompressedSelectScratch::bytes()
  // Filled in by the launch.
  int spread_rows;  // see make_spread_map
  int chunks;       // of the scratch on their way, for each picking warp
};

/// Tiles of 64 compressed keys of the longest sequence, or one more.
__host__ __device__ inline int scratch_tiles(const Geometry& g) { return g.k_len / (g.kernel_stride * 64) + 1; }

/// What the kernel takes besides its arguments, for sequences of up to k_len tokens. It grows with the device and with
/// the length of a sequence, not with the number of queries.
struct CompressedSelectScratch {
  static constexpr int kThreadBlocks = 132;  // at most; one per multiprocessor
  static constexpr int kQueries = 12;        // that a thread block works on at a time
  static constexpr int kBuffers = 3;
  static constexpr int kTileBytes = 576;  // of a query and 64 compressed keys
  static constexpr int kBlocks = 3200;    // selection blocks of a sequence, at most: they fill the shared memory

  int thread_blocks, tiles;  // key tiles of a query

  explicit CompressedSelectScratch(const Geometry& g) {
    const std::int64_t rows = g.cu_q ? g.total_q : static_cast<std::int64_t>(g.batches) * g.q_len;
    const std::int64_t most = (rows / kQueries + g.batches) * g.kv_heads;  // tiles of queries
    thread_blocks = static_cast<int>(std::min<std::int64_t>(most, kThreadBlocks));
    tiles = scratch_tiles(g);
  }
  std::int64_t bytes() const {
    return static_cast<std::int64_t>(thread_blocks) * kBuffers * kQueries * tiles * kTileBytes;
  }
};

/// Selection blocks of the longest sequence.
__host__ __device__ inline int selection_blocks(const Geometry& g, int block_size) {
  return (g.k_len + block_size - 1) / block_size;
}

}  // namespace nsa::cuda::sm90
