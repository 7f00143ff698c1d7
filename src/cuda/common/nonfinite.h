// Scans for what the Hopper kernels do not handle: NaN and infinity where a masked score would meet them.
#pragma once

#include <cuda_runtime.h>

#include "core/branch_index.h"
#include "cuda/common/geometry.cuh"
#include "nsa/tensor.h"

namespace nsa::cuda {

/// A 16-bit tensor whose elements must be finite.
struct Checked {
  Strided t;
  std::int64_t rows = 0;  // of all batches
  int rows_per_batch = 1, heads = 0, columns = 0;
};

struct NonfiniteArgs {
  Checked tensors[2 * kBranches];
  // Query rows of a backward: a row that is not finite has a NaN or an infinity in lse or delta, unless it sees
  // nothing.
  Checked queries;  // data null: none
  PerRow lse[kBranches], delta[kBranches];
  int* flag;
};

/// Clears args.flag and sets it to 1 if anything is found.
cudaError_t find_nonfinite(DType dtype, const NonfiniteArgs& args, cudaStream_t stream);

}  // namespace nsa::cuda
