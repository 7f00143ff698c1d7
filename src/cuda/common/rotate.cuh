// The rotation of a pair of a compressed key.
#pragma once

#include "cuda/common/params.h"

namespace nsa::cuda {

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

}  // namespace nsa::cuda
