// A matrix product on tensor cores whose factors are found by functions: phi reads overlapping blocks of tokens in
// place.
//
// C[m][n] = sum over (o, k) of A(m, o, k) * B(o, k, n), o < outer, k < inner, in this order. The problem is a struct
// with
//   static constexpr bool kARows, kBRows   true: consecutive elements of the factor run along m (or n); false: along k
//   int m, n, outer, inner                 for this blockIdx.z
//   const T* a(m, o, k), b(o, k, n)        address of 16 bytes of consecutive elements, or null for zeros
//   void write(m, n, x, y)                 takes C[m][n] and C[m][n + 1]
// A block of four warps computes 64 x 64.
#pragma once

#include "cuda/common/tile.cuh"

namespace nsa::cuda::portable {

inline constexpr int kGemmTile = 64, kGemmDepth = 32;

/// The A operand when the tile's rows are the reduction: columns `column` .. + 15, reduction rows `row` .. .
template <class T>
__device__ inline void load_a_rows(std::uint32_t (&a)[4], std::uint32_t tile, int row, int column, int lane) {
  using Rows = Tile<T, kGemmTile>;
  if constexpr (sizeof(T) == 2) {
    ldmatrix4_transposed(a, tile + (row + (lane & 16) / 2 + (lane & 7)) * Rows::kPitch + (column + (lane & 8)) * 2);
  } else {
    const std::uint32_t at = tile + (row + 2 * (lane & 3)) * Rows::kPitch + (column + lane / 4) * 4;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(a[0]) : "r"(at));
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(a[1]) : "r"(at + 32));
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(a[2]) : "r"(at + Rows::kPitch));
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(a[3]) : "r"(at + 32 + Rows::kPitch));
  }
}

/// float32, A along the reduction and B in rows: elements 2t and 2t + 1 take the places t and t + 4, as in load_b_rows.
__device__ inline void load_a_paired(std::uint32_t (&a)[4], std::uint32_t tile, int k, int warp, int lane) {
  using Deep = Tile<float, kGemmDepth>;
  const std::uint32_t at = tile + (warp * 16 + lane / 4) * Deep::kPitch + k * 32 + (lane & 3) * 8;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a[0]), "=r"(a[2]) : "r"(at));
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a[1]), "=r"(a[3]) : "r"(at + 8 * Deep::kPitch));
}

template <class T, class Op>
struct GemmShape {
  using Deep = Tile<T, kGemmDepth>;  // 64 rows, consecutive along the reduction
  using Wide = Tile<T, kGemmTile>;   // kGemmDepth rows of the reduction
  static constexpr int kA = Op::kARows ? Wide::bytes(kGemmDepth) : Deep::bytes(kGemmTile);
  static constexpr int kB = Op::kBRows ? Wide::bytes(kGemmDepth) : Deep::bytes(kGemmTile);
  static constexpr int kMemory = 2 * (kA + kB);
};

template <class T, class Op>
__global__ void __launch_bounds__(128, 2) gemm(const __grid_constant__ Op shared_op) {
  using Shape = GemmShape<T, Op>;
  using Deep = typename Shape::Deep;
  using Wide = typename Shape::Wide;
  constexpr int kPer = 16 / static_cast<int>(sizeof(T));  // elements of a copy
  extern __shared__ __align__(16) char memory[];
  const Op op = shared_op.at(blockIdx.z);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int m0 = blockIdx.y * kGemmTile, n0 = blockIdx.x * kGemmTile;
  const int per_outer = (op.inner + kGemmDepth - 1) / kGemmDepth, steps = op.outer * per_outer;

  const auto load = [&](int step) {
    const int o = step / per_outer, k0 = step % per_outer * kGemmDepth;
    const std::uint32_t a = shared_address(memory) + step % 2 * (Shape::kA + Shape::kB), b = a + Shape::kA;
    // Consecutive along k: 64 rows of kGemmDepth; consecutive along m or n: kGemmDepth rows of 64.
    const auto deep = [&](std::uint32_t to, int first, int size, const auto& source) {
      for (int i = thread; i < kGemmTile * Deep::kChunks; i += 128) {
        const int r = i / Deep::kChunks, k = k0 + i % Deep::kChunks * kPer;
        const T* from = first + r < size && k < op.inner ? source(first + r, k) : nullptr;
        copy16(to + r * Deep::kPitch + i % Deep::kChunks * 16, from, from != nullptr);
      }
    };
    const auto wide = [&](std::uint32_t to, int first, int size, const auto& source) {
      for (int i = thread; i < kGemmDepth * Wide::kChunks; i += 128) {
        const int k = k0 + i / Wide::kChunks, r = first + i % Wide::kChunks * kPer;
        const T* from = r < size && k < op.inner ? source(r, k) : nullptr;
        copy16(to + i / Wide::kChunks * Wide::kPitch + i % Wide::kChunks * 16, from, from != nullptr);
      }
    };
    const auto source_a = [&](int m, int k) { return op.a(m, o, k); };
    const auto source_b = [&](int n, int k) { return op.b(o, k, n); };
    if constexpr (Op::kARows) {
      wide(a, m0, op.m, source_a);
    } else {
      deep(a, m0, op.m, source_a);
    }
    if constexpr (Op::kBRows) {
      wide(b, n0, op.n, source_b);
    } else {
      deep(b, n0, op.n, source_b);
    }
    commit_copies();
  };

  float c[kGemmTile / 8][4] = {};
  if (steps > 0) load(0);
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) {
      load(step + 1);
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();
    const std::uint32_t a = shared_address(memory) + step % 2 * (Shape::kA + Shape::kB), b = a + Shape::kA;
#pragma unroll
    for (int k = 0; k < kGemmDepth / kStep<T>; ++k) {
      std::uint32_t fa[4];
      if constexpr (Op::kARows) {
        load_a_rows<T>(fa, a, k * kStep<T>, warp * 16, lane);
      } else {
        if constexpr (sizeof(T) == 4 && Op::kBRows) {
          load_a_paired(fa, a, k, warp, lane);
        } else {
          Deep::load_a(fa, a, warp * 16, k, lane);
        }
      }
#pragma unroll
      for (int n = 0; n < kGemmTile / 8; n += 2) {
        std::uint32_t fb[4];
        if constexpr (Op::kBRows) {
          Wide::load_b_rows(fb, b, k * kStep<T>, n * 8, lane);
        } else {
          static_assert(sizeof(T) == 2 || !Op::kARows, "float32: A in rows needs B in rows");
          Deep::load_b(fb, b, n * 8, k, lane);
        }
        mma(T{}, c[n], fa, fb[0], fb[1]);
        mma(T{}, c[n + 1], fa, fb[2], fb[3]);
      }
    }
    __syncthreads();  // the stage is free
  }
#pragma unroll
  for (int n = 0; n < kGemmTile / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = m0 + warp * 16 + lane / 4 + 8 * i, column = n0 + n * 8 + 2 * (lane & 3);
      if (row < op.m && column < op.n) op.write(row, column, c[n][2 * i], c[n][2 * i + 1]);
    }
  }
}

}  // namespace nsa::cuda::portable
