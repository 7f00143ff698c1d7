// The work of forward_block_major.cu and its schedule: which thread block takes what.
#pragma once

#include "cuda/sm90/common/head_packing.cuh"
#include "cuda/sm90/selected_attention/forward_block_major.h"

namespace nsa::cuda::sm90::selected_attention {

struct BlockArgs : BlockMajorArgs {
  QueryBuffers buffers;
  HeadPacking packing;
  BlockItem* items;    // (planned, items)
  void* partials;      // (rows, heads, partials, Dv) of a buffer
  float* lse;          // (rows, heads, partials), in base-2 units
  BlockQueue* queues;  // (planned)

  BlockArgs(const BlockMajorArgs& call, const QueryBuffers& w, std::int64_t value_dim)
      : BlockMajorArgs(call),
        buffers(w),
        packing(w.group),
        items(static_cast<BlockItem*>(call.scratch)),
        partials(items + w.planned * w.items),
        lse(reinterpret_cast<float*>(static_cast<char*>(partials) + w.buffer_partials() * value_dim * 2)),
        queues(reinterpret_cast<BlockQueue*>(lse + w.buffer_partials())) {}
};

/// Where a buffer lies.
struct QueryBuffer {
  std::int64_t first_row;
  int first_kv_head;

  __device__ QueryBuffer(const QueryBuffers& all, int number)
      : first_row(static_cast<std::int64_t>(number % all.by_rows) * all.rows),
        first_kv_head(number / all.by_rows * all.kv_heads) {}
};

/// Writes the items of `count` buffers from `first` on, in any order, and their queues.
cudaError_t make_schedule(const BlockArgs& args, int first, int count, cudaStream_t stream);

}  // namespace nsa::cuda::sm90::selected_attention
