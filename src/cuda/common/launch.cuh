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

/// A kernel of clusters of `ranks` thread blocks, neighbours in x (sm_90). programmatic: it may begin before the kernel
/// in front of it has ended, for whose results it waits itself.
template <class Args>
cudaError_t launch_cluster(void (*kernel)(Args), int ranks, bool programmatic, dim3 grid, dim3 threads,
                           std::size_t memory, cudaStream_t stream, const Args& args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
  const void* const function = reinterpret_cast<const void*>(kernel);
  cudaError_t error =
      cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(memory));
  if (error == cudaSuccess && ranks > 8)
    error = cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error != cudaSuccess) return error;
  trace_launch(function, grid, threads, memory);
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(ranks), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = threads;
  config.dynamicSmemBytes = memory, config.stream = stream;
  config.attrs = attributes, config.numAttrs = programmatic ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace nsa::cuda
