// Single elements of tensors of any dtype and strides: for the oracle, comparisons and tests, not for speed.
#pragma once

#include <array>
#include <cstdint>

#include "core/half.h"
#include "nsa/tensor.h"

namespace nsa {

using Index = std::array<std::int64_t, TensorView::kMaxRank>;

/// Elements between the start of a tensor's data and one of its elements.
inline std::int64_t offset_of(const TensorView& tensor, const Index& index) {
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(tensor.rank); ++i) offset += index[i] * tensor.stride[i];
  return offset;
}

/// Calls f(index) for every element of a tensor's shape, in row-major order.
template <class F>
void for_each_index(const TensorView& shape, F&& f) {
  Index index{};
  for (std::int64_t n = shape.numel(); n > 0; --n) {
    f(index);
    for (int i = shape.rank - 1; i >= 0; --i) {
      const auto dim = static_cast<std::size_t>(i);
      if (++index[dim] < shape.shape[dim]) break;
      index[dim] = 0;
    }
  }
}

inline double get_element(const TensorView& tensor, std::int64_t offset) {
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
    case DType::kFloat8E4M3:
      return to_float(tensor.as<const Float8E4M3>()[offset]);
  }
  return 0;
}

/// x as `dtype` holds it, rounded once to nearest even (float64 and int32: unchanged; e4m3 saturates).
double rounded(double x, DType dtype);

inline void set_element(const TensorView& tensor, std::int64_t offset, double value) {
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
    case DType::kFloat8E4M3:
      tensor.as<Float8E4M3>()[offset] = to_float8_e4m3(static_cast<float>(x));
      break;
  }
}

}  // namespace nsa
