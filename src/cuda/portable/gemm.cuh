// A GEMM on tensor cores whose operands are found by functions: phi reads overlapping blocks of tokens in
// place.
//
// C[m][n] = sum over (o, k) of A(m, o, k) * B(o, k, n), o < outer, k < inner, in this order. The problem is a struct
// with
//   static constexpr bool kARows, kBRows   true: consecutive elements of the factor run along m (or n); false: along k
//   int m, n, outer, inner                 for this blockIdx.z
//   const T* a(m, o, k), b(o, k, n)        address of 16 bytes of consecutive elements, or null for zeros
//   void write(m, n, x, y)                 takes C[m][n] and C[m][n + 1]
//   bool zero(m)                           optional: row m of A is zero, where the problem does not look at B
// A warp computes sixteen rows; where some have none, those load, otherwise all do. The order of a sum does not depend
// on the shape of tiles.
#pragma once

#include "cuda/common/tile.cuh"

namespace nsa::cuda::portable {

/// What a thread block computes: rows x columns, `depth` terms of the sums at a time, of which `stages` are on their
/// way.
template <int rows, int columns, int depth, int stages, int threads>
struct GemmTiles {
  static constexpr int kRows = rows, kColumns = columns, kDepth = depth, kStages = stages, kThreads = threads;
  static constexpr int kComputing = rows * 2, kLoading = kComputing < kThreads ? kThreads - kComputing : kThreads;
  static_assert(kComputing <= kThreads);
};
/// Many rows: every element is used often.
template <class T>
using ManyRows = GemmTiles<64, 64, 32, 2, 128>;
/// So many that larger tiles, which read less, still fill the device. For types of 16 bits: others spill.
using VeryManyRows = GemmTiles<128, 128, 32, 3, 256>;
/// Few rows: what matters is that all SMs read B, much at a time.
template <class T>
using SkinnyGemm = GemmTiles<16, 16, 256 / sizeof(T), 4, 256>;

/// The A operand when the tile's rows are the reduction: columns `column` .. + 15, reduction rows `row` .. .
template <class T, int kRows>
__device__ inline void load_a_rows(std::uint32_t (&a)[4], std::uint32_t tile, int row, int column, int lane) {
  using Rows = Tile<T, kRows>;
  if constexpr (sizeof(T) == 2) {
    ldmatrix4_transposed(a, tile + Rows::at(row + (lane & 16) / 2 + (lane & 7), column * 2, (lane & 8) * 2));
  } else {
    static_assert(!Rows::kSwizzled);
    const std::uint32_t from = tile + Rows::at(row + 2 * (lane & 3), column * 4, lane / 4 * 4);
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(a[0]) : "r"(from));
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(a[1]) : "r"(from + 32));
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(a[2]) : "r"(from + Rows::kPitch));
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(a[3]) : "r"(from + 32 + Rows::kPitch));
  }
}

/// float32, A along the reduction and B in rows: elements 2t and 2t + 1 take the places t and t + 4, as in load_b_rows.
template <class Deep>
__device__ inline void load_a_paired(std::uint32_t (&a)[4], std::uint32_t tile, int k, int warp, int lane) {
  const std::uint32_t at = tile + Deep::at(warp * 16 + lane / 4, k * 32, (lane & 3) * 8);
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a[0]), "=r"(a[2]) : "r"(at));
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a[1]), "=r"(a[3]) : "r"(at + 8 * Deep::kPitch));
}

template <class T, class Op, class Tiles>
struct GemmShape {
  using Deep = Tile<T, Tiles::kDepth>;  // consecutive along the reduction
  using WideA = Tile<T, Tiles::kRows>;  // consecutive along m or n
  using WideB = Tile<T, Tiles::kColumns>;
  static constexpr int kA = Op::kARows ? WideA::bytes(Tiles::kDepth) : Deep::bytes(Tiles::kRows);
  static constexpr int kB = Op::kBRows ? WideB::bytes(Tiles::kDepth) : Deep::bytes(Tiles::kColumns);
  static constexpr int kStage = kA + kB, kMemory = Tiles::kStages * kStage;
};

template <class T, class Op, class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, 2) gemm(const __grid_constant__ Op shared_op) {
  using Shape = GemmShape<T, Op, Tiles>;
  using Deep = typename Shape::Deep;
  using WideB = typename Shape::WideB;
  constexpr int kRows = Tiles::kRows, kColumns = Tiles::kColumns, kDepth = Tiles::kDepth, kStages = Tiles::kStages;
  constexpr int kPer = 16 / static_cast<int>(sizeof(T));  // elements of a copy
  extern __shared__ __align__(128) char memory[];
  const auto op = shared_op.at(blockIdx.z);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int m0 = blockIdx.y * kRows, n0 = blockIdx.x * kColumns;
  if (n0 >= op.n) return;  // the grid is that of the wider one of two problems
  const int per_outer = (op.inner + kDepth - 1) / kDepth;
  int steps = op.outer * per_outer;
  if constexpr (requires { op.zero(0); })
    if (__syncthreads_and(thread >= kRows || m0 + thread >= op.m || op.zero(m0 + thread))) steps = 0;

  const int loader = thread - (Tiles::kThreads - Tiles::kLoading);
  const bool computes = thread < Tiles::kComputing;

  const auto load = [&](int step) {
    const int o = step / per_outer, k0 = step % per_outer * kDepth;
    const std::uint32_t a = shared_address(memory) + step % kStages * Shape::kStage, b = a + Shape::kA;
    const auto of_a = [&](int m, int k) -> const T* {
      return m0 + m < op.m && k0 + k < op.inner ? op.a(m0 + m, o, k0 + k) : nullptr;
    };
    const auto of_b = [&](int n, int k) -> const T* {
      return n0 + n < op.n && k0 + k < op.inner ? op.b(o, k0 + k, n0 + n) : nullptr;
    };
    // This thread's share of a tile of kCount rows; source(row, column): addresses, found side by side.
    const auto share = [&]<class Rows, int kCount>(Rows, std::integral_constant<int, kCount>, std::uint32_t to,
                                                   const auto& source) {
      constexpr int kCopies = kCount * Rows::kChunks, kShare = (kCopies + Tiles::kLoading - 1) / Tiles::kLoading;
      const T* from[kShare];
#pragma unroll
      for (int j = 0; j < kShare; ++j) {
        const int i = loader + j * Tiles::kLoading;
        from[j] = i < kCopies ? source(i / Rows::kChunks, i % Rows::kChunks * kPer) : nullptr;
      }
#pragma unroll
      for (int j = 0; j < kShare; ++j) {
        const int i = loader + j * Tiles::kLoading;
        if (i < kCopies)
          copy16(to + Rows::at(i / Rows::kChunks, 0, i % Rows::kChunks * 16), from[j], from[j] != nullptr);
      }
    };
    // Consecutive along k: rows of kDepth; consecutive along m or n: kDepth rows of the tile's.
    constexpr std::integral_constant<int, kDepth> kDeep;
    if constexpr (Op::kARows) {
      share(typename Shape::WideA{}, kDeep, a, [&](int k, int m) { return of_a(m, k); });
    } else {
      share(Deep{}, std::integral_constant<int, kRows>{}, a, of_a);
    }
    if constexpr (Op::kBRows) {
      share(WideB{}, kDeep, b, [&](int k, int n) { return of_b(n, k); });
    } else {
      share(Deep{}, std::integral_constant<int, kColumns>{}, b, of_b);
    }
  };

  float c[kColumns / 8][4] = {};
  const auto load_next = [&](int step) {  // an empty group of copies at the end keeps their count
    if (step < steps && loader >= 0) load(step);
    commit_copies();
  };
  for (int step = 0; step < kStages - 1; ++step) load_next(step);
  for (int step = 0; step < steps; ++step) {
    wait_copies<kStages - 2>();
    __syncthreads();  // this step's stage is there, that of the step before is free
    load_next(step + kStages - 1);
    const std::uint32_t a = shared_address(memory) + step % kStages * Shape::kStage, b = a + Shape::kA;
#pragma unroll
    for (int k = 0; k < kDepth / kStep<T>; ++k) {
      if (!computes) break;
      std::uint32_t fa[4];
      if constexpr (Op::kARows) {
        load_a_rows<T, kRows>(fa, a, k * kStep<T>, warp * 16, lane);
      } else {
        if constexpr (sizeof(T) == 4 && Op::kBRows) {
          load_a_paired<Deep>(fa, a, k, warp, lane);
        } else {
          Deep::load_a(fa, a, warp * 16, k, lane);
        }
      }
#pragma unroll
      for (int n = 0; n < kColumns / 8; n += 2) {
        std::uint32_t fb[4];
        if constexpr (Op::kBRows) {
          WideB::load_b_rows(fb, b, k * kStep<T>, n * 8, lane);
        } else {
          static_assert(sizeof(T) == 2 || !Op::kARows, "float32: A in rows needs B in rows");
          Deep::load_b(fb, b, n * 8, k, lane);
        }
        mma(T{}, c[n], fa, fb[0], fb[1]);
        mma(T{}, c[n + 1], fa, fb[2], fb[3]);
      }
    }
  }
  if (!computes) return;
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = m0 + warp * 16 + lane / 4 + 8 * i, column = n0 + n * 8 + 2 * (lane & 3);
      if (row < op.m && column < op.n) op.write(row, column, c[n][2 * i], c[n][2 * i + 1]);
    }
  }
}

}  // namespace nsa::cuda::portable
