// The oracle: every operation as plain loops in double precision, written to be read beside the specification.
//
// Inputs and outputs may have any floating-point dtype, float64 included; an output is rounded once, on its way out.
// Each operation also runs as the "plain computation in the same precision" that error bounds are stated against: with
// a `precision` other than float64, everything such a computation would store (scores, probabilities, hidden
// activations, their gradients, results) is rounded to that dtype, while sums stay exact.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "core/element.h"
#include "core/layout.h"
#include "nsa/operations.h"

namespace nsa::reference {

/// As the functions of core/backend.h, which run them with precision = float64.
Status run(const CompressParams& params, DType precision);
Status run(const CompressBackwardParams& params, DType precision);
Status run(const CompressedAttentionParams& params, DType precision);
Status run(const CompressedAttentionBackwardParams& params, DType precision);
Status run(const SelectedAttentionParams& params, DType precision);
Status run(const SelectedAttentionBackwardParams& params, DType precision);
Status run(const SlidingWindowAttentionParams& params, DType precision);
Status run(const SlidingWindowAttentionBackwardParams& params, DType precision);
Status run(const CombineParams& params, DType precision);
Status run(const CombineBackwardParams& params, DType precision);
Status run(const NsaAttentionParams& params, DType precision);
Status run(const NsaAttentionBackwardParams& params, DType precision);
Status run(const NativeSparseAttentionParams& params, DType precision);
Status run(const NativeSparseAttentionBackwardParams& params, DType precision);

/// Importance of the candidates j = 0 ... floor(t / l') of query `row` of a sequence, summed over the group's heads.
std::vector<double> importance(const SelectBlocksParams& params, const Sequence& sequence, std::int64_t kv_head,
                               std::int64_t row);

/// What the unforced blocks are ranked by: the importance itself, or its noisy logarithm when params.noise > 0.
std::vector<double> ranking(const SelectBlocksParams& params, const Sequence& sequence, std::int64_t kv_head,
                            std::int64_t row, const std::vector<double>& importance);

/// Whether block j is always selected by the query at position t.
bool is_forced(const NSAConfig& cfg, std::int64_t j, std::int64_t t);

/// A dense (rows, cols) array of doubles, zero at first.
class Matrix {
 public:
  Matrix() = default;
  Matrix(std::int64_t rows, std::int64_t cols)
      : rows_(rows), cols_(cols), values_(static_cast<std::size_t>(rows * cols)) {}

  double* operator[](std::int64_t row) { return values_.data() + row * cols_; }
  const double* operator[](std::int64_t row) const { return values_.data() + row * cols_; }
  std::int64_t rows() const { return rows_; }
  std::int64_t cols() const { return cols_; }

 private:
  std::int64_t rows_ = 0, cols_ = 0;
  std::vector<double> values_;
};

double dot(const double* a, const double* b, std::int64_t n);
/// y += a * x
void axpy(double a, const double* x, double* y, std::int64_t n);

/// A (rows, cols) matrix within a tensor of any dtype, or of no tensor at all: an optional argument that is absent.
struct MatrixView {
  TensorView tensor;
  std::int64_t offset = 0, row_stride = 0, col_stride = 1, rows = 0, cols = 0;
};

/// Rows begin ... begin + count - 1 of one head of a (B, S, heads, D) or (total, heads, D) tensor.
MatrixView head_of(const TensorView& tensor, std::int64_t batch, std::int64_t begin, std::int64_t count,
                   std::int64_t head);
/// Slice p of a weight (P, rows, cols), or the one row p of a bias (P, cols).
MatrixView slice_of(const TensorView& weight, std::int64_t p);

/// Its values; an absent tensor gives a matrix without rows.
Matrix load(const MatrixView& view);
/// Rounds to `precision`, then to the tensor's dtype. An absent tensor takes nothing.
void store(const Matrix& values, const MatrixView& view, DType precision);
/// Sets every element of a tensor; an absent tensor takes nothing.
void fill(const TensorView& tensor, double value);
/// to = the sum of tensors of its shape, rounded to `precision` and to its dtype. An absent tensor takes nothing.
void add(std::initializer_list<TensorView> terms, const TensorView& to, DType precision = DType::kFloat64);

/// A tensor of its own, contiguous and zero, of another's shape.
class Temporary {
 public:
  Temporary(const TensorView& like, DType dtype);
  const TensorView& view() const { return view_; }

 private:
  std::vector<std::byte> bytes_;
  TensorView view_;
};

}  // namespace nsa::reference
