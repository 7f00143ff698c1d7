// What an instance of step_attend is compiled for, and how its shared memory is laid out.
#pragma once

#include <type_traits>

#include "cuda/common/tile.cuh"
#include "cuda/sm90/common/cluster.cuh"
#include "cuda/sm90/decode/attend/block_choice.cuh"

namespace nsa::cuda::sm90::decode {

/// kFloat8: keys and values are in e4m3 and are multiplied in float16. kRanks, kWarps: as in ClusterShape.
template <class T, int Dk, int Dv, int kOfTiles, bool kInFloat8, int kOfRanks, int kOfWarps, int kOfKeyTiles>
struct StepShape {
  using Input = T;
  static constexpr int kKeyDim = Dk, kValueDim = Dv;
  static constexpr int kTiles = kOfTiles;
  static constexpr bool kFloat8 = kInFloat8;
  static constexpr ClusterShape kShape{kOfRanks, kOfWarps, kOfKeyTiles};
  static constexpr int kRanks = kOfRanks, kWarps = kOfWarps, kThreads = 32 * kWarps;
  // Of an SM: its registers are shared out among so many thread blocks, each of so many threads.
  static constexpr int kBlocks = blocks_per_sm(kShape, kTiles, Dk, kFloat8);
  static constexpr int kAtOnce = kOfKeyTiles;
  static constexpr int kRegisterThreads = 32 * warps_per_sm(kShape, kTiles, Dk, kFloat8) / kBlocks;
  static constexpr int kLoadKeys = kTileKeys * kAtOnce;
  static constexpr int kStageKeyTiles = kWarps * kAtOnce;
  using TileSlot = KeyTileSlot<kRanks, kStageKeyTiles>;
  using Element = std::conditional_t<kFloat8, Half, T>;  // of products
  static constexpr int kItem = kFloat8 ? 1 : 2;          // bytes of a stored element
  // Rows of keys and values in shared memory, in key tiles of two bytes.
  using Keys = Tile<Half, Dk * kItem / 2>;
  using Values = Tile<Half, Dv * kItem / 2>;
  static constexpr int kSplits = kWarps / kTiles;  // warps of a tile
  static constexpr int kRows = kTiles * kTileRows;
  static constexpr int kValues = Keys::bytes(kTileKeys), kKeyTileBytes = kValues + Values::bytes(kTileKeys);
  static constexpr int kStageKeys = kTileKeys * kStageKeyTiles, kWarpRing = 2 * kKeyTileBytes,
                       kRing = kWarpRing * kWarps;  // kWarpRing: a warp's
  static constexpr int kQueries = kFloat8 ? kTiles * Tile<T, Dk>::bytes(kTileRows) : 0;
  static constexpr int kColumns = Dv / 8;                 // tiles of eight columns
  static constexpr int kOwnColumns = kColumns / kSplits;  // that a warp has of its tile after a merge
  static constexpr int kSums = kColumns * 512;            // bytes of a tile's sums, 16 bytes a lane for eight columns
  // Where a cluster's warps have one or two loads of the window each, some thread blocks have none of it, and others
  // none of the selected blocks. So that both are at work together, the window comes after the selection.
  static constexpr bool kWindowLast = kRanks > 1 && kAtOnce == 2 && !kFloat8;
  static constexpr int kLateBranches = kWindowLast ? 2 : 1;  // those whose softmaxes are exchanged with the outputs
  static __device__ __forceinline__ int rank() { return kRanks == 1 ? 0 : cluster_rank(); }
  /// Barriers of the cluster.
  static __device__ __forceinline__ void sync() { kRanks == 1 ? __syncthreads() : cluster_sync(); }
  static __device__ __forceinline__ void sync_reads() {
    if constexpr (kRanks > 1) cluster_sync_reads();
  }
  static_assert(kSums <= kWarpRing && kColumns % kSplits == 0 && kColumns % kRanks == 0);
};

/// Dynamic shared memory: the ring, then what StepMemory names.
extern __shared__ __align__(128) char step_memory[];

/// A warp's tile of queries as A operands.
template <class S>
using QueryFragments = std::uint32_t[S::kKeyDim / 16][4];

/// Maxima in base-2 key tiles and sums of softmaxes of compressed keys: of a thread block, read by the others, and
/// totals as in RowMemory. For heads that are another cluster's.
template <class S>
struct OtherRows {
  float2 own[S::kRows], totals[S::kRows];
};

/// Maxima in base-2 key tiles and sums of the softmaxes of a thread block's rows, in shared memory.
template <class S>
struct RowMemory {
  float2 warps[S::kWarps][kTileRows];
  float2 branches[kBranches][S::kRows];   // of the thread block; read by the others
  float2 totals[kBranches][S::kRows];     // of the cluster: maximum and 1 / sum, {0, 0}: sees nothing
  float factors[2][S::kRanks][S::kRows];  // of the thread blocks' shares of the window and of the selected branch
  float gates[kBranches][S::kRows];
};

/// A thread's warp, and the tile of rows that it shares with the warps of other splits.
template <class S>
struct StepWarp {
  RowMemory<S>& rows;
  int lane, warp, tile, split;
};

}  // namespace nsa::cuda::sm90::decode
