#include "nsa/tensor.h"

#include <algorithm>

namespace nsa {

std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kFloat64:
      return 8;
    case DType::kFloat8E4M3:
      return 1;
  }
  return 0;
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kFloat64:
      return "float64";
    case DType::kInt32:
      return "int32";
    case DType::kFloat8E4M3:
      return "float8_e4m3fn";
  }
  return "unknown";
}

TensorView TensorView::contiguous(void* data, DType dtype, std::initializer_list<std::int64_t> shape, Device device) {
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.device = device;
  view.rank = static_cast<int>(shape.size());
  const int kept = std::min(view.rank, kMaxRank);  // calls refuse a view of more by its rank
  std::copy_n(shape.begin(), kept, view.shape.begin());
  std::int64_t stride = 1;
  for (int i = kept - 1; i >= 0; --i) {
    view.stride[static_cast<std::size_t>(i)] = stride;
    stride *= view.shape[static_cast<std::size_t>(i)];
  }
  return view;
}

std::int64_t TensorView::numel() const {
  std::int64_t n = 1;
  for (int i = 0; i < std::min(rank, kMaxRank); ++i) n *= size(i);
  return n;
}

bool TensorView::is_contiguous() const {
  std::int64_t expected = 1;
  for (int i = std::min(rank, kMaxRank) - 1; i >= 0; --i) {
    if (size(i) != 1 && stride[static_cast<std::size_t>(i)] != expected) return false;
    expected *= size(i);
  }
  return true;
}

std::string TensorView::describe() const {
  if (!defined()) return "no tensor";
  if (rank > kMaxRank) return std::string(name_of(dtype)) + " of rank " + std::to_string(rank);
  std::string text = std::string(name_of(dtype)) + " (";
  for (int i = 0; i < rank; ++i) text += (i ? ", " : "") + std::to_string(size(i));
  return text + ")";
}

}  // namespace nsa
