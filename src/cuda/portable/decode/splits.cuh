// Merging what the splits of a row's keys gave.
#pragma once

#include "cuda/common/cache.cuh"
#include "cuda/portable/combine.cuh"

namespace nsa::cuda::portable {

/// Splits [first, last) that hold keys which a query sees, counted from the first split that its sequence's first query
/// sees. The others may not have been written.
__device__ inline KeyRange splits_of(const Geometry& p, const Splits& splits, int window, const DeviceSequence& s,
                                     int query) {
  const KeyRange keys = visible_keys(p, window, s.position(query));
  const int begin = visible_keys(p, window, s.position(0)).first / splits.size;
  return {keys.first / splits.size - begin, (keys.last + splits.size - 1) / splits.size - begin};
}

/// The softmax of a row over splits: maximum in base-2 units and sum. Found by `kLanes` neighbouring lanes together.
template <int kLanes>
struct MergedSoftmax {
  float max = -INFINITY, sum = 0;

  /// softmax(split): maximum and sum of one; a negative sum: it has no keys.
  template <class Softmax>
  __device__ MergedSoftmax(KeyRange splits, const Softmax& softmax) {
    const int lane = threadIdx.x % kLanes;
    for (int split = splits.first + lane; split < splits.last; split += kLanes) {
      const float2 own = softmax(split);
      if (!(own.y < 0)) max = fmaxf(max, own.x);
    }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, offset));
    for (int split = splits.first + lane; split < splits.last; split += kLanes) {
      const float2 own = softmax(split);
      if (!(own.y < 0)) sum += own.y * factor(own);
    }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }

  __device__ float factor(float2 own) const { return exp2_fast(own.x - (max == -INFINITY ? 0 : max)); }

  /// In base-2 units.
  __device__ float lse() const { return max + log2f(sum); }

  /// Adds a split's share of the output, of which it has `acc`. Without a branch, so that the loads of several splits
  /// are on their way at once; what a split without keys holds counts for nothing.
  template <class T>
  __device__ void add(float2 own, const float* acc, Chunk<T>& x) const {
    const bool none = own.y < 0;
    const float scale = factor(own) / sum;
#pragma unroll
    for (int j = 0; j < Chunk<T>::kSize; j += 4) {
      const float4 a = *reinterpret_cast<const float4*>(acc + j);
      x.x[j] = none ? x.x[j] : x.x[j] + a.x * scale;
      x.x[j + 1] = none ? x.x[j + 1] : x.x[j + 1] + a.y * scale;
      x.x[j + 2] = none ? x.x[j + 2] : x.x[j + 2] + a.z * scale;
      x.x[j + 3] = none ? x.x[j + 3] : x.x[j + 3] + a.w * scale;
    }
  }
};

}  // namespace nsa::cuda::portable
