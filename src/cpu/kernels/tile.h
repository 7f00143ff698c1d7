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

/// acc[row][vector] += A * B for R rows x NV vectors of columns, in registers. A non-null `prefetch` is walked one
/// cache line per step.
template <class Slots, int R, int NV>
inline __attribute__((always_inline)) void multiply(Vec (&acc)[R][NV], OperandA a, OperandB b, int steps,
                                                    const char* prefetch = nullptr) {
  for (int k = 0; k < steps; ++k) {
    SlotVec column[NV];
#pragma GCC unroll 16
    for (int c = 0; c < NV; ++c) column[c] = load_slots(b.data + k * b.step_stride + c * kWidth);
    if (prefetch) __builtin_prefetch(prefetch + std::ptrdiff_t{k} * 64);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Slot x = a.data[r * a.row_stride + k * a.step_stride];
#pragma GCC unroll 16
      for (int c = 0; c < NV; ++c) acc[r][c] = Slots::dot(acc[r][c], x, column[c]);
    }
  }
}

/// C = begin + all that products(acc) adds with multiply(). begin(row, vector) gives the start value of an accumulator,
/// finish(row, vector, sum) takes the result; both are called in registers.
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
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int c = 0; c < NV; ++c) finish(r, c, acc[r][c]);
}

/// One product: R rows x NV vectors of columns.
template <class Slots, int R, int NV, class Begin, class Finish>
inline __attribute__((always_inline)) void tile(OperandA a, OperandB b, int steps, const Begin& begin,
                                                const Finish& finish, const char* prefetch = nullptr) {
  accumulate<R, NV>(
      begin, [&](Vec(&acc)[R][NV]) __attribute__((always_inline)) { multiply<Slots>(acc, a, b, steps, prefetch); },
      finish);
}

/// All rows and `columns` columns (a multiple of kWidth) in tiles of kTileRows x kTileVectors and smaller remainders.
/// begin(row, column) and finish(row, column, sum): column counts elements. A result does not depend on the tiling:
/// each sum runs over the steps in order.
template <class Slots, class Begin, class Finish>
inline void tiles(OperandA a, int rows, OperandB b, int columns, int steps, const Begin& begin, const Finish& finish,
                  const char* prefetch = nullptr) {
  const auto row_group = [&]<int R>(int row) {
    const OperandA ar = a.rows_from(row);
    const auto at = [&]<int NV>(int column) {
      tile<Slots, R, NV>(
          ar, b.columns_from(column), steps, [&](int r, int c) { return begin(row + r, column + c * kWidth); },
          [&](int r, int c, Vec sum) { finish(row + r, column + c * kWidth, sum); }, prefetch);
      if (prefetch) prefetch += std::ptrdiff_t{steps} * 64;
    };
    int column = 0;
    for (; column + kTileVectors * kWidth <= columns; column += kTileVectors * kWidth)
      at.template operator()<kTileVectors>(column);
    for (; column < columns; column += kWidth) at.template operator()<1>(column);
  };
  int row = 0;
  for (; row + kTileRows <= rows; row += kTileRows) row_group.template operator()<kTileRows>(row);
  switch (rows - row) {
    case 5:
      return row_group.template operator()<5>(row);
    case 4:
      return row_group.template operator()<4>(row);
    case 3:
      return row_group.template operator()<3>(row);
    case 2:
      return row_group.template operator()<2>(row);
    case 1:
      return row_group.template operator()<1>(row);
    default:
      return;
  }
}

}  // namespace nsa::cpu::NSA_ISA
