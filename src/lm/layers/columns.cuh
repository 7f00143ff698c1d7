// What the kernels of the layers share: eight columns of a row at a time, in float32 registers, and dependent launches.
#pragma once

#include <cuda_bf16.h>

#include "lm/layers/elementwise_kernels.h"

namespace nsa::lm::fused {

struct Eight {
  float at[kColumns];
};
__device__ inline Eight load(const void* from, std::int64_t element) {
  const uint4 bits = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(from) + element);
  const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&bits);
  Eight x;
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __bfloat1622float2(pairs[i]);
    x.at[2 * i] = pair.x, x.at[2 * i + 1] = pair.y;
  }
  return x;
}
__device__ inline Eight load(const float* from) {
  const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
  return {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
}
__device__ inline void store(void* to, std::int64_t element, const Eight& x) {
  uint4 bits;
  auto* pairs = reinterpret_cast<__nv_bfloat162*>(&bits);
  for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(x.at[2 * i], x.at[2 * i + 1]);
  *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(to) + element) = bits;
}
__device__ inline void store(float* to, const Eight& x) {
  reinterpret_cast<float4*>(to)[0] = make_float4(x.at[0], x.at[1], x.at[2], x.at[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(x.at[4], x.at[5], x.at[6], x.at[7]);
}
template <class F>
__device__ Eight each(const F& f) {
  Eight result;
  for (int i = 0; i < kColumns; ++i) result.at[i] = f(i);
  return result;
}

/// The exact division would take half of the instructions, with branches.
__device__ inline float sigmoid(float x) { return __fdividef(1, 1 + __expf(-x)); }
/// silu(x) = x sigmoid(x).
__device__ inline float silu(float x) { return x * sigmoid(x); }

/// The sum over the thread block, in a fixed order; all threads get it. `parts`: of the warps.
__device__ inline float block_sum(float x, float* parts) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  __syncthreads();  // the parts of the sum before have been read
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0;
  for (unsigned i = 0; i < blockDim.x / 32; ++i) sum += parts[i];
  return sum;
}

// Programmatic dependent launch, from compute capability 9.0 on. A kernel that was launched so may begin before the one
// ahead of it has ended: it must not read what that one writes, nor write at all, before griddepcontrol_wait(), which
// all of its thread blocks call. So a kernel that waits for it waits for everything ahead, too.

__device__ inline void griddepcontrol_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/// Lets the next kernel begin once every thread block has called it or has ended.
__device__ inline void launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Brings what no kernel writes into L2: ahead of griddepcontrol_wait(), since weights of one layer
/// are no longer there when the next token comes.
__device__ inline void prefetch(const void* from, std::int64_t bytes) {
  constexpr std::int64_t kLine = 128;
  for (std::int64_t at = threadIdx.x * kLine; at < bytes; at += blockDim.x * kLine)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(from) + at));
}

/// Returns a cudaError_t. dependent: as such, where the device has code that waits, which is that for 9.0.
template <class... Params, class... Args>
int launch(void (*kernel)(Params...), dim3 blocks, unsigned threads, std::size_t memory, void* stream, bool dependent,
           const Args&... args) {
  int device = 0, major = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks, config.blockDim = threads, config.dynamicSmemBytes = memory;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute, config.numAttrs = dependent && major == 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace nsa::lm::fused
