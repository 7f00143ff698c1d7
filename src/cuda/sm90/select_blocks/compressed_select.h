// Compressed attention and block selection by one kernel: compressed_select.cu.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/common/params.h"

namespace nsa::cuda::sm90::select_blocks {

/// How the rows of a group's queries lie in a thread block's tile of twelve warp tiles. A warp tile is sixteen rows,
/// those of a warp: all heads of the group for 16 / G neighbouring queries (row r: query r / G, head r % G), or, where
/// a group has more than sixteen heads, a slice of sixteen for one query, whose slices are neighbouring warp tiles.
struct WarpTiles {
  static constexpr int kWarpTiles = 12;

  int heads = 0;     // of a query in a warp tile
  int together = 0;  // queries of a warp tile, ...
  int slices = 0;    // ... or warp tiles of a query: one of the two is 1
  int queries = 0;   // of a tile; there may be warp tiles left over
  FastDivmod by_heads, by_slices;

  WarpTiles() = default;
  explicit WarpTiles(int group)
      : heads(std::min(group, 16)),
        together(16 / heads),
        slices(group / heads),
        queries(kWarpTiles * together / slices),
        by_heads(heads),
        by_slices(slices) {}

  __host__ __device__ int rows() const { return heads * together; }  // of a warp tile that are used
  __device__ int query_of(int row) const { return by_heads.divide(row); }
  __device__ int first_query(int warp_tile) const { return by_slices.divide(warp_tile * together); }
  __device__ int first_head(int warp_tile) const {
    return (warp_tile * together - first_query(warp_tile) * slices) * 16;
  }
};

/// The same for groups of sixteen heads, known when compiling.
struct WarpTilesOfSixteen {
  static constexpr int heads = 16, together = 1, slices = 1, queries = WarpTiles::kWarpTiles;

  __device__ static constexpr int rows() { return 16; }
  __device__ static constexpr int query_of(int) { return 0; }
  __device__ static constexpr int first_query(int warp_tile) { return warp_tile; }
  __device__ static constexpr int first_head(int) { return 0; }
};

/// Strides, of d tokens, in a sum of the scratch. A block of l' = 8d is two sums.
__host__ __device__ constexpr int strides_of_sum(int strides_of_block) {
  return strides_of_block < 4 ? strides_of_block : 4;
}

/// Whether the scratch has single keys, of which the selector warps make blocks: where a sum would not be of one stride
/// beside the key before, or a block not of one or two sums.
inline bool adds_keys_up(std::int64_t kernel_size, std::int64_t kernel_stride, std::int64_t block_size) {
  const std::int64_t strides = block_size / kernel_stride;
  return kernel_size > 2 * kernel_stride || !(strides == 1 || strides == 2 || strides == 4 || strides == 8);
}

/// What the probability of a compressed key counts in a sum of strides: 1 if of the key's tokens only the first stride
/// is in it. With l = d that is all of them; with l = 2d the key before the sum's first stride has its rest there.
struct KeyWeights {
  float whole, rest;  // l / d, l / d - 1
};

struct CompressedSelectArgs {
  RangeArgs range;  // window = 0
  Strided indices;  // int32
  int topk, block_size, init_blocks, local_blocks;
  float noise, share;  // as in SelectArgs
  unsigned long long seed;
  int* flag;      // range.fallback.flag; the kernel sets it where an lse is NaN
  void* scratch;  // CompressedSelectScratch::bytes()
  // Filled in by the launch.
  WarpTiles warp_tiles;
  FastDivmod by_block;
  int strides_of_key;     // l / d, ...
  FastDivmod by_strides;  // ... l' / d
  KeyWeights weights;
  int spread_rows;  // see make_spread_tensor_map
  int chunks;       // of the scratch on their way, for each selector warp
  int near_keys;    // of a selector warp, in words of shared memory
  char* keys;       // of the selector warps, in the scratch; null: in shared memory
  std::int64_t selector_keys;
};

/// Selection blocks of l' = kStrides * d tokens.
template <int kStrides>
struct BlocksOfStrides {
  static constexpr int kSummed = strides_of_sum(kStrides);
  static constexpr int kSums = kStrides / kSummed;  // of a block
  static constexpr int kTiles = 4 / kSummed;        // of the scratch, of sixteen sums, for a tile of 64 keys
  static constexpr bool kOfOneStride = kStrides == 1, kAddsKeysUp = false;

  __device__ static KeyWeights weights(const CompressedSelectArgs& args) { return args.weights; }
};

/// The same for l' = 4d and l = 2d, known when compiling (used where G = 16).
struct DefaultBlocks : BlocksOfStrides<4> {
  __device__ static constexpr KeyWeights weights(const CompressedSelectArgs&) { return {2, 1}; }
};

/// Any others: the scratch has the probabilities of single keys.
struct AnyBlocks : BlocksOfStrides<1> {
  static constexpr bool kOfOneStride = false, kAddsKeysUp = true;

  __device__ static constexpr KeyWeights weights(const CompressedSelectArgs&) { return {1, 0}; }
};

/// Tiles of 64 compressed keys of the longest sequence, or one more.
__host__ __device__ inline int most_key_tiles(const Geometry& g) { return g.k_len / (g.kernel_stride * 64) + 1; }

/// What the kernel takes besides its arguments, for sequences of up to k_len tokens. It grows with the device and with
/// the length of a sequence, not with the number of queries.
struct CompressedSelectScratch {
  static constexpr int kThreadBlocks = 132;  // at most; one per SM
  static constexpr int kSelectorWarps = 3;   // selector warps of a thread block
  static constexpr int kBuffers = 3;         // tiles of queries
  static constexpr int kTileBytes = 576;     // of a warp tile and sixteen sums
  static constexpr int kKeyBytes = 512;      // of four queries of a selector warp and 32 blocks, where G <= 8
  static constexpr int kRingKeys = 256;      // compressed keys of a query that are made blocks of at a time

  int thread_blocks;
  std::int64_t sums, keys;     // bytes
  std::int64_t selector_keys;  // bytes of a selector warp; 0: they are in shared memory

  CompressedSelectScratch(const Geometry& g, std::int64_t key_dim, int block_size) {
    const bool keys_up = adds_keys_up(g.kernel_size, g.kernel_stride, block_size);
    const int strides = block_size / g.kernel_stride, summed = keys_up ? 1 : strides_of_sum(strides);
    const WarpTiles warp_tiles(g.group);
    const std::int64_t rows = g.cu_q ? g.total_q : static_cast<std::int64_t>(g.batches) * g.q_len;
    const std::int64_t most = (rows / warp_tiles.queries + g.batches) * g.kv_heads;  // tiles of queries
    thread_blocks = static_cast<int>(std::min<std::int64_t>(most, kThreadBlocks));
    const std::int64_t tiles = most_key_tiles(g) * (4 / summed);  // of sixteen sums
    sums = thread_blocks * kBuffers * WarpTiles::kWarpTiles * tiles * kTileBytes;
    const std::int64_t blocks = (tiles + 3) / 4 * 64 * summed / strides;  // of whole chunks of the scratch
    selector_keys = warp_tiles.together > 1                                     ? (blocks + 31) / 32 * kKeyBytes
                    : blocks > most_blocks(key_dim) - (keys_up ? kRingKeys : 0) ? (blocks + 127) / 128 * 512
                                                                                : 0;
    keys = thread_blocks * kSelectorWarps * selector_keys;
  }
  std::int64_t bytes() const { return sums + keys; }
  /// Selection blocks of a sequence whose scores shared memory can hold.
  static constexpr int most_blocks(std::int64_t key_dim) { return key_dim > 128 ? 1920 : 3200; }
};

/// Selection blocks of the longest sequence.
__host__ __device__ inline int selection_blocks(const Geometry& g, int block_size) {
  return (g.k_len + block_size - 1) / block_size;
}

// As the launches of range_attention.h.
template <class T, int Dk, int Dv>
[[gnu::weak]] cudaError_t launch_compressed_select(const CompressedSelectArgs&, cudaStream_t);

}  // namespace nsa::cuda::sm90::select_blocks
