// Selected attention goes query by query (forward_query_major.cu), or in an alternative order, where the choice of
// kernels leaves both open: then the indices decide, on the device, for each sequence and KV head.
//
//   over unions of neighbours' blocks (forward_union.cu)   faster where neighbouring queries choose alike
//   block by block (forward_block_major.cu)                for small groups: takes as long however queries choose
#pragma once

#include <cuda_runtime.h>

#include "cuda/common/inverse_index.h"
#include "cuda/common/params.h"

namespace nsa::cuda::sm90::selected_attention {

/// Whether there is a kernel over unions for groups of this many heads and this many blocks of a query: groups whose
/// heads fill tiles of 64 rows, lists of a tile that fit into shared memory.
bool has_union(int group, int topk);

/// Writes loop_order.times, from some tiles of neighbouring queries of each sequence. union_key_dim: Dk (64, 128, 192)
/// where unions are the alternative; 0: block by block.
cudaError_t estimate_loop_order(const SelectedArgs& args, const LoopOrder& loop_order, int union_key_dim,
                                cudaStream_t stream);

}  // namespace nsa::cuda::sm90::selected_attention
