// o = g_cmp * o_cmp + g_slc * o_slc + g_swa * o_swa, and what the backward of the branches needs of it. A warp per row.
#pragma once

#include "cuda/common/geometry.cuh"
#include "cuda/portable/arguments.h"
#include "cuda/portable/redo.cuh"

namespace nsa::cuda::portable {

/// Number of this warp in the grid.
__device__ inline std::int64_t grid_warp() {
  return (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
}
/// Row i of all: (batch, row, head) numbered with the head fastest. False: there is none.
__device__ inline bool numbered_row(std::int64_t i, int rows, int heads, int batches, int& b, int& r, int& h) {
  if (i >= static_cast<std::int64_t>(batches) * rows * heads) return false;
  h = static_cast<int>(i % heads);
  r = static_cast<int>(i / heads % rows);
  b = static_cast<int>(i / heads / rows);
  return true;
}
/// The row of this warp.
__device__ inline bool warp_row(int rows, int heads, int batches, int& b, int& r, int& h) {
  return numbered_row(grid_warp(), rows, heads, batches, b, r, h);
}

/// Sixteen bytes of elements as floats.
template <class T>
struct Chunk {
  static constexpr int kSize = 16 / static_cast<int>(sizeof(T));
  float x[kSize];

  __device__ static Chunk load(const T* p) {
    union {
      uint4 bits;
      T elements[kSize];
    } u;
    u.bits = *reinterpret_cast<const uint4*>(p);
    Chunk c;
#pragma unroll
    for (int i = 0; i < kSize; ++i) c.x[i] = to_float(u.elements[i]);
    return c;
  }
  __device__ void store(T* p) const {
    if constexpr (sizeof(T) == 4) {
      *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
      *reinterpret_cast<uint4*>(p) =
          make_uint4(pack(T{}, x[0], x[1]), pack(T{}, x[2], x[3]), pack(T{}, x[4], x[5]), pack(T{}, x[6], x[7]));
    }
  }
};

template <class T>
__global__ void __launch_bounds__(256) combine(const __grid_constant__ CombineArgs args, int batches) {
  if (!called(args)) return;
  int b, r, h;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * blockDim.x / 32;
  for (std::int64_t n = grid_warp(); numbered_row(n, args.rows, args.heads, batches, b, r, h); n += warps) {
    const T* g = args.gates.at<T>(b, r, h);
    const float gate[3] = {to_float(g[0]), to_float(g[1]), to_float(g[2])};
    const T* branch[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) branch[i] = args.branch[i].at<T>(b, r, h);
    T* o = args.o.at<T>(b, r, h);
    for (int d = threadIdx.x % 32 * Chunk<T>::kSize; d < args.dim; d += 32 * Chunk<T>::kSize) {
      Chunk<T> sum{};
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const Chunk<T> x = Chunk<T>::load(branch[i] + d);
#pragma unroll
        for (int j = 0; j < Chunk<T>::kSize; ++j) sum.x[j] += gate[i] * x.x[j];
      }
      sum.store(o + d);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(256) combine_backward(const __grid_constant__ CombineBackwardArgs args, int batches) {
  int b, r, h;
  if (!warp_row(args.rows, args.heads, batches, b, r, h)) return;
  const int lane = threadIdx.x % 32;
  const T* d_o = args.d_o.at<T>(b, r, h);
  for (int i = 0; i < args.branches; ++i) {
    const float gate = args.gates.data ? to_float(args.gates.at<T>(b, r, h)[i]) : 1;
    const T* o = args.o[i].at<T>(b, r, h);
    float dot = 0;
    for (int d = lane * Chunk<T>::kSize; d < args.dim; d += 32 * Chunk<T>::kSize) {
      Chunk<T> x = Chunk<T>::load(d_o + d);
      const Chunk<T> y = Chunk<T>::load(o + d);
#pragma unroll
      for (int j = 0; j < Chunk<T>::kSize; ++j) {
        dot += x.x[j] * y.x[j];
        x.x[j] *= gate;
      }
      if (args.d_branch[i].data) x.store(args.d_branch[i].at<T>(b, r, h) + d);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, offset);
    if (lane == 0) {
      if (args.d_gates.data) args.d_gates.at<T>(b, r, h)[i] = from_float<T>(dot);
      if (args.delta[i].data) args.delta[i].at(b, r, h) = gate * dot;
      if (args.gate[i].data) args.gate[i].at(b, r, h) = gate;
    }
  }
}

}  // namespace nsa::cuda::portable
