// The choice of blocks within a cluster: sums of probabilities that warps keep as keys stream past, importances of the
// blocks that a thread block has kept, the top n of them, and the top n of all.
#pragma once

#include "cuda/common/block_list.cuh"
#include "cuda/common/gumbel.cuh"
#include "cuda/sm90/common/cluster.cuh"
#include "cuda/sm90/common/ptx.cuh"
#include "cuda/sm90/decode/step_attend.h"

namespace nsa::cuda::sm90::decode {

/// What is kept of a unit and tile (BlockKeys::kept_bytes). Rows r and r + 8 lie side by side, as one lane has them.
struct KeptUnit {
  char* memory;
  int blocks;

  __device__ __half* sums(int block) const { return reinterpret_cast<__half*>(memory) + block * kTileRows; }
  __device__ __half* crossing() const { return sums(blocks); }  // what its keys give to the next unit's first block
  __device__ float* reference() const { return reinterpret_cast<float*>(sums(blocks + 1)); }
  __device__ static int row_of(int place) { return place / 2 + place % 2 * 8; }
};

/// Equation 9 as a product: how many strides each key of a unit shares with blocks first ... first + 7, counted from
/// the unit's own first one, as this lane's B operand of sixteen keys.
struct BlockWeights {
  std::uint32_t b[2];

  __device__ BlockWeights(const BlockKeys& shape, int first, int lane) {
    const int begin = (first + lane / 4) << shape.log2_keys, end = begin + (1 << shape.log2_keys);
    const auto shared = [&](int key) {
      return static_cast<float>(max(min(key + shape.strides, end) - max(key, begin), 0));
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = 2 * (lane & 3) + 8 * i;
      b[i] = pack(Half{}, shared(key), shared(key + 1));
    }
  }
};

/// Keeps a unit's probabilities p, relative to `reference` (base 2) of the lane's two rows, as sums over selection
/// blocks. weights: from block 0 on.
__device__ __forceinline__ void keep_unit(const KeptUnit& unit, const BlockKeys& shape, const BlockWeights& weights,
                                          const float (&p)[2][4], const float (&reference)[2], int lane) {
  const int column = 2 * (lane & 3);  // the lane's, and the next one
  char* const mine = unit.memory + (column * kTileRows * 2 + lane / 4 * 4);
  const auto keep = [&](int block, float low, float high) {
    if (column + block <= unit.blocks)
      *reinterpret_cast<std::uint32_t*>(mine + block * kTileRows * 2) = pack(Half{}, low, high);
  };
  std::uint32_t a[4];
  operand_a<Half>(a, p, 0);
  float sums[4] = {};
  mma(Half{}, sums, a, weights.b[0], weights.b[1]);
  keep(0, sums[0], sums[2]);
  keep(1, sums[1], sums[3]);
  if (unit.blocks == 8) {  // the next unit's is the ninth
    const BlockWeights beyond(shape, 8, lane);
    float rest[4] = {};
    mma(Half{}, rest, a, beyond.b[0], beyond.b[1]);
    keep(8, rest[0], rest[2]);
  }
  if (column == 0) reinterpret_cast<float2*>(unit.reference())[lane / 4] = make_float2(reference[0], reference[1]);
}

/// Where the units of a cluster lie: stages of kWarps units go to the ranks in turn, and a rank's units follow each
/// other in its memory.
template <int kRanks, int kWarps>
struct UnitPlace {
  int rank, local;

  __device__ explicit UnitPlace(int unit)
      : rank(unit / kWarps % kRanks), local(unit / kWarps / kRanks * kWarps + unit % kWarps) {}
  __device__ static int unit_of(int local, int rank) {
    return (local / kWarps * kRanks + rank) * kWarps + local % kWarps;
  }
};

/// A block that may be chosen, as a number that orders by importance, of equal ones the lower block first; 0: none.
__device__ __forceinline__ unsigned long long candidate(unsigned importance, int block) {
  return importance ? static_cast<unsigned long long>(importance) << 32 | (0xffffffffu - static_cast<unsigned>(block))
                    : 0;
}
__device__ __forceinline__ int block_of(unsigned long long candidate) {
  return static_cast<int>(0xffffffffu - static_cast<unsigned>(candidate));
}

/// How many of the `count` numbers come before number `at`, which is `mine`: larger ones, and equal ones in front of
/// it. count: a multiple of four.
__device__ __forceinline__ int place_among(const unsigned* numbers, int count, int at, unsigned mine) {
  const auto* const four = reinterpret_cast<const uint4*>(numbers);
  int counts[4] = {};
  const auto add = [&](int i, unsigned least) {
    const uint4 k = four[i];
    counts[0] += k.x >= least, counts[1] += k.y >= least, counts[2] += k.z >= least, counts[3] += k.w >= least;
  };
  const int own = at / 4;
#pragma unroll 4
  for (int i = 0; i < own; ++i) add(i, mine);
  const uint4 k = four[own];
  const int beside = (k.x > mine || (k.x == mine && at % 4 > 0)) + (k.y > mine || (k.y == mine && at % 4 > 1)) +
                     (k.z > mine || (k.z == mine && at % 4 > 2)) + (k.w > mine);
  if (mine != 0xffffffffu)
#pragma unroll 4
    for (int i = own + 1; i < count / 4; ++i) add(i, mine + 1);
  return beside + counts[0] + counts[1] + counts[2] + counts[3];
}

/// How many of the numbers in kRanks descending lists of `count` are larger than `mine`.
template <int kRanks>
__device__ __forceinline__ int count_larger(const unsigned long long* lists, int count, unsigned long long mine) {
  int larger[kRanks] = {};
#pragma unroll 1
  for (int step = 1 << (31 - __clz(count)); step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < kRanks; ++i)
      if (larger[i] + step <= count && lists[i * count + larger[i] + step - 1] > mine) larger[i] += step;
  }
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kRanks; ++i) sum += larger[i];
  return sum;
}

/// The candidates of a query at `position`, those that are forced, and the places left for the others.
struct Candidates {
  int count, init, first_local, places;

  __device__ Candidates(const StepAttendArgs& args, int position) {
    count = (position >> args.block_keys.log2_block) + 1;
    init = min(args.init_blocks, count);
    first_local = max(max(count - args.local_blocks, 0), init);
    places = args.topk - init - (count - first_local);
  }
  __device__ bool all(const StepAttendArgs& args) const { return count <= args.topk; }
  __device__ bool forced(int block) const { return block < init || block >= first_local; }
  __device__ int num_forced() const { return init + count - first_local; }
  /// i < num_forced(), ascending.
  __device__ int forced_block(int i) const { return i < init ? i : first_local + i - init; }
};

}  // namespace nsa::cuda::sm90::decode
