// The selected blocks of one query as a clean list.
#pragma once

#include "cuda/common/geometry.cuh"

namespace nsa::cuda {

/// Whether entry i of a row of n indices counts: in range, not in the future of `position`, not a duplicate of an
/// earlier entry.
__device__ inline bool counts(const int* indices, int i, int position, int block_size) {
  const int b = indices[i];
  if (b < 0 || static_cast<std::int64_t>(b) * block_size > position) return false;
  for (int j = 0; j < i; ++j)
    if (indices[j] == b) return false;
  return true;
}

/// Shared memory of clean_list for rows of n indices.
__host__ __device__ constexpr int list_bytes(int n) { return 2 * n * 4; }

/// At least the static shared memory of each portable kernel that calls clean_list.
inline constexpr int kStaticWithList = 1024;
/// The longest row for a thread block with `limit` bytes of shared memory, `dynamic` of them for other uses.
constexpr int max_topk(int limit, int dynamic) { return (limit - kStaticWithList - dynamic) / list_bytes(1); }

/// Writes the blocks that count to `list` (list_bytes of shared memory), ascending whatever their order in the row, and
/// returns how many there are. All threads of the block call it; it ends with a barrier.
__device__ __noinline__ inline int clean_list(const int* indices, int n, int position, int block_size, int* list) {
  __shared__ int count;
  if (threadIdx.x < 32) {
    int* found_list = list + n;
    int found = 0;
    for (int first = 0; first < n; first += 32) {
      const int i = first + threadIdx.x;
      const bool good = i < n && counts(indices, i, position, block_size);
      const unsigned ballot = __ballot_sync(0xffffffffu, good);
      if (good) found_list[found + __popc(ballot & ((1u << threadIdx.x) - 1))] = indices[i];
      found += __popc(ballot);
    }
    __syncwarp();
    for (int i = threadIdx.x; i < found; i += 32) {
      int smaller = 0;
      for (int j = 0; j < found; ++j) smaller += found_list[j] < found_list[i];
      list[smaller] = found_list[i];
    }
    if (threadIdx.x == 0) count = found;
  }
  __syncthreads();
  return count;
}

}  // namespace nsa::cuda
