// o = g_cmp * o_cmp + g_slc * o_slc + g_swa * o_swa, and what the backward of the branches needs of it.
#pragma once

#include "cuda/common/fallback.cuh"
#include "cuda/common/geometry.cuh"
#include "cuda/common/params.h"

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
  if (!runs(args)) return;
  int b, r, h;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * blockDim.x / 32;
  for (std::int64_t n = grid_warp(); numbered_row(n, args.rows, args.heads, batches, b, r, h); n += warps) {
    const T* g = args.gates.at<T>(b, r, h);
    const float gate[kBranches] = {to_float(g[0]), to_float(g[1]), to_float(g[2])};
    const T* branch[kBranches];
#pragma unroll
    for (int i = 0; i < kBranches; ++i) branch[i] = args.branch[i].at<T>(b, r, h);
    T* o = args.o.at<T>(b, r, h);
    for (int d = threadIdx.x % 32 * Chunk<T>::kSize; d < args.dim; d += 32 * Chunk<T>::kSize) {
      Chunk<T> sum{};
#pragma unroll
      for (int i = 0; i < kBranches; ++i) {
        const Chunk<T> x = Chunk<T>::load(branch[i] + d);
#pragma unroll
        for (int j = 0; j < Chunk<T>::kSize; ++j) sum.x[j] += gate[i] * x.x[j];
      }
      sum.store(o + d);
    }
  }
}

/// What a thread block of combine_backward sees to: some heads of some positions, enough of these that their delta and
/// gate, whose rows lie along the positions, fill sectors of memory, and that all lanes are busy.
struct CombineTile {
  static constexpr int kHeads = 64, kRows = 512;  // at most
  int heads, positions;

  explicit CombineTile(int all_heads)
      : heads(all_heads < kHeads ? all_heads : kHeads), positions(heads < 16 ? (127 + heads) / heads : 8) {}
};

/// Grid: tiles of positions, batches, tiles of heads. A row is read by as many lanes as 128 elements take; the first
/// ones see to what there is once per branch.
template <class T, int kCount>
__global__ void __launch_bounds__(256)
    combine_backward(const __grid_constant__ CombineBackwardArgs args, CombineTile tile) {
  constexpr int kLanes = 128 / Chunk<T>::kSize;
  __shared__ float deltas[kCount][CombineTile::kRows],
      gates[kCount][CombineTile::kRows];  // position fastest
  const int lane = threadIdx.x % kLanes, b = blockIdx.y;
  const unsigned partners = kLanes == 32 ? 0xffffffffu : ((1u << kLanes) - 1) << (threadIdx.x & (32 - kLanes));
  const bool mine = lane < kCount;
  const int first = static_cast<int>(blockIdx.x) * tile.positions, end = min(first + tile.positions, args.rows);
  const int first_head = static_cast<int>(blockIdx.z) * tile.heads, heads = min(tile.heads, args.heads - first_head);
  int r = first;
#pragma unroll 1
  for (int own_head = static_cast<int>(threadIdx.x) / kLanes;; own_head += 256 / kLanes) {
    for (; own_head >= heads; own_head -= heads) ++r;
    if (r >= end) break;
    const int h = first_head + own_head;
    const float gate = mine && args.gates.data ? to_float(args.gates.at<T>(b, r, h)[lane]) : 1;
    float dot[kCount] = {};
#pragma unroll 1
    for (int d = lane * Chunk<T>::kSize; d < args.dim; d += kLanes * Chunk<T>::kSize) {
      const Chunk<T> x = Chunk<T>::load(args.d_o.at<T>(b, r, h) + d);
      Chunk<T> y[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) y[i] = Chunk<T>::load(args.o[i].at<T>(b, r, h) + d);
#pragma unroll
      for (int i = 0; i < kCount; ++i)
#pragma unroll
        for (int j = 0; j < Chunk<T>::kSize; ++j) dot[i] += x.x[j] * y[i].x[j];
    }
    float own = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) dot[i] += __shfl_xor_sync(partners, dot[i], offset);
      if (lane == i) own = dot[i];
    }
    if (mine) {
      if (args.d_gates.data) args.d_gates.at<T>(b, r, h)[lane] = from_float<T>(own);
      deltas[lane][own_head * tile.positions + r - first] = gate * own;
      gates[lane][own_head * tile.positions + r - first] = gate;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!args.d_branch[i].data) continue;
      const float of_branch = __shfl_sync(partners, gate, i, kLanes);
#pragma unroll 1
      for (int d = lane * Chunk<T>::kSize; d < args.dim; d += kLanes * Chunk<T>::kSize) {
        Chunk<T> x = Chunk<T>::load(args.d_o.at<T>(b, r, h) + d);
#pragma unroll
        for (int j = 0; j < Chunk<T>::kSize; ++j) x.x[j] *= of_branch;
        x.store(args.d_branch[i].at<T>(b, r, h) + d);
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < heads * tile.positions; i += 256) {
    const int row = first + i % tile.positions, h = first_head + i / tile.positions;
    if (row >= end) continue;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (args.delta[k].data) args.delta[k].at(b, row, h) = deltas[k][i];
      if (args.gate[k].data) args.gate[k].at(b, row, h) = gates[k][i];
    }
  }
}

}  // namespace nsa::cuda::portable
