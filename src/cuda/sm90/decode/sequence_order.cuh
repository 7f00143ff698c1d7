// The order in which thread blocks take the sequences of a step, and the end of these.
#pragma once

#include "cuda/sm90/common/ptx.cuh"
#include "cuda/sm90/decode/step_attend.h"

namespace nsa::cuda::sm90::decode {

/// The sequence that as many others are longer than (of equal ones, in front of it) as there are thread blocks in front
/// of this one. Long ones come first, as the last clusters of a device run alone. lengths: in shared
/// memory.
__device__ __forceinline__ int longest_sequence(const StepAttendArgs& args, int* lengths) {
  const int count = args.geometry.batches, thread = threadIdx.x;
  if (thread < count) lengths[thread] = args.lengths[thread];
  __syncthreads();
  if (thread < count) {
    const int mine = lengths[thread];
    int rank = 0;
#pragma unroll 4
    for (int i = 0; i < count; ++i) rank += lengths[i] > mine || (lengths[i] == mine && i < thread);
    if (rank == static_cast<int>(blockIdx.z)) lengths[count] = thread;
  }
  __syncthreads();
  return warp_uniform(lengths[count]);
}

/// Of one thread for each cluster, of which a sequence has so many, once it has read the lengths: the last one of the
/// sequence advances its length. Where lengths decide who has which sequence, the last one of all advances them.
__device__ __forceinline__ void advance_lengths(const StepAttendArgs& args, bool longest_first, int b, int clusters) {
  if (!args.advance) return;
  const int first = longest_first ? 0 : b, sequences = longest_first ? args.geometry.batches : 1;
  const int served = atomicAdd(&args.plan[first].served, 1) + 1;
  if (served != clusters * sequences) return;
#pragma unroll 4
  for (int i = first; i < first + sequences; ++i)
    if (const StepPlan& plan = args.plan[i]; plan.added > 0) args.lengths[i] = plan.before + plan.added;
}

}  // namespace nsa::cuda::sm90::decode
