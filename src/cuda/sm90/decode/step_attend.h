// A decode step's attention on Hopper: compressed keys, block selection, selected blocks, window, gates, by one
// kernel.
//
// A cluster of up to eight thread blocks serves one query of one KV head, or 32 heads of it. Its rows, heads of the
// group, lie in tiles of sixteen, one tensor-core tile each; keys come in key tiles of sixteen. Design:
// docs/design/decode.md.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>

#include "cuda/common/params.h"
#include "cuda/sm90/decode/cached_tokens.h"
#include "nsa/config.h"

namespace nsa::cuda::sm90::decode {

inline constexpr int kTileRows = 16;  // (query, head)
inline constexpr int kTileKeys = 16;
inline constexpr int kMaxTiles = 2;      // of a cluster
inline constexpr int kMaxBlocks = 64;    // n
inline constexpr int kMaxOrdered = 128;  // sequences that are served by their lengths

/// Thread blocks of a cluster, warps of a thread block, key tiles of keys that a warp multiplies at once, and
/// neighbouring queries that share what is loaded. By default those of steps whose bits depend on no other query.
struct ClusterShape {
  std::int16_t ranks = 8, warps = 4, key_tiles = 1, queries = 1;
  constexpr bool operator==(const ClusterShape&) const = default;
};

/// The most warps for a query first. Two key tiles at once last of 1 x 8: where clusters come one after another.
inline constexpr ClusterShape kClusterShapes[] = {{8, 8, 2}, {8, 8}, {4, 8, 2}, {4, 8},   {8, 4},
                                                  {2, 8, 2}, {2, 8}, {1, 8},    {1, 8, 2}};
/// For many steps of several new tokens: step_attend_queries.cu.
inline constexpr ClusterShape kSharedQueries{1, 8, 4, 4};

/// Threads whose neighbouring blocks are one class of block selection. 64 classes are enough for few blocks: about as
/// many as are selected are at least as important as the last class that has one of these.
constexpr int log2_class_threads(int warps, int topk) { return topk > 16 ? 0 : warps == 8 ? 2 : 1; }

/// Tiles of a cluster, and clusters of a query and KV head: they share out the heads of the group.
constexpr int step_tiles(int group) { return group > kTileRows ? kMaxTiles : 1; }
constexpr int step_clusters(int group) { return (group + kMaxTiles * kTileRows - 1) / (kMaxTiles * kTileRows); }

/// The shapes that have kernels: of clusters with two tiles two of them; two key tiles at once where registers allow,
/// and then, but for 1 x 8 with keys of 128, only that. Of e4m3 1 x 8 lacks five registers for it.
constexpr bool has_kernel(ClusterShape shape, int tiles, std::int64_t key_dim, bool float8) {
  if (tiles > 1) return shape == ClusterShape{} || shape == ClusterShape{2, 8};
  const bool pairs = shape.warps == 8 && key_dim <= 128 && !(float8 && shape.ranks == 1);
  return shape.key_tiles == 2 ? pairs : !pairs || (shape.ranks == 1 && key_dim == 128);
}

/// Warps of an SM that share out its registers, and the thread blocks that these are.
constexpr int warps_per_sm(ClusterShape shape, int tiles, std::int64_t key_dim, bool float8) {
  return tiles > 1 || key_dim > 128 ? 8 : float8 ? 16 : shape.key_tiles == 2 ? 8 : 12;
}
constexpr int blocks_per_sm(ClusterShape shape, int tiles, std::int64_t key_dim, bool float8) {
  return warps_per_sm(shape, tiles, key_dim, float8) / shape.warps;
}

/// What the importance of a selection block is made of. A key tile holds whole blocks: 2, 4, 8 or 16 compressed keys
/// each begin in a block. A key covers `strides` strides of d tokens and so reaches one block further at most.
struct BlockKeys {
  int log2_keys = 2;    // of l' / d
  int strides = 2;      // l / d
  int log2_stride = 4;  // of d
  int log2_block = 6;   // of l'

  BlockKeys() = default;
  explicit BlockKeys(const NSAConfig& cfg)
      : strides(cfg.kernel_size / cfg.kernel_stride),
        log2_stride(std::bit_width(static_cast<unsigned>(cfg.kernel_stride)) - 1),
        log2_block(std::bit_width(static_cast<unsigned>(cfg.block_size)) - 1) {
    log2_keys = log2_block - log2_stride;
  }
  __host__ __device__ int log2_blocks() const { return 4 - log2_keys; }  // of a key tile
  __host__ __device__ int blocks() const { return 1 << log2_blocks(); }
  /// N_c(length).
  __device__ int compressed(int kernel_size, int length) const {
    return length < kernel_size ? 0 : ((length - kernel_size) >> log2_stride) + 1;
  }
  /// Bytes of the cached scores of a key tile and a tile of rows: sums of its blocks for sixteen rows, what its last
  /// key gives to the next key tile (both float16), and what they are relative to (float32).
  __host__ __device__ int scores_bytes() const { return (blocks() + 1) * kTileRows * 2 + kTileRows * 4; }
};

struct StepAttendArgs {
  StepGeometry geometry;
  Strided q, gates, o;
  Strided given;                   // int32: blocks to attend to; null data: the step selects
  Strided indices;                 // int32, the selected blocks; null data: not wanted
  CachedBranch cached[kBranches];  // the step's own tokens are in them once the kernel in front has ended
  int window;
  int topk, init_blocks, local_blocks;
  float scale;
  HeadScales key_scales, value_scales;  // of e4m3
  int* lengths;                         // (B), before the step
  bool advance;                         // the step's end advances the lengths
  const int* num_new;                   // (B); null: m
  int positions;                        // that can be rotated
  StepPlan* plan;                       // of the kernel in front
  BlockKeys block_keys;
  ClusterShape shape;
  // Filled in by the launch: key tiles whose scores a thread block caches, an upper bound; clusters of a query and KV
  // head.
  int cached_tiles, clusters;
  bool longest_first;  // has the first clusters, of kernels that can begin with it
};

/// What a thread block has in shared memory, in bytes, in this order.
struct StepMemory {
  std::int64_t ring;     // two key tiles per warp; between the branches also what the choice is made from
  std::int64_t queries;  // of e4m3: fragments of them
  std::int64_t scores;   // sums for the choice
  std::int64_t rows;     // softmaxes of the rows
  std::int64_t others;   // softmaxes of compressed keys for all heads; none where a query has one cluster
  std::int64_t choice;   // candidates and lists
  std::int64_t scratch;  // of the ring, for the choice

  /// keys, blocks: compressed keys and selection blocks of the longest sequence.
  StepMemory(ClusterShape shape, int group, const BlockKeys& block_keys, int key_dim, int value_dim, bool float8,
             int topk, std::int64_t keys, std::int64_t blocks) {
    const int tiles = step_tiles(group), clusters = step_clusters(group), row_count = tiles * kTileRows;
    const auto row_bytes = [&](int dim) { return !float8 ? 2 * dim : dim % 128 ? dim + 16 : dim; };  // as in a Tile
    ring = std::int64_t{2} * shape.warps * kTileKeys * (row_bytes(key_dim) + row_bytes(value_dim));
    queries = float8 ? std::int64_t{row_count} * key_dim * 2 : 0;
    const int stage_key_tiles = shape.warps * shape.key_tiles;
    scores = clusters * tiles * cached_tiles(shape.ranks, stage_key_tiles, keys) * block_keys.scores_bytes();
    rows = std::int64_t{8} * (shape.warps * kTileRows + 2 * 3 * row_count) + 4 * (2 * shape.ranks + 3) * row_count;
    choice = 12 * topk + 8;
    others = clusters > 1 ? std::int64_t{16} * clusters * row_count : 0;
    const std::int64_t threads = 32 * shape.warps;
    const std::int64_t local = cached_tiles(shape.ranks, stage_key_tiles, blocks << block_keys.log2_keys)
                               << block_keys.log2_blocks();
    const std::int64_t each = (local + threads - 1) / threads;
    scratch = std::max(
        16 + 4 * threads + 4 * local + 8 * std::min(local, (topk * each) << log2_class_threads(shape.warps, topk)),
        std::int64_t{topk} * (shape.ranks * 8 + 4));
  }
  std::int64_t bytes() const { return ring + queries + scores + rows + others + choice; }
  bool fits() const { return scratch <= ring && bytes() <= kMaxBytes; }

  /// The key tiles of `keys` compressed keys whose scores a thread block caches.
  static std::int64_t cached_tiles(int ranks, int stage_key_tiles, std::int64_t keys) {
    const std::int64_t stages = (keys + kTileKeys * stage_key_tiles - 1) / (kTileKeys * stage_key_tiles);
    return (stages + ranks - 1) / ranks * stage_key_tiles;
  }

  static constexpr std::int64_t kMaxBytes = 227 * 1024;
};

/// What a thread block of kSharedQueries has in shared memory, in bytes, in this order.
struct QueriesMemory {
  static constexpr int kKeys = 64, kSlots = 5, kGroups = 2, kQueries = kSharedQueries.queries;
  std::int64_t ring;     // of tiles of keys or values, for each warpgroup; for the choice what it is made from
  std::int64_t rows;     // softmaxes and gates of the rows, barriers of the rings and of turns
  std::int64_t lists;    // blocks of each query, and of the queries of each warpgroup
  std::int64_t shared;   // half of the columns of each warp's sums; for the choice importances of blocks, of each query
  std::int64_t scratch;  // of a query's part of the ring, for the choice

  /// blocks: selection blocks of the longest sequence.
  QueriesMemory(const BlockKeys& block_keys, int dim, int topk, std::int64_t blocks)
      : ring(std::int64_t{kGroups} * kSlots * kKeys * dim * 2),
        rows((2 * kGroups * 8 + kBranches * 4) * kQueries * kTileRows + kGroups * 2 * kSlots * 8 + 16),
        lists(((kQueries + kGroups) * list_bytes(topk) + 15) / 16 * 16),
        shared(std::max(std::int64_t{kGroups} * kQueries * kTileRows * dim * 2,
                        4 * kQueries * (sums_of(block_keys, blocks) + key_tiles_of(block_keys, blocks)))),
        scratch(12 * blocks + 4 * 64 + 24) {}
  std::int64_t bytes() const { return ring + rows + lists + shared; }
  bool fits() const { return kQueries * scratch <= ring && bytes() <= StepMemory::kMaxBytes; }

  /// A count and twice topk numbers.
  __host__ __device__ static constexpr int list_bytes(int topk) { return 4 * (1 + 2 * topk); }
  /// Units that `blocks` blocks reach into, and one, and blocks of these.
  static std::int64_t key_tiles_of(const BlockKeys& block_keys, std::int64_t blocks) {
    return ((blocks - 1) >> block_keys.log2_blocks()) + 2;
  }
  static std::int64_t sums_of(const BlockKeys& block_keys, std::int64_t blocks) {
    return key_tiles_of(block_keys, blocks) << block_keys.log2_blocks();
  }
};

/// By kernels that multiply two key tiles at once, of 16 bits.
template <class T, int Dk, int Dv>
[[gnu::weak]] cudaError_t launch_step_pairs(const StepAttendArgs& args, cudaStream_t stream);

/// By the kernel whose thread blocks have several queries.
template <class T, int Dk, int Dv>
[[gnu::weak]] cudaError_t launch_step_queries(const StepAttendArgs& args, cudaStream_t stream);

/// It may begin before the kernel in front of it has ended, and waits for that one before it reads what the step adds.
template <class T, int Dk, int Dv, bool kFloat8>
[[gnu::weak]] cudaError_t launch_step_attend(const StepAttendArgs& args, cudaStream_t stream);

}  // namespace nsa::cuda::sm90::decode
