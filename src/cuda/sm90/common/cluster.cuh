// Thread blocks of a cluster: each other's shared memory and their barrier.
#pragma once

#include <cstdint>

namespace nsa::cuda::sm90 {

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// The barrier of all threads of the cluster. What was written before it, in shared memory, is seen behind it. A thread
/// block must not end while others read its memory.
__device__ __forceinline__ void cluster_sync() {
  __syncwarp();
  // arrive.release also waits until writes to global memory are seen by the whole GPU (MEMBAR.ALL.GPU).
  asm volatile(
      "fence.release.sync_restrict::shared::cta.cluster;\nbarrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}
/// The same for what was read: nothing written before it need be seen behind it.
__device__ __forceinline__ void cluster_sync_reads() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Loads from the shared memory of another thread block, of what a cluster_sync() has made visible; they stay behind it.

/// An address of this thread block's shared memory in that of another one.
__device__ __forceinline__ std::uint32_t map_to_rank(std::uint32_t address, int rank) {
  std::uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ float load_remote_float(std::uint32_t from) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(from));
  return x;
}
__device__ __forceinline__ int load_remote_int(std::uint32_t from) {
  int x;
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(x) : "r"(from));
  return x;
}
__device__ __forceinline__ float2 load_remote_float2(std::uint32_t from) {
  float2 x;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from));
  return x;
}
__device__ __forceinline__ uint2 load_remote_uint2(std::uint32_t from) {
  uint2 x;
  asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from));
  return x;
}
__device__ __forceinline__ float4 load_remote_float4(std::uint32_t from) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(from));
  return x;
}

// The same from a pointer to this thread block's shared memory. A single thread block is no cluster and reads its own.
template <int kRanks>
__device__ __forceinline__ float2 load_rank(const float2* from, int rank) {
  if constexpr (kRanks == 1) return *from;
  return load_remote_float2(map_to_rank(shared_address(from), rank));
}
template <int kRanks>
__device__ __forceinline__ uint2 load_rank(const uint2* from, int rank) {
  if constexpr (kRanks == 1) return *from;
  return load_remote_uint2(map_to_rank(shared_address(from), rank));
}
template <int kRanks>
__device__ __forceinline__ float4 load_rank(const float4* from, int rank) {
  if constexpr (kRanks == 1) return *from;
  return load_remote_float4(map_to_rank(shared_address(from), rank));
}

}  // namespace nsa::cuda::sm90
