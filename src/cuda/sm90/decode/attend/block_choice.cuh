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

/// How many of the `count` numbers come before number `at`, which is `mine` and not 0: larger ones, and equal ones in
/// front of it. count: a multiple of sixteen.
__device__ __forceinline__ int slot_among(const unsigned* numbers, int count, int at, unsigned mine) {
  const auto* const four = reinterpret_cast<const uint4*>(numbers);
  const int own = at / 4;
  int counts[4] = {};
#pragma unroll 1
  for (int first = 0; first < count / 4; first += 4)
#pragma unroll
    for (int i = first; i < first + 4; ++i) {
      const uint4 k = four[i];
      const unsigned below = mine - (i < own);
      counts[0] += k.x > below, counts[1] += k.y > below, counts[2] += k.z > below, counts[3] += k.w > below;
    }
  const uint4 k = four[own];
  const int equal = (k.x == mine && at % 4 > 0) + (k.y == mine && at % 4 > 1) + (k.z == mine && at % 4 > 2);
  return equal + counts[0] + counts[1] + counts[2] + counts[3];
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

/// Lanes that share out the rows of a key tile's importances, and the blocks that these are worked out for at a time.
inline constexpr int kTileLanes = 4;

/// Adds the importances of the blocks first ... first + 3 of a key tile for the lane's quarter of the rows of a tile,
/// of which the first `count` count: the blocks' sums, if the key tile has any keys, and for its block 0 what the keys
/// of the key tile before give, which lies in the thread block `rank`. totals: of the tile's rows.
template <int kRanks>
__device__ __forceinline__ void add_importances(float (&sums)[kTileLanes], bool has_keys, CachedScores key_tile,
                                                int first, bool crosses, CachedScores before, int rank,
                                                const float2* totals, int count, int lane) {
  const int slot = lane % kTileLanes * 4, row = slot / 2;  // of rows row, row + 8, row + 1, row + 9
  constexpr float kNone = -INFINITY;
  float4 reference{kNone, kNone, kNone, kNone}, reference_before = reference;
  uint2 words[kTileLanes] = {}, crossing{};
  if (has_keys) {
    reference = *reinterpret_cast<const float4*>(key_tile.reference() + slot);
#pragma unroll
    for (int i = 0; i < kTileLanes; ++i)
      if (first + i < key_tile.blocks) words[i] = *reinterpret_cast<const uint2*>(key_tile.sums(first + i) + slot);
  }
  if (crosses) {
    crossing = load_rank<kRanks>(reinterpret_cast<const uint2*>(before.crossing() + slot), rank);
    reference_before = load_rank<kRanks>(reinterpret_cast<const float4*>(before.reference() + slot), rank);
  }
  const float4 low = *reinterpret_cast<const float4*>(totals + row);
  const float4 high = *reinterpret_cast<const float4*>(totals + row + 8);
  const auto add_row = [&](int i, float reference_of, float reference_there, float2 all, int row) {
    const float factor = exp2_fast(reference_of - all.x), factor_before = exp2_fast(reference_there - all.x);
    const auto number = [&](const uint2& x) {
      const float2 pair = unpack(Half{}, i / 2 ? x.y : x.x);
      return i % 2 ? pair.y : pair.x;
    };
#pragma unroll
    for (int n = 0; n < kTileLanes; ++n) {
      float share = number(words[n]) * factor;
      if (n == 0) share += number(crossing) * factor_before;
      sums[n] = row < count ? sums[n] + share * all.y : sums[n];
    }
  };
  add_row(0, reference.x, reference_before.x, {low.x, low.y}, row);
  add_row(1, reference.y, reference_before.y, {high.x, high.y}, row + 8);
  add_row(2, reference.z, reference_before.z, {low.z, low.w}, row + 1);
  add_row(3, reference.w, reference_before.w, {high.z, high.w}, row + 9);
}

/// The sum over kTileLanes neighbouring lanes of the number that is the lane's.
__device__ __forceinline__ float own_sum(const float (&sums)[kTileLanes], int lane) {
  static_assert(kTileLanes == 4);
  const bool odd = lane & 1, upper = lane & 2;
  const float low = (odd ? sums[1] : sums[0]) + __shfl_xor_sync(0xffffffffu, odd ? sums[0] : sums[1], 1);
  const float high = (odd ? sums[3] : sums[2]) + __shfl_xor_sync(0xffffffffu, odd ? sums[2] : sums[3], 1);
  return (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, 2);
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
  const bool ranks_blocks = chooses && !candidates.all(args) && candidates.slots > 0;  // else there is nothing to rank
  auto* const entries = reinterpret_cast<unsigned long long*>(memory);                 // (kRanks, topk)
  int* const found = reinterpret_cast<int*>(entries + kRanks * topk);                  // (topk), in any order
  int num_found = 0;                                                                   // ranked by a thread block alone
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
    if (kRanks > 1)
      for (int i = thread; i < topk; i += kThreads) choice.candidates()[i] = 0;
    if (thread == 0) threshold = 1, listed = 0;
    // Neighbouring lanes have a key tile, and one of its blocks each.
    const int rounds = max(shape.blocks() / kTileLanes, 1), tasks = stages * kStageTiles * rounds;
#pragma unroll 1
    for (int begin = warp * (32 / kTileLanes); begin < tasks; begin += kThreads / kTileLanes) {
      const int task = begin + lane / kTileLanes, local_tile = shape.blocks() > kTileLanes ? task / 2 : task;
      const int first = shape.blocks() > kTileLanes ? task % 2 * kTileLanes : 0, in_tile = first + lane % kTileLanes;
      const int key_tile = S::TileSlot::key_tile_of(local_tile, rank);
      const bool crosses = first == 0 && key_tile > 0 && key_tile <= key_tiles && shape.strides > 1 && task < tasks;
      const typename S::TileSlot before(max(key_tile - 1, 0));
      float sums[kTileLanes] = {};
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile) {
        char* const of_tile = all_scores + tile * args.cached_tiles * scores_bytes;
        const CachedScores here{of_tile + local_tile * scores_bytes, shape.blocks()};
        const CachedScores there{of_tile + before.local * scores_bytes, shape.blocks()};
        add_importances<kRanks>(sums, key_tile < key_tiles && task < tasks, here, first, crosses, there, before.rank,
                                totals_of(tile), args.geometry.group - tile * kTileRows, lane);
      }
      const float sum = own_sum(sums, lane);
      const int block = (key_tile << log2_blocks) + in_tile;
      if (task < tasks && in_tile < shape.blocks())
        keys[(local_tile << log2_blocks) + in_tile] =
            block < candidates.count && !candidates.forced(block) ? ordered(sum) : 0;
    }
    __syncthreads();
    const auto each_own = [&](const auto& body) {
#pragma unroll 1
      for (int i = 0; i < each; ++i)  // all lanes leave it together
        if (const int local = thread * each + i; local < local_blocks) body(local);
    };
    unsigned mine = 0;
    each_own([&](int local) { mine = max(mine, keys[local]); });
    // Neighbouring threads are one class.
    const int log2_class = log2_class_threads(S::kWarps, topk);
    const unsigned own = mine;
#pragma unroll 1
    for (int offset = 1; offset < 1 << log2_class; offset *= 2)
      mine = max(mine, __shfl_xor_sync(0xffffffffu, mine, offset));
    const int of_class = thread >> log2_class;
    if ((lane & ((1 << log2_class) - 1)) == 0) largest[of_class] = mine;
    __syncthreads();
    // The thread block's candidates, the most important first. They belong to the first classes in the order of largest
    // importances, and none is below that of the last of these.
    const int classes = kThreads >> log2_class;
    const int slot = mine ? slot_among(largest, classes, of_class, mine) : candidates.slots;
    if (slot == candidates.slots - 1) threshold = mine;
    __syncthreads();
    if (slot < candidates.slots && own >= threshold)
      each_own([&](int local) {
        if (keys[local] >= threshold) list[atomicAdd(&listed, 1)] = candidate(keys[local], block_at(local));
      });
    __syncthreads();
    const int count = listed;
    static_assert(kRanks > 1 || 3 * kMaxBlocks <= kThreads);  // found ends in front of what is still read
#pragma unroll 1
    for (int i = thread; i < count; i += kThreads) {
      const unsigned long long candidate = list[i];
      const int larger = count_larger(list, count, candidate);
      if (larger >= candidates.slots) continue;
      if constexpr (kRanks == 1)
        found[candidates.num_forced() + larger] = block_of(candidate);
      else
        choice.candidates()[larger] = candidate;
    }
    if constexpr (kRanks == 1)
      num_found = min(count, candidates.slots);
    else
      S::sync();
  }
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
    const int first_blocks = all ? candidates.count : candidates.num_forced();
    for (int i = thread; i < first_blocks; i += kThreads) found[i] = all ? i : candidates.forced_block(i);
    if (thread == 0) choice.count() = first_blocks + num_found;
    if (kRanks > 1 && ranks_blocks) {
      __syncthreads();
#pragma unroll 1
      for (int i = thread; i < kRanks * topk; i += kThreads) {
        const unsigned long long mine = entries[i];
        if (mine == 0) continue;
        const int slot = count_larger<kRanks>(entries, topk, mine);
        if (slot >= candidates.slots) continue;
        found[first_blocks + slot] = block_of(mine);
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
