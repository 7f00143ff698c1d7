// Selected attention goes query by query (selected_forward.cu), which is the faster way where neighbouring queries
// choose alike, or block by block (selected_by_block.cu), which takes the same time however they choose. Where the
// choice of kernels leaves both ways open, the indices decide, on the device, for each sequence and KV head.
#pragma once

#include <cuda_runtime.h>

#include "cuda/portable/arguments.h"

namespace nsa::cuda::sm90 {

/// Writes args.ways.times, from some tiles of neighbouring queries of each sequence.
cudaError_t find_ways(const portable::InverseArgs& args, cudaStream_t stream);

}  // namespace nsa::cuda::sm90
