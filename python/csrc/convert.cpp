#include "convert.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

namespace nsa::python {
namespace {

/// Undefined for a type that the stable ABI does not know (float4, bits), where Tensor::scalar_type() throws.
ScalarType scalar_type_of(const Tensor& tensor) {
  try {
    return tensor.scalar_type();
  } catch (const std::exception&) {
    return ScalarType::Undefined;
  }
}

DType dtype_of(const Tensor& tensor, const char* name) {
  const ScalarType type = scalar_type_of(tensor);
  switch (type) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::Int:
      return DType::kInt32;
    case ScalarType::Float8_e4m3fn:
      return DType::kFloat8E4M3;
    default:
      refuse(
          std::string(name) + ": dtype " + torch::headeronly::toString(type) +
          ": must be float32, bfloat16, float16 or float64, int32 for indices, lengths and tables, or float8_e4m3fn in "
          "a cache");
  }
}

std::string text_of(const Shape& shape) {
  std::string text;
  for (std::int64_t size : shape) text += (text.empty() ? "(" : ", ") + std::to_string(size);
  return text.empty() ? "()" : text + ")";
}

/// A storage can be made smaller than the tensors on it (untyped_storage().resize_()), and an offset or strides may
/// lead past 64 bits.
void expect_within_storage(const Tensor& tensor, const TensorView& view, const char* name) {
  if (view.numel() == 0) return;
  std::int64_t bytes = 0, end = tensor.storage_offset();
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
  bool fits = !__builtin_add_overflow(end, 1, &end);
  for (std::size_t i = 0; i < static_cast<std::size_t>(view.rank); ++i) {
    std::int64_t length = 0;
    fits = fits && !__builtin_mul_overflow(view.shape[i] - 1, view.stride[i], &length) &&
           !__builtin_add_overflow(end, length, &end);
  }
  fits = fits && !__builtin_mul_overflow(end, static_cast<std::int64_t>(size_of(view.dtype)), &end);
  if (!fits || end > bytes)
    refuse(std::string(name) + ": " + view.describe() + ": needs " + (fits ? std::to_string(end) : "more than 2^63") +
           " bytes of its storage's " + std::to_string(bytes));
}

/// torch hands None over as an undefined tensor, whose size and memory crash some versions.
const Tensor& given(const Tensor& tensor, const char* name = "a tensor") {
  if (!tensor.defined()) throw std::runtime_error(std::string(name) + ": None: must be a tensor");
  return tensor;
}

TensorView view(const Tensor& tensor, void* data, const char* name) {
  TensorView result;
  const std::int64_t rank = tensor.dim();
  if (rank < 1 || rank > TensorView::kMaxRank)
    refuse(std::string(name) + ": " + std::to_string(rank) + " dimensions: must be 1 to " +
           std::to_string(TensorView::kMaxRank));
  result.data = data;
  result.dtype = dtype_of(tensor, name);
  if (tensor.is_cuda()) result.device = {DeviceType::kCUDA, tensor.get_device_index()};
  result.rank = static_cast<int>(rank);
  for (int i = 0; i < result.rank; ++i) {
    result.shape[static_cast<std::size_t>(i)] = tensor.size(i);
    result.stride[static_cast<std::size_t>(i)] = tensor.stride(i);
    if (tensor.size(i) > std::numeric_limits<std::int32_t>::max())  // before outputs of such a size are made
      refuse(std::string(name) + ": " + text_of(shape_of(tensor)) + ": sizes must be below 2^31");
  }
  expect_within_storage(tensor, result, name);
  return result;
}

}  // namespace

TensorView input(const Tensor& tensor, const char* name) {
  return view(tensor, const_cast<void*>(given(tensor, name).const_data_ptr()),
              name);  // operations only read their inputs
}

TensorView input(const OptionalTensor& tensor, const char* name) {
  return tensor ? input(*tensor, name) : TensorView{};
}

TensorView output(const Tensor& tensor, const char* name) {
  return view(tensor, given(tensor, name).mutable_data_ptr(), name);
}

TensorView output(const OptionalTensor& tensor, const char* name) {
  return tensor ? output(*tensor, name) : TensorView{};
}

Shape shape_of(const Tensor& tensor) { return {given(tensor).sizes().begin(), tensor.sizes().end()}; }

Tensor make(const Tensor& like, const Shape& shape, std::optional<ScalarType> dtype) {
  // By the C shim, which spares the way through the dispatcher.
  given(like);
  Shape strides(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0; stride *= std::max<std::int64_t>(shape[i], 1)) strides[i] = stride;
  std::int32_t type = 0, device_type = 0, device = 0;
  if (dtype) {
    type = torch::stable::detail::to<std::int32_t>(torch::stable::detail::from(*dtype));
  } else {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &type));
  }
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device));
  AtenTensorHandle result = nullptr;
  if (aoti_torch_empty_strided(static_cast<std::int64_t>(shape.size()), shape.data(), strides.data(), type, device_type,
                               device, &result) != AOTI_TORCH_SUCCESS)
    throw std::runtime_error("out of memory: cannot allocate a tensor of the shape " + text_of(shape));
  return Tensor(result);
}

Tensor make_o(const Tensor& q, const Tensor& v) {
  Shape shape = shape_of(q);
  if (!shape.empty() && v.dim() > 0) shape.back() = v.size(v.dim() - 1);
  return make(q, shape);
}

Tensor make_lse(const Tensor& q) {
  Shape shape = shape_of(q);
  if (shape.size() >= 2) shape.pop_back();
  if (shape.size() >= 2) std::swap(shape[shape.size() - 1], shape[shape.size() - 2]);
  return make(q, shape, ScalarType::Float);
}

Tensor make_indices(const Tensor& q, const Tensor& k_c, const NSAConfig& cfg) {
  Shape shape = shape_of(q);
  if (shape.size() >= 2 && k_c.dim() >= 2) {
    shape[shape.size() - 2] = k_c.size(k_c.dim() - 2);
    shape[shape.size() - 1] = cfg.topk;
  }
  return make(q, shape, ScalarType::Int);
}

void expect_needs(const std::vector<bool>& needs, std::size_t count) {
  if (needs.size() != count)
    refuse("needs: " + std::to_string(needs.size()) + " values: must be " + std::to_string(count));
}

NSAConfig config_of(const std::vector<std::int64_t>& cfg) {
  NSAConfig config;
  int* const members[] = {&config.kernel_size, &config.kernel_stride, &config.block_size, &config.topk,
                          &config.init_blocks, &config.local_blocks,  &config.window_size};
  if (cfg.size() != std::size(members))
    refuse("cfg: " + std::to_string(cfg.size()) + " values: must be the " + std::to_string(std::size(members)) +
           " members of NSAConfig");
  for (std::size_t i = 0; i < cfg.size(); ++i) {
    if (cfg[i] < std::numeric_limits<int>::min() || cfg[i] > std::numeric_limits<int>::max())
      refuse("cfg: " + std::to_string(cfg[i]) + ": must fit into 32 bits");
    *members[i] = static_cast<int>(cfg[i]);
  }
  return config;
}

Shape compressed_shape(const Tensor& k, const NSAConfig& cfg, bool packed) {
  Shape shape = shape_of(k);
  const std::size_t rows = packed ? 0 : 1;
  if (shape.size() > rows) shape[rows] = cfg.compressed_rows(shape[rows], packed);
  return shape;
}

void refuse(const std::string& message) { throw std::invalid_argument("invalid argument: " + message); }

}  // namespace nsa::python
