// Launching kernels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/common/device.h"

namespace nsa::cuda {

inline std::int64_t ceil_div(std::int64_t n, std::int64_t size) { return (n + size - 1) / size; }

/// Allows a kernel `memory` bytes of dynamic shared memory.
inline cudaError_t allow_memory(const void* kernel, std::size_t memory) {
  if (memory <= 32 * 1024) return cudaSuccess;  // with the static part, which is less than 16 KB, below 48 KB
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(memory));
}

/// Nothing to do for an empty grid. Allows `memory` bytes of dynamic shared memory.
template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 threads, std::size_t memory, cudaStream_t stream,
                   const Args&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
  const void* const function = reinterpret_cast<const void*>(kernel);
  if (const cudaError_t error = allow_memory(function, memory); error != cudaSuccess) return error;
  trace_launch(function, grid, threads, memory);
  kernel<<<grid, threads, memory, stream>>>(args...);
  return cudaGetLastError();
}

// Programmatic dependent launch, from compute capability 9.0 on. A kernel that was launched so may begin before the one
// in front of it has ended; it must not read what that one writes, nor write what it reads, before
// griddepcontrol_wait(), and every thread block calls it before it ends.

__device__ __forceinline__ void griddepcontrol_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/// Lets the next kernel begin once every thread block has called it or has ended.
__device__ __forceinline__ void launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// launch() of a kernel that calls griddepcontrol_wait(). Where no code for compute capability 9.0 is compiled it is
/// launch().
template <class... Params, class... Args>
cudaError_t launch_dependent(void (*kernel)(Params...), dim3 grid, dim3 threads, std::size_t memory,
                             cudaStream_t stream, const Args&... args) {
  if (std::max({__CUDA_ARCH_LIST__}) < 900) return launch(kernel, grid, threads, memory, stream, args...);
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
  const void* const function = reinterpret_cast<const void*>(kernel);
  if (const cudaError_t error = allow_memory(function, memory); error != cudaSuccess) return error;
  trace_launch(function, grid, threads, memory);
  cudaLaunchAttribute programmatic;
  programmatic.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  programmatic.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = threads;
  config.dynamicSmemBytes = memory, config.stream = stream;
  config.attrs = &programmatic, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
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
