// Accumulators of wgmma to rows in global memory, sixteen bytes a lane.
#pragma once

#include "cuda/sm90/common/ptx.cuh"

namespace nsa::cuda::sm90 {

/// Lane c of four neighbouring lanes holds words c0 .. c3 and gets 0c .. 3c.
__device__ __forceinline__ void transpose_in_quad(std::uint32_t (&w)[4], int lane) {
  const bool odd = lane & 1, high = lane & 2;
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const std::uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? w[j] : w[j + 1], 1);
    (odd ? w[j] : w[j + 1]) = got;
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const std::uint32_t got = __shfl_xor_sync(0xffffffffu, high ? w[j] : w[j + 2], 2);
    (high ? w[j] : w[j + 2]) = got;
  }
}

/// Of row i (0, 1) of a lane's accumulators, times `factor` and rounded to T: the eight elements of columns 32 j + 8 c
/// and on, for lane c of the four that share the row. All lanes of the warp.
template <class T, int N>
__device__ __forceinline__ uint4 vector_of_row(const float (&o)[N], int i, int j, float factor, int lane) {
  std::uint32_t w[4];
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const int n = 4 * (4 * j + m) + 2 * i;
    w[m] = pack(T{}, o[n] * factor, o[n + 1] * factor);
  }
  transpose_in_quad(w, lane);
  return make_uint4(w[0], w[1], w[2], w[3]);
}
/// The whole row to `to`, if `valid`. All lanes of the warp.
template <class T, int N>
__device__ __forceinline__ void store_row(T* to, const float (&o)[N], int i, float factor, bool valid, int lane) {
#pragma unroll
  for (int j = 0; j < N / 16; ++j) {
    const uint4 words = vector_of_row<T>(o, i, j, factor, lane);
    if (valid) *reinterpret_cast<uint4*>(to + 32 * j + 8 * (lane & 3)) = words;
  }
}

}  // namespace nsa::cuda::sm90
