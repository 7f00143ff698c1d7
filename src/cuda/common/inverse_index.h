// The inverse of the selection: which queries chose each block (inverse_index.cuh).
#pragma once

#include <cuda_runtime.h>

#include "cuda/common/params.h"

namespace nsa::cuda {

/// Fills the lists.
cudaError_t build_inverse_index(const InverseArgs& args, cudaStream_t stream);

}  // namespace nsa::cuda
