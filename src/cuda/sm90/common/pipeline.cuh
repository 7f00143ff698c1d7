// Pipelines: a stage of a ring, the barriers of the forward kernels over ranges of keys, how their warpgroups start.
#pragma once

#include "cuda/sm90/common/ptx.cuh"
#include "cuda/sm90/common/tile_scheduler.cuh"

namespace nsa::cuda::sm90 {

/// A stage of a ring of kStages, and the phase of its barriers.
template <int kStages>
struct PipelineState {
  int stage = 0;
  std::uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
  __device__ __forceinline__ PipelineState before() const {
    return stage > 0 ? PipelineState{stage - 1, phase} : PipelineState{kStages - 1, phase ^ 1};
  }
};

/// Lets warpgroups start some time apart: else all wait for their softmax at the same time, and the tensor cores idle.
__device__ __forceinline__ void stagger_warpgroups(int group) {
  const long long start = clock64();
  while (clock64() - start < group * 2500) {
  }
}

/// Reads the flag of a kernel for which another one stands in; all threads of the block, who get the same answer.
__device__ __forceinline__ bool left_to_fallback(const int* flag) {
  return __syncthreads_or(flag && threadIdx.x == 0 && *static_cast<const volatile int*>(flag)) != 0;
}

/// Barriers of a ring of key and value tiles, and of a place for the queries of each warpgroup.
template <int kStages, int kGroups>
struct ForwardBarriers {
  std::uint64_t key_full[kStages], key_empty[kStages], value_full[kStages], value_empty[kStages];
  std::uint64_t query_full[kGroups], query_empty[kGroups];
  GroupTile tiles[kGroups][2];  // the one at work and the next one

  /// One thread; fence_mbarrier_init() is to follow.
  __device__ __forceinline__ void init() {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(shared_address(&key_full[i]), 1);
      mbarrier_init(shared_address(&value_full[i]), 1);
      mbarrier_init(shared_address(&key_empty[i]), kGroups * 4);
      mbarrier_init(shared_address(&value_empty[i]), kGroups * 4);
    }
    for (int i = 0; i < kGroups; ++i) {
      mbarrier_init(shared_address(&query_full[i]), 1);
      mbarrier_init(shared_address(&query_empty[i]), 128);  // every thread has read the tile's fields
    }
  }
};

}  // namespace nsa::cuda::sm90
