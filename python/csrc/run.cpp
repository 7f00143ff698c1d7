#include "run.h"

#include <dlfcn.h>
#include <torch/csrc/stable/ops.h>

#include <stdexcept>

namespace nsa::python {
namespace {

using GetStream = AOTITorchError (*)(std::int32_t device, void** stream);

/// Of the stable ABI, but in libtorch_cuda.so, which a torch without CUDA lacks: the extension does not link it, and
/// looks where torch has it loaded (it has, where tensors are on a GPU).
GetStream find_get_stream() {
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  void* symbol = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
  if (!symbol) throw std::runtime_error("tensors on cuda: this torch has no CUDA (libtorch_cuda.so is not loaded)");
  return reinterpret_cast<GetStream>(symbol);
}

}  // namespace

void check(const Status& status) {
  if (status.ok()) return;
  if (status.code() == StatusCode::kInvalidArgument) refuse(status.message());
  const bool unsupported = status.code() == StatusCode::kUnsupported;
  throw std::runtime_error((unsupported ? "not supported: " : "") + status.message());
}

Context context() {
  Context result;
  result.num_threads = static_cast<int>(torch::stable::get_num_threads());
  return result;
}

void* current_stream(std::int32_t device) {
  static const GetStream get_stream = find_get_stream();
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(get_stream(device, &stream));
  return stream;
}

}  // namespace nsa::python
