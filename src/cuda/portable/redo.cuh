// Kernels that stand in for others: see Redo in arguments.h.
#pragma once

#include "cuda/portable/arguments.h"

namespace nsa::cuda::portable {

/// Whether the kernel has anything to do.
template <class Args>
__device__ __forceinline__ bool called(const Args& args) {
  return !args.redo.flag || *args.redo.flag != 0;
}

/// body(block, columns) for this thread block, or for its share of a grid of `columns` x ... blocks.
template <class T, class Args, class Body>
__device__ __forceinline__ void over_grid(const Args& args, const Body& body) {
  if (sizeof(T) == 4 || !args.redo.flag) {  // only kernels of 16-bit types have others to stand in for
    body(blockIdx, gridDim.x);
    return;
  }
  if (!called(args)) return;
  const unsigned columns = args.redo.x, rows = args.redo.y;
  const std::int64_t blocks = static_cast<std::int64_t>(columns) * rows * args.redo.z;
  for (std::int64_t i = blockIdx.x; i < blocks; i += gridDim.x) {
    const auto line = static_cast<unsigned>(i / columns);
    body(uint3{static_cast<unsigned>(i % columns), line % rows, line / rows}, columns);
    __syncthreads();
  }
}

}  // namespace nsa::cuda::portable
