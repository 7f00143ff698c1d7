#include "base/device.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <fmt/core.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "nsa/backend.h"

namespace nsa::base {
namespace {

/// Why libnsa or LibTorch cannot use a device; empty if both can. libtorch_cuda.so, which registers torch's CUDA
/// kernels when it is loaded, is loaded only here: it would take 0.2 s of every start.
std::string unsupported_reason() {
  if (device_count() == 0) {
    const std::string lines = describe_devices(), why = lines.substr(0, lines.find('\n'));
    return why.starts_with("none: ") ? why.substr(6) : why;
  }
  Status status;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    Backend backend;
    status = choose_backend({.dtype = dtype, .device = {DeviceType::kCUDA, 0}, .key_dim = 0}, {}, backend);
    if (status.ok()) break;
  }
  if (!status.ok()) return status.message();
  if (dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    return fmt::format("LibTorch has no CUDA: {}", dlerror());
  }
  return at::hasCUDA() ? "" : "LibTorch finds no CUDA device";
}

}  // namespace

std::string gpu_name() {
  const std::string lines = describe_devices(), line = lines.substr(0, lines.find('\n'));
  return line.starts_with("cuda:0 ") ? line.substr(7) : line;
}

namespace {

/// What libnsa reads from the environment is the user's to mend, before the work begins.
void check_environment() {
  Backend backend;
  const Problem any{.dtype = DType::kFloat32, .device = {DeviceType::kCPU, 0}, .key_dim = 0};
  if (const Status status = choose_backend(any, {}, backend); status.code() == StatusCode::kInvalidArgument) {
    throw Error(status.message());
  }
  const char* const folder = std::getenv("NSA_DUMP");
  if (folder != nullptr && *folder != 0 && ::access(folder, W_OK | X_OK) != 0) {
    throw Error(fmt::format("NSA_DUMP = '{}': must be a folder that can be written: {}", folder, std::strerror(errno)));
  }
}

}  // namespace

DeviceChoice choose_device(const std::string& wish) {
  check_environment();
  const auto check_name = [](const std::string& from, const std::string& name) {
    if (name != "auto" && name != "cpu" && name != "cuda") {
      throw Error(fmt::format("{} = '{}': must be auto, cpu or cuda", from, name));
    }
  };
  check_name("device", wish);
  const char* const variable = std::getenv("NSA_DEVICE");
  const std::string said = variable != nullptr && *variable != 0 ? variable : "auto";
  check_name("NSA_DEVICE", said);
  const bool by_variable = wish == "auto" && said != "auto";
  const std::string name = by_variable ? said : wish;
  const std::string why = by_variable ? fmt::format("NSA_DEVICE = {}", name) : name == "auto" ? "auto" : "--device";
  if (name == "cpu") return {at::kCPU, fmt::format("cpu ({})", why)};
  const std::string not_cuda = unsupported_reason();
  if (not_cuda.empty()) return {at::Device(at::kCUDA, 0), fmt::format("cuda:0 {} ({})", gpu_name(), why)};
  if (name == "cuda") throw Error(fmt::format("device = cuda: {}", not_cuda));
  return {at::kCPU, fmt::format("cpu ({}; cuda: {})", why, not_cuda)};
}

int set_threads(int threads) {
  const int wanted = threads == 0 ? at::get_num_threads() : threads;
  if (wanted < 1 || wanted > kMaxThreads) {
    throw Error(fmt::format("threads = {}: must be 1 ... {}", wanted, kMaxThreads));
  }
  if (threads > 0) at::set_num_threads(threads);
  return wanted;
}

void make_torch_deterministic(at::Device device) {
  if (!device.is_cuda()) return;
  // cuBLAS repeats its results with a workspace of a fixed size, which torch insists on; read at its first product.
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  auto& context = at::globalContext();
  context.setDeterministicAlgorithms(true, /*warn_only=*/false);
  context.setDeterministicFillUninitializedMemory(false);  // costs time; nothing here reads uninitialized memory
}

at::Tensor upload(const at::Tensor& host, at::Device device) {
  if (!device.is_cuda()) return host;
  return host.pin_memory().to(device, host.scalar_type(), /*non_blocking=*/true);
}

}  // namespace nsa::base
