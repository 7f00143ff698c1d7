// The rotation of compressed keys: key i of a sequence turns by the angles at its block's first token, i*d.
#pragma once

#include "cuda/common/geometry.cuh"
#include "cuda/common/params.h"

namespace nsa::cuda::portable {

template <class T>
__device__ inline T from_double(double x);
template <>
__device__ inline Bf16 from_double<Bf16>(double x) {
  return __double2bfloat16(x);
}
template <>
__device__ inline Half from_double<Half>(double x) {
  return __double2half(x);
}
template <>
__device__ inline float from_double<float>(double x) {
  return static_cast<float>(x);
}

/// The pair (x[0], x[half]) of a key from column `column` on, as the CPU rotates it: the products are exact in float64,
/// so there is one rounding. `back`: by the opposite angle, which is also the gradient. `to` may be `from`.
template <class T>
__device__ inline void rotate_pair(const Rotation& table, std::int64_t position, int column, int half, bool back,
                                   const T* from, T* to) {
  const std::int64_t row = min(position, static_cast<std::int64_t>(table.positions) - 1);
  const double cos = table.cos[row * table.cos_row + column], turn = table.sin[row * table.sin_row + column];
  const double sin = back ? -turn : turn, x = to_float(from[0]), y = to_float(from[half]);
  to[0] = from_double<T>(x * cos - y * sin);
  to[half] = from_double<T>(y * cos + x * sin);
}

/// Grid x: compressed keys of a sequence, y: sequence.
template <class T>
__global__ void __launch_bounds__(256) rotate_compressed(const __grid_constant__ RotateArgs args) {
  const Geometry& p = args.geometry;
  const DeviceSequence s = sequence_of(p, blockIdx.y);
  const int c_begin = compressed_begin(p, blockIdx.y), blocks = num_compressed(p, s.k_len), half = args.key_dim / 2;
  for (int i = blockIdx.x; i < blocks; i += gridDim.x) {
    for (int e = threadIdx.x; e < p.kv_heads * half; e += blockDim.x) {
      const int column = e % half;
      T* at = args.keys.at<T>(s.batch, c_begin + i, e / half) + column;
      rotate_pair(args.rotation, static_cast<std::int64_t>(i) * p.kernel_stride, column, half, args.back, at, at);
    }
  }
}

}  // namespace nsa::cuda::portable
