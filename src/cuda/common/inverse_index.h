// The inverse of the selection: which queries chose each block (inverse_index.cu).
#pragma once

#include <cuda_runtime.h>

#include "cuda/common/partition.h"

namespace nsa::cuda {

/// The queries that chose each block, ascending, block after block: the inverse index (inverse_index.cu).
struct InverseIndex {
  int block_size = 0;
  int tiles_per_block = 0;    // key tiles of 64
  int width = 0;              // entries for a query, an upper bound
  int* list = nullptr;        // (KV head, entries)
  int* begin = nullptr;       // (KV head, slots)
  int* item_begin = nullptr;  // (KV head, slots, tiles_per_block)
  std::int64_t entries = 0, slots = 0;
  int chunks = 0;          // of queries, in which the lists are made: an upper bound per sequence
  int* offsets = nullptr;  // (KV head, chunks, slots): where in a block's list the part of a chunk ends
  Strided entry_slots;     // int32, as the rows of indices: where in `list` an entry that counts is; null: not wanted

  /// Queries of a chunk.
  __host__ __device__ static int chunk(int q_len) { return q_len > 128 * 128 ? (q_len + 127) / 128 : 128; }
  /// A sequence has a slot for each block and one for the end.
  __host__ __device__ std::int64_t slots_before(const RowPrefix& at) const {
    return at.k / block_size + 2 * at.sequences;
  }
  __host__ __device__ std::int64_t entries_before(const RowPrefix& at) const { return at.q * width; }
};

/// The share of one sequence and KV head: block j was chosen by the queries list[begin[j]] ... list[begin[j + 1] - 1].
struct SequenceLists {
  int *list, *begin;
  int* item_begin;           // (blocks * tiles_per_block + 1): first item of a key tile
  int* offsets;              // of chunk 0 and block 0; of the next chunk: InverseIndex::slots further
  std::int64_t entry, slot;  // where they begin in the arrays of the KV head
  int blocks;
};
__device__ inline SequenceLists lists_of(const InverseIndex& all, const Geometry& g, const DeviceSequence& seq,
                                         int kv_head) {
  const RowPrefix at = row_prefix(g, seq);
  const std::int64_t entry = all.entries_before(at), slot = all.slots_before(at);
  return {.list = all.list + kv_head * all.entries + entry,
          .begin = all.begin + kv_head * all.slots + slot,
          .item_begin = all.item_begin + (kv_head * all.slots + slot) * all.tiles_per_block,
          .offsets = all.offsets + kv_head * all.chunks * all.slots + slot,
          .entry = entry,
          .slot = slot,
          .blocks = (seq.k_len + all.block_size - 1) / all.block_size};
}

/// Estimated time of the selected branch of a sequence and KV head query-major, and in the alternative order of the
/// call: block-major or over unions (sm90/selected_attention/loop_order.h).
struct alignas(8) LoopOrderCost {
  int query_major, alternative;
};

/// Which of the two orders a sequence and KV head takes. Without times all take the one that is asked for.
struct LoopOrder {
  LoopOrderCost* times = nullptr;  // (sequence, KV head)

  __device__ bool takes(bool alternative, const Geometry& g, int sequence, int kv_head) const {
    if (!times) return true;
    const LoopOrderCost t = times[sequence * g.kv_heads + kv_head];
    return (t.alternative < t.query_major) == alternative;
  }
};

struct InverseArgs {
  Geometry geometry;
  Strided indices;
  int topk;
  InverseIndex lists;
  LoopOrder loop_order{};       // lists of those that go block by block; the others' are empty
  const int* wanted = nullptr;  // nothing is done where this is 0; null: it is done
};

/// Fills the lists.
cudaError_t build_inverse_index(const InverseArgs& args, cudaStream_t stream);

}  // namespace nsa::cuda
