// Selected attention goes query by query (forward_query_major.cu), which is the faster way where neighbouring queries
// choose alike, or block by block (forward_block_major.cu), which takes the same time however they choose. Where the
// choice of kernels leaves both orders open, the indices decide, on the device, for each sequence and KV head.
#pragma once

#include <cuda_runtime.h>

#include "cuda/common/inverse_index.h"

namespace nsa::cuda::sm90::selected_attention {

/// Writes args.loop_order.times, from some tiles of neighbouring queries of each sequence.
cudaError_t estimate_loop_order(const InverseArgs& args, cudaStream_t stream);

}  // namespace nsa::cuda::sm90::selected_attention
