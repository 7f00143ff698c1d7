// Access to tensors of any dtype, and the rounding of stored values.
#include "cpu/reference/reference.h"

#include <cmath>
#include <cstddef>
#include <limits>

#include "core/backend.h"
#include "core/half.h"

namespace nsa::reference {
namespace {

/// x rounded to `digits` binary digits, or to the same spacing as at 2^min_exponent for numbers below it.
double round_to(double x, int digits, int min_exponent, double max) {
  if (x == 0 || !std::isfinite(x)) return x;
  const double unit = std::ldexp(1.0, std::max(std::ilogb(x), min_exponent) - (digits - 1));
  const double y = std::nearbyint(x / unit) * unit;
  return std::fabs(y) > max ? std::copysign(std::numeric_limits<double>::infinity(), x) : y;
}

double get(const TensorView& tensor, std::int64_t offset) {
  switch (tensor.dtype) {
    case DType::kFloat32:
      return tensor.as<const float>()[offset];
    case DType::kBFloat16:
      return to_float(tensor.as<const BFloat16>()[offset]);
    case DType::kFloat16:
      return to_float(tensor.as<const Float16>()[offset]);
    case DType::kFloat64:
      return tensor.as<const double>()[offset];
    case DType::kInt32:
      return tensor.as<const std::int32_t>()[offset];
  }
  return 0;
}

void set(const TensorView& tensor, std::int64_t offset, double value) {
  const double x = rounded(value, tensor.dtype);
  switch (tensor.dtype) {
    case DType::kFloat32:
      tensor.as<float>()[offset] = static_cast<float>(x);
      break;
    case DType::kBFloat16:
      tensor.as<BFloat16>()[offset] = to_bfloat16(static_cast<float>(x));
      break;
    case DType::kFloat16:
      tensor.as<Float16>()[offset] = to_float16(static_cast<float>(x));
      break;
    case DType::kFloat64:
      tensor.as<double>()[offset] = x;
      break;
    case DType::kInt32:
      tensor.as<std::int32_t>()[offset] = static_cast<std::int32_t>(x);
      break;
  }
}

/// Calls f(indices) for every element of a shape, in row-major order.
template <class F>
void for_each_index(const TensorView& shape, F&& f) {
  std::array<std::int64_t, TensorView::kMaxRank> index{};
  for (std::int64_t n = shape.numel(); n > 0; --n) {
    f(index);
    for (int i = shape.rank - 1; i >= 0 && ++index[i] == shape.shape[i]; --i) index[i] = 0;
  }
}

std::int64_t offset_of(const TensorView& tensor, const std::array<std::int64_t, TensorView::kMaxRank>& index) {
  std::int64_t offset = 0;
  for (int i = 0; i < tensor.rank; ++i) offset += index[i] * tensor.stride[i];
  return offset;
}

}  // namespace

const char* variant() { return "float64"; }

double rounded(double x, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<float>(x);
    case DType::kBFloat16:
      return round_to(x, 8, -126, 0x1.FEp127);
    case DType::kFloat16:
      return round_to(x, 11, -14, 65504);
    default:
      return x;
  }
}

double dot(const double* a, const double* b, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

void axpy(double a, const double* x, double* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}

Window head_of(const TensorView& tensor, std::int64_t batch, std::int64_t begin, std::int64_t count,
               std::int64_t head) {
  if (!tensor.defined()) return {};
  const int token = tensor.rank - 3;
  return {tensor, row_offset(tensor, batch, begin) + head * tensor.stride[token + 1], tensor.stride[token], count,
          tensor.size(-1)};
}

Window slice_of(const TensorView& weight, std::int64_t p) {
  if (!weight.defined()) return {};
  const bool bias = weight.rank == 2;
  return {weight, p * weight.stride[0], bias ? 0 : weight.stride[1], bias ? 1 : weight.size(1), weight.size(-1)};
}

Matrix load(const Window& w) {
  Matrix values(w.rows, w.cols);
  for (std::int64_t r = 0; r < w.rows; ++r)
    for (std::int64_t c = 0; c < w.cols; ++c) values[r][c] = get(w.tensor, w.offset + r * w.row_stride + c);
  return values;
}

void store(const Matrix& values, const Window& w, DType precision) {
  for (std::int64_t r = 0; r < w.rows; ++r)
    for (std::int64_t c = 0; c < w.cols; ++c)
      set(w.tensor, w.offset + r * w.row_stride + c, rounded(values[r][c], precision));
}

void fill(const TensorView& tensor, double value) {
  if (!tensor.defined()) return;
  for_each_index(tensor, [&](const auto& index) { set(tensor, offset_of(tensor, index), value); });
}

void add(std::initializer_list<TensorView> terms, const TensorView& to, DType precision) {
  if (!to.defined()) return;
  for_each_index(to, [&](const auto& index) {
    double sum = 0;
    for (const TensorView& term : terms) sum += get(term, offset_of(term, index));
    set(to, offset_of(to, index), rounded(sum, precision));
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

}  // namespace nsa::reference
