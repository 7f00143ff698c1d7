#include "bridge/call.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <stdexcept>
#include <string>

namespace nsa::bridge {
namespace {

DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    case at::kDouble:
      return DType::kFloat64;
    case at::kInt:
      return DType::kInt32;
    case at::kFloat8_e4m3fn:
      return DType::kFloat8E4M3;
    default:
      throw std::runtime_error(std::string("libnsa has no dtype ") + c10::toString(tensor.scalar_type()));
  }
}

}  // namespace

TensorView view_of(const at::Tensor& tensor) {
  TensorView view;
  if (!tensor.defined()) return view;
  TORCH_CHECK(tensor.dim() <= TensorView::kMaxRank, "a tensor of rank ", tensor.dim(), ": calls take at most ",
              TensorView::kMaxRank);
  view.data = tensor.data_ptr();
  view.dtype = dtype_of(tensor);
  if (tensor.is_cuda()) view.device = {DeviceType::kCUDA, tensor.get_device()};
  view.rank = static_cast<int>(tensor.dim());
  for (int i = 0; i < view.rank; ++i) {
    view.shape[static_cast<std::size_t>(i)] = tensor.size(i);
    view.stride[static_cast<std::size_t>(i)] = tensor.stride(i);
  }
  return view;
}

void* current_stream(at::Device device) {
  return c10::impl::getDeviceGuardImpl(device.type())->getStream(device).native_handle();
}

void check_launch(int error, const char* kernel) { TORCH_CHECK(error == 0, kernel, ": CUDA error ", error); }

Context with_workspace(Context context, at::Device device, std::size_t bytes, at::Tensor& memory) {
  memory = at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions(device).dtype(at::kByte));
  context.stream = current_stream(device);
  context.workspace = memory.mutable_data_ptr();
  context.workspace_size = bytes;
  return context;
}

}  // namespace nsa::bridge
