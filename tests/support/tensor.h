// Tensors that own their memory, in awkward layouts and with poison wherever a test wrote nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "core/element.h"
#include "core/layout.h"
#include "nsa/tensor.h"

namespace nsa::test {

enum class Layout {
  kContiguous,
  kPadded,      // gaps between rows and after the last head
  kHeadsFirst,  // (B, heads, S, D) in memory
};

/// All memory, gaps included, starts as bytes 0xff: NaN in every float type, -1 in int32.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, std::vector<std::int64_t> shape, Layout layout = Layout::kContiguous);
  Tensor(Tensor&&) = default;
  Tensor& operator=(Tensor&&) = default;
  Tensor clone() const;

  const TensorView& view() const { return view_; }
  operator const TensorView&() const { return view_; }
  double get(const Index& index) const { return get_element(view_, offset_of(view_, index)); }
  /// Whether all memory outside the view still holds its poison.
  bool gaps_intact() const;
  void set(const Index& index, double value) { set_element(view_, offset_of(view_, index), value); }

 private:
  std::vector<std::byte> bytes_;
  TensorView view_;
};

std::vector<TensorView> views_of(const std::vector<Tensor>& tensors);

std::vector<std::int64_t> shape_of(const TensorView& view);

/// Elements in row-major order.
std::vector<double> values_of(const TensorView& view);

/// The same elements in row-major order, bit for bit (NaN equal to NaN of the same bits).
bool same_bits(const TensorView& a, const TensorView& b);

/// Random values, normal with this deviation. Only the first `rows` token rows of a packed (rank 3) tensor are
/// written when rows >= 0; the rest keeps its poison.
void fill_normal(const TensorView& view, unsigned seed, double deviation = 1, std::int64_t rows = -1);
/// Multiples of 1/4 in [-1, 1]: sums of few products are exact in float32, so ties are ties on every backend.
void fill_exact(const TensorView& view, unsigned seed);
void fill_value(const TensorView& view, double value);

/// The same data with stride 0 along a dimension: every index reads what index 0 holds.
TensorView broadcast(TensorView view, int dim);
/// Rows [begin, end) of dimension `dim`.
TensorView slice(TensorView view, int dim, std::int64_t begin, std::int64_t end);

/// What the rows of a tensor stand for.
enum class Rows { kQueries, kKeys, kCompressed, kLse, kNone };

/// One sequence's part of a batched or packed tensor.
TensorView part_of(const TensorView& view, Rows rows, const Sequence& s);

/// Copies elements in row-major order; shapes may differ, their number of elements not.
void assign(const TensorView& from, const TensorView& to);

}  // namespace nsa::test
