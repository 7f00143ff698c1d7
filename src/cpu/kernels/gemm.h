// C += A * B for operands of any size: panels of B are packed as they are needed and multiplied with all rows of A
// while they lie in L1. Every element of C is one sum over the steps in order, so it depends neither on the other rows
// nor on how the work is divided.
#pragma once

#include <span>
#include <type_traits>

#include "cpu/kernels/microkernel.h"
#include "cpu/kernels/pack.h"

namespace nsa::cpu::NSA_ISA {

/// What slots are made of: In, or float32 where the instruction set does not multiply In.
template <class In>
using ElementOf = std::conditional_t<SlotsOf<In>::type::kElements == 2, In, float>;

/// n zeros.
template <class T>
Buffer<T> zeros(std::int64_t n) {
  Buffer<T> result(static_cast<std::size_t>(n));
  std::fill_n(result.data(), n, T{});
  return result;
}

inline constexpr int kPanelColumns = kTileVectors * kWidth;
inline constexpr int kPanelSteps = 64;  // 64 steps x 64 columns: 16 KB with 512-bit vectors

/// dst[i] = slot of element i of each row, `count` of them and zeros up to `padded`; a null row counts as zeros.
template <class Slots, class T>
inline void interleave(const T* const (&rows)[Slots::kElements], std::int64_t count, std::int64_t padded, Slot* dst) {
  std::int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    UVec v = rows[0] ? (UVec)load_floats(rows[0] + i) : UVec{};
    if constexpr (Slots::kElements == 2) v = (v >> 16) | (rows[1] ? (UVec)load_floats(rows[1] + i) : UVec{});
    std::memcpy(dst + i, &v, sizeof v);
  }
  for (; i < padded; ++i) {
    const auto element = [&](int e) { return rows[e] && i < count ? rows[e][i] : T{}; };
    dst[i] = make_slot<Slots>(element(0), element(Slots::kElements - 1));
  }
}

/// Slots of the columns [column, column + columns) of `steps` steps from `step` of a matrix whose row(i), i < count, is
/// a pointer to its elements or null for zeros; the reduction runs over the rows. dst[step][stride].
template <class Slots, class Row>
inline void pack_over_rows(const Row& row, std::int64_t count, std::int64_t step, int steps, std::int64_t column,
                           std::int64_t columns, Slot* dst, std::int64_t stride) {
  using T = std::remove_cvref_t<decltype(*row(0))>;
  for (int k = 0; k < steps; ++k) {
    const T* rows[Slots::kElements];
    for (int e = 0; e < Slots::kElements; ++e) {
      const std::int64_t i = (step + k) * Slots::kElements + e;
      const T* p = i < count ? row(i) : nullptr;
      rows[e] = p ? p + column : nullptr;
    }
    interleave<Slots>(rows, columns, round_up(columns, kWidth), dst + k * stride);
  }
}

/// The B operand with rows row(i), i < count: B[i][column].
template <class Slots, class Row>
auto rows_of_b(const Row& row, std::int64_t count) {
  return [=](std::int64_t step, int steps, std::int64_t column, std::int64_t columns, Slot* panel) {
    pack_over_rows<Slots>(row, count, step, steps, column, columns, panel, kPanelColumns);
  };
}

/// The transposed one: column c of B has the `count` elements at row(c).
template <class Slots, class Row>
auto columns_of_b(const Row& row, std::int64_t count) {
  return [=](std::int64_t step, int steps, std::int64_t column, std::int64_t columns, Slot* panel) {
    const std::int64_t padded = round_up(columns, kWidth);
    for (std::int64_t c = 0; c < padded; ++c)
      for (int k = 0; k < steps; ++k) {
        const std::int64_t i = (step + k) * Slots::kElements, last = i + Slots::kElements - 1;
        const auto* x = c < columns ? row(column + c) : nullptr;
        using T = std::remove_cvref_t<decltype(*x)>;
        panel[k * kPanelColumns + c] = x && i < count ? make_slot<Slots>(x[i], last < count ? x[last] : T{}) : Slot{};
      }
  };
}

/// Some rows of A and of C (float32, row stride a multiple of kWidth).
struct RowsOfProduct {
  OperandA a;
  int rows;
  float* c;
  std::int64_t c_stride;
};

/// c += a * B for all `rows`; `pack` is rows_of_b or columns_of_b. Writes C up to the next multiple of kWidth columns.
template <class Slots, class Pack>
void gemm(std::span<const RowsOfProduct> rows, std::int64_t columns, std::int64_t steps, const Pack& pack) {
  alignas(64) Slot panel[kPanelSteps * kPanelColumns];
  for (std::int64_t step = 0; step < steps; step += kPanelSteps)
    for (std::int64_t column = 0; column < columns; column += kPanelColumns) {
      const int n = static_cast<int>(std::min<std::int64_t>(kPanelColumns, columns - column));
      const int k = static_cast<int>(std::min<std::int64_t>(kPanelSteps, steps - step));
      pack(step, k, column, n, panel);
      for (const RowsOfProduct& part : rows) {
        const auto at = [&](int r, int c) { return part.c + r * part.c_stride + column + c; };
        const OperandA a{part.a.data + step * part.a.step_stride, part.a.row_stride, part.a.step_stride};
        tiles<Slots>(
            a, part.rows, {panel, kPanelColumns}, static_cast<int>(round_up(n, kWidth)), k,
            [&](int r, int c) { return load(at(r, c)); }, [&](int r, int c, Vec sum) { store(at(r, c), sum); });
      }
    }
}

/// c[row][column] += sum over i < count of a(i)[row] * b(i)[column], i ascending: gradients of weights.
template <class Slots, class RowA, class RowB>
void sum_of_outer_products(const RowA& a, std::int64_t rows, const RowB& b, std::int64_t columns, std::int64_t count,
                           float* c, std::int64_t c_stride) {
  const std::int64_t stride = round_up(rows, kWidth), steps = ceil_div(count, Slots::kElements);
  Buffer<Slot> packed(kPanelSteps * stride);
  for (std::int64_t step = 0; step < steps; step += kPanelSteps) {
    const int k = static_cast<int>(std::min<std::int64_t>(kPanelSteps, steps - step));
    const std::int64_t first = step * Slots::kElements;
    pack_over_rows<Slots>(a, count, step, k, 0, rows, packed.data(), stride);
    const RowsOfProduct product{
        .a = {packed.data(), 1, stride}, .rows = static_cast<int>(rows), .c = c, .c_stride = c_stride};
    gemm<Slots>({&product, 1}, columns, k,
                rows_of_b<Slots>([&](std::int64_t i) { return b(first + i); }, count - first));
  }
}

}  // namespace nsa::cpu::NSA_ISA
