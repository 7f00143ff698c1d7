// Block selection where a thread block has several queries whose softmaxes of the compressed keys are known: 64
// threads for a query, and the lists of blocks of queries that go through them together.
#pragma once

#include "cuda/sm90/decode/attend/block_choice.cuh"

namespace nsa::cuda::sm90::decode {

/// A list of blocks, ascending, in shared memory.
struct BlockList {
  char* memory;
  int topk;

  __device__ int& count() const { return *reinterpret_cast<int*>(memory); }
  __device__ int* blocks() const { return &count() + 1; }
  __device__ int* found() const { return blocks() + topk; }  // the same in any order
  /// What is found to the list; `threads` threads.
  __device__ void sort(int thread, int threads) const {
    const int all = count();
    for (int i = thread; i < all; i += threads) {
      const int block = found()[i];
      blocks()[count_before(found(), all, block)] = block;
    }
  }
};

/// Blocks of two lists together, ascending: four times their number, and a bit for each list that has it. One warp.
__device__ __forceinline__ void unite(const BlockList& to, const BlockList (&from)[2], const int (&counts)[2],
                                      int lane) {
  int common = 0;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const int *const mine = from[which].blocks(), *const others = from[1 - which].blocks();
    int before = 0;  // blocks in both lists
    for (int first = 0; first < counts[which]; first += 32) {
      const int i = first + lane;
      const bool valid = i < counts[which];
      const int block = valid ? mine[i] : -1;
      int less = 0;
      bool both = false;
#pragma unroll 4
      for (int j = 0; j < counts[1 - which]; ++j) less += others[j] < block, both |= others[j] == block;
      const unsigned lanes = __ballot_sync(0xffffffffu, valid && both);
      const int both_before = before + __popc(lanes & ((1u << lane) - 1));
      // Of those in both lists the first one's entry counts.
      if (valid && !(which == 1 && both)) to.blocks()[i + less - both_before] = 4 * block + (both ? 3 : 1 << which);
      before += __popc(lanes);
    }
    common = before;
  }
  if (lane == 0) to.count() = counts[0] + counts[1] - common;
}

/// What a query's importances are made from: sums of probabilities, of blocks by keys that begin in their key tile, and
/// of what each key tile's keys give to the next one's first block.
struct Importances {
  float* blocks;
  float* crossings;

  __device__ float of(const BlockKeys& shape, int block) const {
    const int key_tile = block >> shape.log2_blocks();
    const bool crosses = (block & (shape.blocks() - 1)) == 0 && key_tile > 0;
    return blocks[block] + (crosses ? crossings[key_tile - 1] : 0);
  }
};

/// Finds the blocks of a query at `position` that is `active`, by 64 threads; others do the same for other queries, and
/// all of them meet at sync(). memory: of the query.
template <class Sync>
__device__ __forceinline__ void find_blocks(const StepAttendArgs& args, char* memory, const Importances& importances,
                                            const BlockList& list, int position, bool active, int thread,
                                            const Sync& sync) {
  constexpr int kThreads = 64;
  const Candidates candidates(args, position);
  const bool all = candidates.all(args);
  const bool ranks_blocks = active && !all;
  const int count = ranks_blocks ? candidates.count : 0, each = (count + kThreads - 1) / kThreads;
  auto* const largest = reinterpret_cast<unsigned*>(memory);  // of each thread
  unsigned& threshold = largest[kThreads];
  int& listed = reinterpret_cast<int&>(largest[kThreads + 1]);
  auto* const found_blocks = reinterpret_cast<unsigned long long*>(largest + kThreads + 4);
  auto* const keys = reinterpret_cast<unsigned*>(found_blocks + count);
  const int first = thread * each, last = min(first + each, count);
  unsigned mine = 0;
#pragma unroll 1
  for (int block = first; block < last; ++block) {
    const unsigned key = candidates.forced(block) ? 0 : ordered(importances.of(args.block_keys, block));
    keys[block] = key;
    mine = max(mine, key);
  }
  largest[thread] = mine;
  if (thread == 0) threshold = 1, listed = 0;
  sync();
  // The slots belong to blocks of the first threads in the order of largest importances, and none is below that of the
  // last of these.
  const int slot = mine ? slot_among(largest, kThreads, thread, mine) : candidates.slots;
  if (slot == candidates.slots - 1) threshold = mine;
  sync();
  if (slot < candidates.slots)
#pragma unroll 1
    for (int block = first; block < last; ++block)
      if (keys[block] >= threshold) found_blocks[atomicAdd(&listed, 1)] = candidate(keys[block], block);
  sync();
  if (active) {
    const int known = all ? candidates.count : candidates.num_forced(), others = ranks_blocks ? listed : 0;
    for (int i = thread; i < known; i += kThreads) list.found()[i] = all ? i : candidates.forced_block(i);
#pragma unroll 1
    for (int i = thread; i < others; i += kThreads) {
      const unsigned long long block = found_blocks[i];
      const int larger = count_larger(found_blocks, others, block);
      if (larger < candidates.slots) list.found()[known + larger] = block_of(block);
    }
    if (thread == 0) list.count() = known + min(others, max(candidates.slots, 0));
  }
  sync();
  if (active) list.sort(thread, kThreads);
  sync();
}

}  // namespace nsa::cuda::sm90::decode
