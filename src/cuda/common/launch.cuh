// Launching kernels.
#pragma once

#include <cstdint>

#include "cuda/common/device.h"

namespace nsa::cuda {

inline std::int64_t ceil_div(std::int64_t n, std::int64_t size) { return (n + size - 1) / size; }

/// Nothing to do for an empty grid. Allows `memory` bytes of dynamic shared memory.
template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 threads, std::size_t memory, cudaStream_t stream,
                   const Args&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
  if (memory > 32 * 1024) {  // with the static part, which is less than 16 KB, it may be more than 48 KB
    const cudaError_t error = cudaFuncSetAttribute(
        reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(memory));
    if (error != cudaSuccess) return error;
  }
  trace_launch(reinterpret_cast<const void*>(kernel), grid, threads, memory);
  kernel<<<grid, threads, memory, stream>>>(args...);
  return cudaGetLastError();
}

}  // namespace nsa::cuda
