// Which queries chose a block: the inverse of the selection, built on the device by a counting sort.
//
//   count_queries   per chunk of queries and block, how many queries chose it
//   scan_queries    offsets of chunks within a block's list, of lists, and of the items that d_kv works on
//   fill_queries    the lists, ascending
//
// A chunk marks its queries in a bit mask per block (bits set by atomicOr, so in any order with one result), 128
// queries at a time. InverseIndex::offsets are counts of a chunk and block first, then where its part of the block's
// list begins, and at last where it ends.
#include "cuda/common/inverse_index.h"
#include "cuda/common/launch.cuh"

namespace nsa::cuda {
namespace {

constexpr int kMaskBlocks = 2048, kMaskWords = 4;

__device__ inline bool runs(const InverseArgs& args) { return !args.wanted || *args.wanted != 0; }

/// f(block, words): the queries of one batch of 128 that chose `block`, for all blocks, each by one thread. Before,
/// where `kEntries`, entry(query of the batch, rank, block, words) for the entries that count.
template <bool kEntries, class Entry, class F>
__device__ inline void for_marked(const InverseArgs& args, const DeviceSequence& seq, int kv_head, int first, int count,
                                  const Entry& entry, const F& f) {
  __shared__ unsigned mask[kMaskBlocks][kMaskWords];
  const int block_size = args.lists.block_size, blocks = (seq.k_len + block_size - 1) / block_size;
  for (int base = 0; base < blocks; base += kMaskBlocks) {
    const int window = min(blocks - base, kMaskBlocks);
    for (int i = threadIdx.x; i < window * kMaskWords; i += blockDim.x) mask[i / kMaskWords][i % kMaskWords] = 0;
    __syncthreads();
    // g(query, rank, block) for the entries that count.
    const auto for_entries = [&](const auto& g) {
#pragma unroll 4
      for (int e = threadIdx.x; e < count * args.topk; e += blockDim.x) {
        const int query = e / args.topk, rank = e - query * args.topk;
        const int chosen = args.indices.at<int>(seq.batch, seq.q_begin + first + query, kv_head)[rank];
        const int block = chosen - base;
        if (block >= 0 && block < window &&
            static_cast<std::int64_t>(chosen) * block_size <= seq.position(first + query))
          g(query, rank, block);
      }
      __syncthreads();
    };
    for_entries([&](int query, int, int block) {
      atomicOr(&mask[block][query / 32], 1u << query % 32);  // duplicates set their bit twice
    });
    if constexpr (kEntries)
      for_entries([&](int query, int rank, int block) { entry(query, rank, base + block, mask[block]); });
    for (int block = threadIdx.x; block < window; block += blockDim.x) f(base + block, mask[block]);
    __syncthreads();
  }
}

template <bool kFill, bool kSlots = false>
__global__ void __launch_bounds__(256) mark_queries(const __grid_constant__ InverseArgs args) {
  if (!runs(args)) return;
  const int kv_head = blockIdx.y;
  const DeviceSequence seq = sequence_of(args.geometry, blockIdx.z);
  const SequenceLists lists = lists_of(args.lists, args.geometry, seq, kv_head);
  const int chunk = InverseIndex::chunk(seq.q_len), begin = blockIdx.x * chunk, end = min(begin + chunk, seq.q_len);
  if (begin >= end) return;
  if (kFill ? lists.begin[lists.blocks] == 0 : !args.loop_order.takes(true, args.geometry, seq.index, kv_head)) return;
  int* offsets = lists.offsets + blockIdx.x * args.lists.slots;
  if (!kFill)
    for (int block = threadIdx.x; block < lists.blocks; block += blockDim.x) offsets[block] = 0;
  __syncthreads();
  for (int first = begin; first < end; first += 32 * kMaskWords) {
    const auto slot = [&](int query, int rank, int block, const unsigned(&words)[kMaskWords]) {
      int at = lists.begin[block] + offsets[block];
#pragma unroll
      for (int w = 0; w < kMaskWords; ++w)
        at += __popc(words[w] & (w < query / 32 ? ~0u : w == query / 32 ? (1u << query % 32) - 1 : 0));
      args.lists.entry_slots.at<int>(seq.batch, seq.q_begin + first + query, kv_head)[rank] =
          static_cast<int>(lists.list - args.lists.list) + at;
    };
    for_marked<kSlots>(args, seq, kv_head, first, min(end - first, 32 * kMaskWords), slot,
                       [&](int block, const unsigned(&words)[kMaskWords]) {
                         int at = offsets[block];
                         if (kFill) {
                           int* list = lists.list + lists.begin[block];
#pragma unroll
                           for (int w = 0; w < kMaskWords; ++w)
                             for (unsigned bits = words[w]; bits != 0; bits &= bits - 1)
                               list[at++] = first + w * 32 + __ffs(static_cast<int>(bits)) - 1;
                         } else {
#pragma unroll
                           for (int w = 0; w < kMaskWords; ++w) at += __popc(words[w]);
                         }
                         offsets[block] = at;
                       });
  }
}

/// Exclusive prefix sum of value(i), i < n, written by write(i, sum); returns the total. One block of threads.
template <class Value, class Write>
__device__ inline int scan(int n, const Value& value, const Write& write) {
  __shared__ int sums[1024];
  int carry = 0;
  for (int base = 0; base < n; base += blockDim.x) {
    const int i = base + threadIdx.x, mine = i < n ? value(i) : 0;
    sums[threadIdx.x] = mine;
    __syncthreads();
    for (int offset = 1; offset < blockDim.x; offset *= 2) {
      const int other = threadIdx.x >= offset ? sums[threadIdx.x - offset] : 0;
      __syncthreads();
      sums[threadIdx.x] += other;
      __syncthreads();
    }
    if (i < n) write(i, carry + sums[threadIdx.x] - mine);
    carry += sums[blockDim.x - 1];
    __syncthreads();
  }
  return carry;
}

__global__ void __launch_bounds__(1024) scan_queries(const __grid_constant__ InverseArgs args) {
  if (!runs(args)) return;
  const int kv_head = blockIdx.y;
  const DeviceSequence seq = sequence_of(args.geometry, blockIdx.z);
  const SequenceLists lists = lists_of(args.lists, args.geometry, seq, kv_head);
  // Where lists are not wanted they are made empty, without items.
  const bool wanted = args.loop_order.takes(true, args.geometry, seq.index, kv_head);
  const int key_tiles = lists.blocks * args.lists.tiles_per_block;
  const int chunk = InverseIndex::chunk(seq.q_len), chunks = wanted ? (seq.q_len + chunk - 1) / chunk : 0;
  const int total = scan(
      lists.blocks,
      [&](int block) {
        constexpr int kAhead = 16;  // loads on their way at once
        int* at = lists.offsets + block;
        int sum = 0;
        for (int first = 0; first < chunks; first += kAhead) {
          int count[kAhead];
#pragma unroll
          for (int c = 0; c < kAhead; ++c) count[c] = first + c < chunks ? at[(first + c) * args.lists.slots] : 0;
#pragma unroll
          for (int c = 0; c < kAhead; ++c) {
            if (first + c < chunks) at[(first + c) * args.lists.slots] = sum;
            sum += count[c];
          }
        }
        return sum;
      },
      [&](int block, int sum) { lists.begin[block] = sum; });
  if (threadIdx.x == 0) lists.begin[lists.blocks] = total;
  __syncthreads();
  const int items = scan(
      key_tiles,
      [&](int tile) {
        const int block = tile / args.lists.tiles_per_block, queries = lists.begin[block + 1] - lists.begin[block];
        return wanted ? max((queries + kListChunk - 1) / kListChunk, 1) : 0;
      },
      [&](int tile, int sum) { lists.item_begin[tile] = sum; });
  if (threadIdx.x == 0) lists.item_begin[key_tiles] = items;
}

}  // namespace

cudaError_t build_inverse_index(const InverseArgs& args, cudaStream_t stream) {
  const Geometry& g = args.geometry;
  const dim3 grid(static_cast<unsigned>(args.lists.chunks), g.kv_heads, g.batches);
  cudaError_t error = launch(mark_queries<false>, grid, 256, 0, stream, args);
  if (error == cudaSuccess) error = launch(scan_queries, dim3(1, g.kv_heads, g.batches), 1024, 0, stream, args);
  if (error != cudaSuccess) return error;
  return launch(args.lists.entry_slots.data ? mark_queries<true, true> : mark_queries<true>, grid, 256, 0, stream,
                args);
}

}  // namespace nsa::cuda
