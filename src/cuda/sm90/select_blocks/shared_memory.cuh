// What the warps of compressed_select.cu share: sizes, shared memory, barriers, their walk over tiles of queries.
#pragma once

#include <type_traits>

#include "cuda/sm90/common/forward_pipeline.cuh"
#include "cuda/sm90/select_blocks/importance.cuh"
#include "cuda/sm90/select_blocks/topk.cuh"

namespace nsa::cuda::sm90::select_blocks {

inline constexpr int kGroups = 3, kThreads = (kGroups + 1) * 128;
inline constexpr int kWarpTiles = kGroups * 4;
static_assert(kWarpTiles == WarpTiles::kWarpTiles);
inline constexpr int kKeys = 64;  // of a key tile
inline constexpr int kComputeRegisters = 144, kHelperRegisters = 80;
inline constexpr int kMaxStages = 4;  // of the ring of key and value tiles
inline constexpr int kBuffers = CompressedSelectScratch::kBuffers,
                     kSelectorWarps = CompressedSelectScratch::kSelectorWarps;
inline constexpr int kMaxChunks = 4;  // on their way; fewer where shared memory is full of scores

template <int Dk, int Dv>
struct SelectLayout {
  static constexpr int kStages = Dk > 128 ? 3 : kMaxStages;
  static constexpr int kKeyBytes = kKeys * Dk * 2, kValueBytes = kKeys * Dv * 2, kQueryBytes = 64 * Dk * 2;
  static constexpr int kFixed = 1024 + kGroups * kQueryBytes + kStages * (kKeyBytes + kValueBytes);
  /// Of a selector warp: chunks, rings of keys, then a list and keys of a query, or lists of four.
  __host__ __device__ static constexpr int selector_warp(const WarpTiles& warp_tiles, int blocks, int chunks,
                                                         bool key_rings) {
    return chunks * ChunkRing::kChunkBytes + (key_rings ? key_ring(warp_tiles) : 0) +
           (warp_tiles.together > 1 ? 4 * kListBytes : kListBytes + keys(blocks));
  }
  __host__ __device__ static constexpr int key_ring(const WarpTiles& warp_tiles) {
    return (warp_tiles.together > 1 ? 4 : 1) * CompressedSelectScratch::kRingKeys * 4;
  }
  __host__ __device__ static constexpr int keys(int blocks) { return (blocks + 127) / 128 * 512; }
  static constexpr int memory(const WarpTiles& warp_tiles, int blocks, int chunks, bool key_rings) {
    return kFixed + kSelectorWarps * selector_warp(warp_tiles, blocks, chunks, key_rings);
  }
};

struct SelectBarriers : ForwardBarriers<kMaxStages, kGroups> {
  std::uint64_t scratch_full[kBuffers][kWarpTiles],
      scratch_empty[kBuffers][kWarpTiles];  // the scratch is complete; may be overwritten
  std::uint64_t chunk_full[kSelectorWarps][kMaxChunks];
  MinusLse minus_lse[kBuffers][kWarpTiles];
};

/// Tiles: WarpTiles, or WarpTilesOfSixteen.
template <class Tiles>
__device__ __forceinline__ decltype(auto) warp_tiles_of(const CompressedSelectArgs& args) {
  if constexpr (std::is_same_v<Tiles, WarpTiles>) {
    return (args.warp_tiles);
  } else {
    return Tiles{};
  }
}

/// Key tiles in which a query at `position` sees something. Its last key counts in the stride behind, too, where l =
/// 2d, and that may be the first one of a further tile. It lies in the query's own block, which is chosen anyway; only
/// if blocks are single strides it may be a block that is not.
template <class Blocks>
__device__ __forceinline__ int key_tiles_of(const Geometry& p, int position) {
  const int keys = visible_keys(p, 0, position).last;
  if (Blocks::kOfOneStride) return keys > 0 ? keys / kKeys + 1 : 0;
  return (keys + kKeys - 1) / kKeys;
}

/// Whole groups: the warp tiles take care of slices.
template <class Tiles>
__device__ __forceinline__ TileScheduler scheduler_of(const CompressedSelectArgs& args) {
  const Tiles& warp_tiles = warp_tiles_of<Tiles>(args);
  return TileScheduler(args.range.geometry, HeadPacking(warp_tiles.heads), warp_tiles.queries);
}

/// The scratch of a warp tile of this thread block's tile.
template <class Blocks>
__device__ __forceinline__ ScratchTile* scratch_of(const CompressedSelectArgs& args, int buffer, int warp_tile) {
  return static_cast<ScratchTile*>(args.scratch) +
         static_cast<std::int64_t>((blockIdx.x * kBuffers + buffer) * kWarpTiles + warp_tile) *
             (most_key_tiles(args.range.geometry) * Blocks::kTiles);
}

}  // namespace nsa::cuda::sm90::select_blocks
