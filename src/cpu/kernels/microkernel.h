// The one micro-kernel of the CPU backend: C (+)= A * B for a few rows of A, with the accumulators in registers.
//
// Every product of attention and its backward has this form (h: query heads of a group, slots as in simd.h):
//   scores  S[h][key]  = sum_d   q[h][d]   * K[key][d]      B = K  as [d  ][key]
//   output  O[h][d]   += sum_key P[h][key] * V[key][d]      B = V  as [key][d]
//           dP[h][key] = sum_d  dO[h][d]   * V[key][d]      B = V  as [d  ][key]
//           dQ[h][d]  += sum_key dS[h][key] * K[key][d]     B = K  as [key][d]
//           dV[key][d]+= sum_h  P[h][key]  * dO[h][d]       A read with row stride 1, B = dO as [h][d]
//           dK[key][d]+= sum_h  dS[h][key] * q[h][d]        likewise
#pragma once

#include <cstddef>

#include "cpu/kernels/simd.h"

namespace nsa::cpu::NSA_ISA {

/// Slots of A: element (row, step) at data[row * row_stride + step * step_stride].
struct OperandA {
  const Slot* data;
  std::ptrdiff_t row_stride, step_stride;

  OperandA rows_from(int row) const { return {data + row * row_stride, row_stride, step_stride}; }
};

/// Slots of B: row `step` of columns at data + step * step_stride.
struct OperandB {
  const Slot* data;
  std::ptrdiff_t step_stride;

  OperandB columns_from(int column) const { return {data + column, step_stride}; }
};

/// Memory to bring nearer on the way: two lines per step of a product, until there is no more. Into the second cache:
/// the first is full of what the product reads.
struct Prefetch {
  const char* next = nullptr;
  const char* end = nullptr;

  static Prefetch of(const Slot* data, std::ptrdiff_t slots) {
    const char* p = reinterpret_cast<const char*>(data);
    return {p, p ? p + slots * std::ptrdiff_t{sizeof(Slot)} : nullptr};
  }
  void step() {
    if (next < end) {
      __builtin_prefetch(next, 0, 2);
      __builtin_prefetch(next + 64, 0, 2);
      next += 128;
    }
  }
};

/// acc[row][vector] += A * B for R rows x NV vectors of columns, in registers.
template <class Slots, int R, int NV>
inline __attribute__((always_inline)) void multiply(Vec (&acc)[R][NV], OperandA a, OperandB b, int steps,
                                                    Prefetch& prefetch) {
  Prefetch ahead = prefetch;
  for (int k = 0; k < steps; ++k) {
    SlotVec column[NV];
#pragma GCC unroll 16
    for (int c = 0; c < NV; ++c) column[c] = load_slots(b.data + k * b.step_stride + c * kWidth);
    ahead.step();
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Slot x = load_slot(a.data + r * a.row_stride + k * a.step_stride);
#pragma GCC unroll 16
      for (int c = 0; c < NV; ++c) acc[r][c] = Slots::dot(acc[r][c], x, column[c]);
    }
  }
  prefetch = ahead;
}

template <class Slots, int R, int NV>
inline __attribute__((always_inline)) void multiply(Vec (&acc)[R][NV], OperandA a, OperandB b, int steps) {
  Prefetch nothing;
  multiply<Slots>(acc, a, b, steps, nothing);
}

/// C = begin + all that products(acc) adds with multiply(). begin(row, vector) gives the start value of an accumulator;
/// finish(row, sums) takes the NV results of a row, finish(row, vector, sum) one. All are called in registers.
template <int R, int NV, class Begin, class Products, class Finish>
inline __attribute__((always_inline)) void accumulate(const Begin& begin, const Products& products,
                                                      const Finish& finish) {
  Vec acc[R][NV];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int c = 0; c < NV; ++c) acc[r][c] = begin(r, c);
  products(acc);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    if constexpr (requires { finish(r, acc[r]); }) {
      finish(r, acc[r]);
    } else {
#pragma GCC unroll 16
      for (int c = 0; c < NV; ++c) finish(r, c, acc[r][c]);
    }
  }
}

/// f.operator()<R, NV>(row, column) for tiles of kTileRows x kTileVectors, and smaller ones at the ends, that make up
/// `rows` x `columns` (a multiple of kWidth). The columns of B that a tile reads stay in the cache for all rows.
template <class F>
inline void for_tiles(int rows, int columns, const F& f) {
  const auto all_rows = [&]<int NV>(int column) {
    int row = 0;
    for (; row + kTileRows <= rows; row += kTileRows) f.template operator()<kTileRows, NV>(row, column);
    switch (rows - row) {
      case 5:
        return f.template operator()<5, NV>(row, column);
      case 4:
        return f.template operator()<4, NV>(row, column);
      case 3:
        return f.template operator()<3, NV>(row, column);
      case 2:
        return f.template operator()<2, NV>(row, column);
      case 1:
        return f.template operator()<1, NV>(row, column);
      default:
        return;
    }
  };
  int column = 0;
  for (; column + kTileVectors * kWidth <= columns; column += kTileVectors * kWidth)
    all_rows.template operator()<kTileVectors>(column);
  for (; column < columns; column += kWidth) all_rows.template operator()<1>(column);
}

/// C = begin + A * B. begin(row, column) and finish(row, column, sum) or finish(row, column, sums): column counts
/// elements. A result does not depend on the tiling: each sum runs over the steps in order.
template <class Slots, class Begin, class Finish>
inline void tiles(OperandA a, int rows, OperandB b, int columns, int steps, const Begin& begin, const Finish& finish,
                  Prefetch prefetch = {}) {
  for_tiles(rows, columns, [&]<int R, int NV>(int row, int column) {
    const auto start = [&](int r, int c) { return begin(row + r, column + c * kWidth); };
    const auto products = [&](Vec(&acc)[R][NV]) __attribute__((always_inline)) {
      multiply<Slots>(acc, a.rows_from(row), b.columns_from(column), steps, prefetch);
    };
    if constexpr (requires(Vec sum) { finish(row, column, sum); }) {
      accumulate<R, NV>(start, products, [&](int r, int c, Vec sum) { finish(row + r, column + c * kWidth, sum); });
    } else {
      accumulate<R, NV>(start, products, [&](int r, Vec(&sums)[NV]) { finish(row + r, column, sums); });
    }
  });
}

}  // namespace nsa::cpu::NSA_ISA
