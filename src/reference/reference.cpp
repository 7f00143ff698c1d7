#include "reference/reference.h"

#include "core/backend.h"

namespace nsa::reference {

const char* variant() { return "float64"; }

double dot(const double* a, const double* b, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

void axpy(double a, const double* x, double* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}

MatrixView head_of(const TensorView& tensor, std::int64_t batch, std::int64_t begin, std::int64_t count,
                   std::int64_t head) {
  if (!tensor.defined()) return {};
  const int token = tensor.rank - 3;
  return {.tensor = tensor,
          .offset = row_offset(tensor, batch, begin) + head * tensor.stride[token + 1],
          .row_stride = tensor.stride[token],
          .col_stride = tensor.stride[token + 2],
          .rows = count,
          .cols = tensor.size(-1)};
}

MatrixView slice_of(const TensorView& weight, std::int64_t p) {
  if (!weight.defined()) return {};
  const bool bias = weight.rank == 2;
  return {.tensor = weight,
          .offset = p * weight.stride[0],
          .row_stride = bias ? 0 : weight.stride[1],
          .rows = bias ? 1 : weight.size(1),
          .cols = weight.size(-1)};
}

Matrix load(const MatrixView& view) {
  Matrix values(view.rows, view.cols);
  for (std::int64_t r = 0; r < view.rows; ++r)
    for (std::int64_t c = 0; c < view.cols; ++c)
      values[r][c] = get_element(view.tensor, view.offset + r * view.row_stride + c * view.col_stride);
  return values;
}

void store(const Matrix& values, const MatrixView& view, DType precision) {
  for (std::int64_t r = 0; r < view.rows; ++r)
    for (std::int64_t c = 0; c < view.cols; ++c)
      set_element(view.tensor, view.offset + r * view.row_stride + c * view.col_stride,
                  rounded(values[r][c], precision));
}

void fill(const TensorView& tensor, double value) {
  if (!tensor.defined()) return;
  for_each_index(tensor, [&](const auto& index) { set_element(tensor, offset_of(tensor, index), value); });
}

void add(std::initializer_list<TensorView> terms, const TensorView& to, DType precision) {
  if (!to.defined()) return;
  for_each_index(to, [&](const auto& index) {
    double sum = 0;
    for (const TensorView& term : terms) sum += get_element(term, offset_of(term, index));
    set_element(to, offset_of(to, index), rounded(sum, precision));
  });
}

Temporary::Temporary(const TensorView& like, DType dtype)
    : bytes_(static_cast<std::size_t>(like.numel()) * size_of(dtype)), view_(like) {
  view_.data = bytes_.data();
  view_.dtype = dtype;
  std::int64_t stride = 1;
  for (int i = view_.rank - 1; i >= 0; --i) {
    view_.stride[i] = stride;
    stride *= view_.shape[i];
  }
}

Status run(const ForkParams& params, const Context&) { return fork_in_host_memory(params); }

}  // namespace nsa::reference
