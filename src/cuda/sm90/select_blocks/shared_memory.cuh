// What the warps of compressed_select.cu share: sizes, shared memory, barriers, their walk over tiles of queries.
#pragma once

#include <type_traits>

#include "cuda/sm90/common/forward_parts.cuh"
#include "cuda/sm90/select_blocks/importance.cuh"
#include "cuda/sm90/select_blocks/topk.cuh"

namespace nsa::cuda::sm90::select_blocks {

inline constexpr int kGroups = 3, kThreads = (kGroups + 1) * 128;
inline constexpr int kUnits = kGroups * 4;
static_assert(kUnits == SelectUnits::kUnits);
inline constexpr int kKeys = 64;  // of a key tile
inline constexpr int kComputeRegisters = 144, kHelperRegisters = 80;
inline constexpr int kMostStages = 4;  // of the ring of key and value tiles
inline constexpr int kBuffers = CompressedSelectScratch::kBuffers, kPickers = CompressedSelectScratch::kPickers;
inline constexpr int kMostChunks = 4;  // on their way; fewer where shared memory is full of keys to rank by

template <int Dk, int Dv>
struct SelectLayout {
  static constexpr int kStages = Dk > 128 ? 3 : kMostStages;
  static constexpr int kKeyBytes = kKeys * Dk * 2, kValueBytes = kKeys * Dv * 2, kQueryBytes = 64 * Dk * 2;
  static constexpr int kFixed = 1024 + kGroups * kQueryBytes + kStages * (kKeyBytes + kValueBytes);
  /// Of a picking warp: chunks, rings of keys, then a list and keys of a query, or lists of four.
  __host__ __device__ static constexpr int picker(const SelectUnits& units, int blocks, int chunks, bool key_rings) {
    return chunks * ChunkRing::kChunkBytes + (key_rings ? key_ring(units) : 0) +
           (units.together > 1 ? 4 * kListed * 8 : kListed * 8 + keys(blocks));
  }
  __host__ __device__ static constexpr int key_ring(const SelectUnits& units) {
    return (units.together > 1 ? 4 : 1) * CompressedSelectScratch::kRingKeys * 4;
  }
  __host__ __device__ static constexpr int keys(int blocks) { return (blocks + 127) / 128 * 512; }
  static constexpr int memory(const SelectUnits& units, int blocks, int chunks, bool key_rings) {
    return kFixed + kPickers * picker(units, blocks, chunks, key_rings);
  }
};

struct SelectBarriers : ForwardBarriers<kMostStages, kGroups> {
  std::uint64_t scratch_full[kBuffers][kUnits],
      scratch_empty[kBuffers][kUnits];  // the scratch is complete; may be overwritten
  std::uint64_t chunk_full[kPickers][kMostChunks];
  MinusLse minus_lse[kBuffers][kUnits];
};

/// Units: SelectUnits, or UnitsOfSixteen.
template <class Units>
__device__ __forceinline__ decltype(auto) units_of(const CompressedSelectArgs& args) {
  if constexpr (std::is_same_v<Units, SelectUnits>) {
    return (args.units);
  } else {
    return Units{};
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

/// Whole groups: the units take care of slices.
template <class Units>
__device__ __forceinline__ TileWalk walk_of(const CompressedSelectArgs& args) {
  const Units& units = units_of<Units>(args);
  return TileWalk(args.range.geometry, RowShape(units.heads), units.queries);
}

/// The scratch of a unit of this thread block's tile.
template <class Blocks>
__device__ __forceinline__ ScratchTile* scratch_of(const CompressedSelectArgs& args, int buffer, int unit) {
  return static_cast<ScratchTile*>(args.scratch) +
         static_cast<std::int64_t>((blockIdx.x * kBuffers + buffer) * kUnits + unit) *
             (most_key_tiles(args.range.geometry) * Blocks::kTiles);
}

}  // namespace nsa::cuda::sm90::select_blocks
