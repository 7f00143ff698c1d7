// Chooses between two loop orders of selected attention where heuristics.cu allows both. A kernel decides from the
// indices, for each sequence and KV head: query-major (forward_query_major.cu), or the alternative, which is one of
//
//   over unions (forward_union.cu)         faster where neighbouring queries select alike
//   block-major (forward_block_major.cu)   for small groups; its time does not depend on the selection
#pragma once

#include <cuda_runtime.h>

#include "cuda/common/inverse_index.h"
#include "cuda/common/params.h"

namespace nsa::cuda::sm90::selected_attention {

/// Whether there is a kernel over unions for groups of this many heads and this many blocks of a query: groups whose
/// heads fill tiles of 64 rows, lists of a tile that fit into shared memory.
bool has_union(int group, int topk);

/// Writes loop_order.times, from some tiles of neighbouring queries of each sequence. union_key_dim: Dk (64, 128, 192)
/// where unions are the alternative; 0: block-major.
cudaError_t estimate_loop_order(const SelectedArgs& args, const LoopOrder& loop_order, int union_key_dim,
                                cudaStream_t stream);

}  // namespace nsa::cuda::sm90::selected_attention
