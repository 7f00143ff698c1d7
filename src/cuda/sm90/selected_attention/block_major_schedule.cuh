// The work of forward_block_major.cu and its plan: which thread block takes what.
#pragma once

#include "cuda/sm90/common/head_packing.cuh"
#include "cuda/sm90/selected_attention/forward_block_major.h"

namespace nsa::cuda::sm90::selected_attention {

struct BlockArgs : SelectedByBlockArgs {
  BlockWindows windows;
  QueryTiles tiles;
  BlockItem* items;    // (planned, items)
  void* partials;      // (rows, heads, partials, Dv) of a window
  float* lse;          // (rows, heads, partials), in base-2 units
  BlockQueue* queues;  // (planned)

  BlockArgs(const SelectedByBlockArgs& call, const BlockWindows& w, std::int64_t value_dim)
      : SelectedByBlockArgs(call),
        windows(w),
        tiles(w.group),
        items(static_cast<BlockItem*>(call.scratch)),
        partials(items + w.planned * w.items),
        lse(reinterpret_cast<float*>(static_cast<char*>(partials) + w.window_partials() * value_dim * 2)),
        queues(reinterpret_cast<BlockQueue*>(lse + w.window_partials())) {}
};

/// Where a window lies.
struct Window {
  std::int64_t first_row;
  int first_kv_head;

  __device__ Window(const BlockWindows& all, int number)
      : first_row(static_cast<std::int64_t>(number % all.by_rows) * all.rows),
        first_kv_head(number / all.by_rows * all.kv_heads) {}
};

/// Writes the items of `count` windows from `first` on, in any order, and their queues.
cudaError_t plan_items(const BlockArgs& args, int first, int count, cudaStream_t stream);

}  // namespace nsa::cuda::sm90::selected_attention
