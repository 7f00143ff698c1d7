// Block selection within a cluster: sums of probabilities that warps cache as keys stream past, importances of
// the blocks of a thread block, the top n of them, and the top n of all.
#pragma once

#include "cuda/common/block_list.cuh"
#include "cuda/common/gumbel.cuh"
#include "cuda/sm90/common/cluster.cuh"
#include "cuda/sm90/common/ptx.cuh"
#include "cuda/sm90/decode/step_attend.h"

namespace nsa::cuda::sm90::decode {

/// The cached scores of a key tile and a tile of rows (BlockKeys::scores_bytes). Rows r and r + 8 lie side by side, as
/// one lane has them.
struct CachedScores {
  char* memory;
  int blocks;

  __device__ __half* sums(int block) const { return reinterpret_cast<__half*>(memory) + block * kTileRows; }
  __device__ __half* crossing() const { return sums(blocks); }  // what its keys give to the next key tile's first block
  __device__ float* reference() const { return reinterpret_cast<float*>(sums(blocks + 1)); }
  __device__ static int row_of(int slot) { return slot / 2 + slot % 2 * 8; }
};

/// Equation 9 as a product: how many strides each key of a key tile shares with blocks first ... first + 7, counted
/// from the key tile's own first one, as this lane's B operand of sixteen keys.
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

/// Keeps the probabilities p of one of kAtOnce key tiles, relative to `reference` (base 2) of the lane's two rows, as
/// sums over selection blocks. weights: from block 0 on.
template <int kAtOnce>
__device__ __forceinline__ void cache_scores(const CachedScores& key_tile, const BlockKeys& shape,
                                             const BlockWeights& weights, const float (&p)[2 * kAtOnce][4], int which,
                                             const float (&reference)[2], int lane) {
  const int column = 2 * (lane & 3);  // the lane's, and the next one
  char* const mine = key_tile.memory + (column * kTileRows * 2 + lane / 4 * 4);
  const auto keep = [&](int block, float low, float high) {
    if (column + block <= key_tile.blocks)
      *reinterpret_cast<std::uint32_t*>(mine + block * kTileRows * 2) = pack(Half{}, low, high);
  };
  std::uint32_t a[4];
  operand_a<Half>(a, p, which);
  float sums[4] = {};
  mma(Half{}, sums, a, weights.b[0], weights.b[1]);
  keep(0, sums[0], sums[2]);
  keep(1, sums[1], sums[3]);
  if (key_tile.blocks == 8) {  // the next key tile's is the ninth
    const BlockWeights beyond(shape, 8, lane);
    float rest[4] = {};
    mma(Half{}, rest, a, beyond.b[0], beyond.b[1]);
    keep(8, rest[0], rest[2]);
  }
  if (column == 0) reinterpret_cast<float2*>(key_tile.reference())[lane / 4] = make_float2(reference[0], reference[1]);
}

/// Where the key tiles of a cluster lie: stages of kStageKeyTiles key tiles go to the ranks in turn, and a rank's key
/// tiles follow each other in its memory.
template <int kRanks, int kStageKeyTiles>
struct KeyTileSlot {
  int rank, local;

  __device__ explicit KeyTileSlot(int key_tile)
      : rank(key_tile / kStageKeyTiles % kRanks),
        local(key_tile / kStageKeyTiles / kRanks * kStageKeyTiles + key_tile % kStageKeyTiles) {}
  __device__ static int key_tile_of(int local, int rank) {
    return (local / kStageKeyTiles * kRanks + rank) * kStageKeyTiles + local % kStageKeyTiles;
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
__device__ __forceinline__ int slot_among(const unsigned* numbers, int count, int at, unsigned mine) {
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

/// How many numbers of a list in any order are larger than `mine`.
__device__ __forceinline__ int count_larger(const unsigned long long* list, int count, unsigned long long mine) {
  int larger = 0;
#pragma unroll 4
  for (int i = 0; i < count; ++i) larger += list[i] > mine;
  return larger;
}

/// How many blocks of a list in any order come before `block`.
__device__ __forceinline__ int count_before(const int* blocks, int count, int block) {
  int before = 0;
#pragma unroll 4
  for (int i = 0; i < count; ++i) before += blocks[i] < block;
  return before;
}

/// Of the `topk` blocks that are given to a query those that count, to `found` in any order; their number. One warp.
__device__ __forceinline__ int read_given(const int* given, int topk, int position, int block_size, int* found,
                                          int lane) {
  int count = 0;
  for (int first = 0; first < topk; first += 32) {
    const int i = first + lane;
    const bool good = i < topk && counts(given, i, position, block_size);
    const unsigned lanes = __ballot_sync(0xffffffffu, good);
    if (good) found[count + __popc(lanes & ((1u << lane) - 1))] = given[i];
    count += __popc(lanes);
  }
  return count;
}

/// The candidates of a query at `position`, those that are forced, and the slots left for the others.
struct Candidates {
  int count, init, first_local, slots;

  __device__ Candidates(const StepAttendArgs& args, int position) {
    count = (position >> args.block_keys.log2_block) + 1;
    init = min(args.init_blocks, count);
    first_local = max(max(count - args.local_blocks, 0), init);
    slots = args.topk - init - (count - first_local);
  }
  __device__ bool all(const StepAttendArgs& args) const { return count <= args.topk; }
  __device__ bool forced(int block) const { return block < init || block >= first_local; }
  __device__ int num_forced() const { return init + count - first_local; }
  /// i < num_forced(), ascending.
  __device__ int forced_block(int i) const { return i < init ? i : first_local + i - init; }
};

/// What the choice is made from, in shared memory (StepMemory::choice).
struct ChoiceMemory {
  char* memory;
  int topk;

  /// (topk), 0: none; read by the others.
  __device__ unsigned long long* candidates() const { return reinterpret_cast<unsigned long long*>(memory); }
  /// Of the blocks that are chosen, and these, ascending.
  __device__ int& count() const { return *reinterpret_cast<int*>(candidates() + topk); }
  __device__ int* blocks() const { return &count() + 1; }
};

/// A block's importance for the first `count` rows of a tile: its sums over them, if the key tile has any keys, and for
/// a key tile's first block what the keys of the key tile before give, which lies in the thread block `rank`. totals:
/// of the tile's rows.
template <int kRanks>
__device__ __forceinline__ float importance_of(bool has_keys, CachedScores key_tile, int block, bool crosses,
                                               CachedScores before, int rank, const float2* totals, int count) {
  float sum = 0;
#pragma unroll 1
  for (int r = 0; r < kTileRows; r += 8) {  // eight slots of rows at a time
    uint4 sums{}, crossings{};
    constexpr float kNone = -INFINITY;
    float4 low{kNone, kNone, kNone, kNone}, high = low, low_before = low, high_before = low;
    if (has_keys) {
      sums = *reinterpret_cast<const uint4*>(key_tile.sums(block) + r);
      low = *reinterpret_cast<const float4*>(key_tile.reference() + r);
      high = *reinterpret_cast<const float4*>(key_tile.reference() + r + 4);
    }
    if (crosses) {
      const auto* const reference = reinterpret_cast<const float4*>(before.reference() + r);
      crossings = load_rank<kRanks>(reinterpret_cast<const uint4*>(before.crossing() + r), rank);
      low_before = load_rank<kRanks>(reference, rank), high_before = load_rank<kRanks>(reference + 1, rank);
    }
    const auto add = [&](int i, float x, float reference_of, float y, float reference_before) {
      const int row = CachedScores::row_of(r + i);
      const float2 all = totals[row];
      const float share = x * exp2_fast(reference_of - all.x) + y * exp2_fast(reference_before - all.x);
      sum += row < count ? share * all.y : 0;
    };
    const auto add_pair = [&](int i, std::uint32_t x, float2 of, std::uint32_t y, float2 of_before) {
      const float2 a = unpack(Half{}, x), c = unpack(Half{}, y);
      add(i, a.x, of.x, c.x, of_before.x), add(i + 1, a.y, of.y, c.y, of_before.y);
    };
    add_pair(0, sums.x, {low.x, low.y}, crossings.x, {low_before.x, low_before.y});
    add_pair(2, sums.y, {low.z, low.w}, crossings.y, {low_before.z, low_before.w});
    add_pair(4, sums.z, {high.x, high.y}, crossings.z, {high_before.x, high_before.y});
    add_pair(6, sums.w, {high.z, high.w}, crossings.w, {high_before.z, high_before.w});
  }
  return sum;
}

/// The blocks that the query attends to, the same list in all of the cluster's thread blocks. Works in the ring's
/// memory, which is not used otherwise then. S: a StepShape. totals_of(tile): of compressed keys. writes: the list of
/// blocks, too.
template <class S, class TotalsOf>
__device__ __forceinline__ void choose_blocks(const StepAttendArgs& args, int b, char* memory,
                                              const TotalsOf& totals_of, int tiles, const ChoiceMemory& choice,
                                              char* all_scores, int row, int position, int compressed, bool chooses,
                                              bool fits, bool writes) {
  constexpr int kRanks = S::kRanks, kStageTiles = S::kStageKeyTiles, kThreads = S::kThreads;
  const BlockKeys& shape = args.block_keys;
  const int thread = threadIdx.x, lane = thread % 32, warp = warp_uniform(thread / 32), rank = S::rank();
  const int kv_head = blockIdx.y, topk = args.topk;
  const Candidates candidates(args, position);
  const bool ranks_blocks = chooses && !candidates.all(args);  // else all of them fit
  if (ranks_blocks) {
    const int scores_bytes = shape.scores_bytes(), log2_blocks = shape.log2_blocks();
    const int key_tiles = (compressed + kTileKeys - 1) / kTileKeys;
    const int all_key_tiles = (candidates.count + shape.blocks() - 1) >> log2_blocks;
    const int stages = max((all_key_tiles + kStageTiles * (kRanks - rank) - 1) / (kStageTiles * kRanks), 0);
    const int local_blocks = stages * kStageTiles << log2_blocks;  // in this thread block
    const int each = (local_blocks + kThreads - 1) / kThreads;     // neighbouring blocks of a thread
    auto* const keys = reinterpret_cast<unsigned*>(memory);        // their importances
    unsigned* const largest = keys + local_blocks;                 // of each thread
    unsigned& threshold = largest[kThreads];
    int& listed = reinterpret_cast<int&>(largest[kThreads + 1]);
    auto* const list = reinterpret_cast<unsigned long long*>(largest + kThreads + 4);  // blocks above the threshold
    const auto block_at = [&](int local) {
      return (S::TileSlot::key_tile_of(local >> log2_blocks, rank) << log2_blocks) + (local & (shape.blocks() - 1));
    };
    for (int i = thread; i < topk; i += kThreads) choice.candidates()[i] = 0;
    const auto each_own = [&](const auto& body) {
#pragma unroll 1
      for (int i = 0; i < each; ++i)  // all lanes leave it together
        if (const int local = thread * each + i; local < local_blocks) body(local);
    };
    each_own([&](int local) {
      const int local_tile = local >> log2_blocks, in_tile = local & (shape.blocks() - 1);
      const int key_tile = S::TileSlot::key_tile_of(local_tile, rank), block = block_at(local);
      unsigned key = 0;
      if (block < candidates.count && !candidates.forced(block)) {
        const bool crosses = in_tile == 0 && key_tile > 0 && key_tile <= key_tiles && shape.strides > 1;
        const typename S::TileSlot before(max(key_tile - 1, 0));
        float sum = 0;
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
          char* const of_tile = all_scores + tile * args.cached_tiles * scores_bytes;
          const CachedScores here{of_tile + local_tile * scores_bytes, shape.blocks()};
          const CachedScores there{of_tile + before.local * scores_bytes, shape.blocks()};
          sum += importance_of<kRanks>(key_tile < key_tiles, here, in_tile, crosses, there, before.rank,
                                       totals_of(tile), args.geometry.group - tile * kTileRows);
        }
        key = ordered(sum);
      }
      keys[local] = key;
    });
    unsigned mine = 0;
    each_own([&](int local) { mine = max(mine, keys[local]); });
    largest[thread] = mine;
    if (thread == 0) threshold = 1, listed = 0;
    __syncthreads();
    // The thread block's candidates, the most important first. They belong to the first threads in the order of largest
    // importances, and none is below that of the last of these.
    const int slot = mine ? slot_among(largest, min(local_blocks, kThreads), thread, mine) : candidates.slots;
    const bool among_first = slot < candidates.slots;
    if (each == 1) {
      if (among_first) choice.candidates()[slot] = candidate(mine, block_at(thread));
    } else {
      if (slot == candidates.slots - 1) threshold = mine;
      __syncthreads();
      if (among_first)
        each_own([&](int local) {
          if (keys[local] >= threshold) list[atomicAdd(&listed, 1)] = candidate(keys[local], block_at(local));
        });
      __syncthreads();
      const int count = listed;
#pragma unroll 1
      for (int i = thread; i < count; i += kThreads) {
        const unsigned long long candidate = list[i];
        const int larger = count_larger(list, count, candidate);
        if (larger < candidates.slots) choice.candidates()[larger] = candidate;
      }
    }
    S::sync();
  }
  auto* const entries = reinterpret_cast<unsigned long long*>(memory);  // (kRanks, topk)
  int* const found = reinterpret_cast<int*>(entries + kRanks * topk);   // (topk), in any order
  /// Found blocks to the query's list, ascending.
  const auto sort = [&](bool writes) {
    __syncthreads();
    for (int i = thread; i < topk; i += kThreads) {
      const int count = choice.count(), block = i < count ? found[i] : -1;
      int slot = i;
      if (i < count) {
        slot = count_before(found, count, block);
        choice.blocks()[slot] = block;
      }
      if (writes) args.indices.template at<int>(b, row, kv_head)[slot] = fits ? block : -1;
    }
    __syncthreads();
  };
  if (chooses) {
    if (kRanks > 1 && ranks_blocks)
#pragma unroll 1
      for (int i = thread; i < kRanks * topk; i += kThreads) {
        const int slot = i / kRanks, of_rank = i % kRanks;
        const uint2 x = load_remote_uint2(map_to_rank(shared_address(choice.candidates() + slot), of_rank));
        entries[of_rank * topk + slot] = static_cast<unsigned long long>(x.y) << 32 | x.x;
      }
    const bool all = candidates.all(args);
    for (int i = thread; i < topk; i += kThreads)
      found[i] = all ? i : i < candidates.num_forced() ? candidates.forced_block(i) : 0;
    if (thread == 0) choice.count() = all ? candidates.count : candidates.num_forced();
    if (ranks_blocks) {
      __syncthreads();
#pragma unroll 1
      for (int i = thread; i < kRanks * topk; i += kThreads) {
        const unsigned long long mine = kRanks == 1 ? choice.candidates()[i] : entries[i];
        if (mine == 0) continue;
        const int slot = kRanks == 1 ? i : count_larger<kRanks>(entries, topk, mine);
        if (slot >= candidates.slots) continue;
        found[candidates.num_forced() + slot] = block_of(mine);
        atomicAdd(&choice.count(), 1);
      }
    }
    sort(writes);
  }
  if (args.given.data) {
    if (warp == 0) {
      const int* const given = args.given.template at<const int>(b, row, kv_head);
      const int count = read_given(given, topk, position, 1 << shape.log2_block, found, lane);
      if (lane == 0) choice.count() = count;
    }
    sort(false);
  }
}

}  // namespace nsa::cuda::sm90::decode
