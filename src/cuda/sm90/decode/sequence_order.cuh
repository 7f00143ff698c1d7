// The order in which thread blocks take the sequences of a step.
#pragma once

#include "cuda/sm90/common/ptx.cuh"
#include "cuda/sm90/decode/step_attend.h"

namespace nsa::cuda::sm90::decode {

/// The sequence that as many others are longer than (of equal ones, in front of it) as there are thread blocks in front
/// of this one. Long ones come first, as the last clusters of a device have nobody beside them. lengths: in shared
/// memory.
template <class Args>
__device__ __forceinline__ int longest_sequence(const Args& args, int* lengths) {
  const int count = args.geometry.batches, thread = threadIdx.x;
  if (thread < count) lengths[thread] = args.lengths[thread];
  __syncthreads();
  if (thread < count) {
    const int mine = lengths[thread];
    int place = 0;
#pragma unroll 4
    for (int i = 0; i < count; ++i) place += lengths[i] > mine || (lengths[i] == mine && i < thread);
    if (place == static_cast<int>(blockIdx.z)) lengths[count] = thread;
  }
  __syncthreads();
  return warp_uniform(lengths[count]);
}

}  // namespace nsa::cuda::sm90::decode
