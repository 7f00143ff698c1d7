// What is supported by which backend, and the choice among them: decided here and nowhere else.
#include <omp.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string>

#include "core/backend.h"
#include "core/support.h"
#include "nsa/version.h"

namespace nsa {
namespace {

Status wish_of_environment(Backend& wish) {
  const char* value = std::getenv("NSA_BACKEND");
  const std::string name = value ? value : "";
  for (Backend backend : {Backend::kAuto, Backend::kReference, Backend::kCPU, Backend::kCUDA})
    if (name == name_of(backend)) {
      wish = backend;
      return {};
    }
  wish = Backend::kAuto;
  if (name.empty()) return {};
  return Status::invalid_argument("NSA_BACKEND = '" + name + "': must be auto, cpu, cuda or reference");
}

Status supports_cpu(const std::string& name, const Problem& problem) {
  if (problem.dtype != DType::kFloat32 && problem.dtype != DType::kBFloat16)
    return Status::unsupported(name + name_of(problem.dtype) +
                               ": takes float32 and bfloat16 (the reference backend takes every type)");
  for (std::int64_t dim : {problem.key_dim, problem.value_dim})
    if (dim % 8 != 0)
      return Status::unsupported(name + "head dim " + std::to_string(dim) +
                                 ": takes multiples of 8 (the reference backend takes every head dim)");
  return cpu::usable();
}

Status supports_cuda(const std::string& name, const Problem& problem) {
  const char* value = std::getenv("NSA_CUDA_KERNELS");
  if (const std::string wish = value ? value : ""; !wish.empty() && wish != "auto" && wish != "portable")
    return Status::invalid_argument("NSA_CUDA_KERNELS = '" + wish + "': must be auto or portable");
  const char* invariant = std::getenv("NSA_BATCH_INVARIANT");
  if (const std::string wish = invariant ? invariant : ""; !wish.empty() && wish != "0" && wish != "1")
    return Status::invalid_argument("NSA_BATCH_INVARIANT = '" + wish + "': must be 0 or 1");
  if (const char* mib = std::getenv("NSA_CUDA_DS_MIB"); mib && *mib && !wanted_d_s_bytes())
    return Status::invalid_argument("NSA_CUDA_DS_MIB = '" + std::string(mib) + "': must be a number from 0 to 1048576");
  if (Status status = cuda::usable(problem.device.index); !status.ok()) return status;
  if (problem.dtype == DType::kFloat64)
    return Status::unsupported(name + "float64: takes float32, bfloat16 and float16");
  const std::int64_t k = problem.key_dim, v = problem.value_dim;
  const bool head_dims = k == 0 || (k == 64 && (v == 64 || v == 0)) || (k == 128 && (v == 128 || v == 0)) ||
                         (k == 192 && (v == 128 || v == 0));
  const std::string dims =
      (k ? "Dk = " + std::to_string(k) : "") + (k && v ? ", " : "") + (v ? "Dv = " + std::to_string(v) : "");
  if (!head_dims) return Status::unsupported(name + "head dims " + dims + ": takes 64/64, 128/128 and 192/128");
  if (k == 0 && v % 8 != 0)
    return Status::unsupported(name + "head dim " + std::to_string(v) + ": takes multiples of 8");
  if (!cuda::built(problem))
    return Status::unsupported(name + name_of(problem.dtype) + ", " + dims +
                               ": this build has no kernels for it (NSA_CUDA_INSTANCES, NSA_CUDA_HEAD_DIMS)");
  return {};
}

}  // namespace

std::optional<std::int64_t> wanted_d_s_bytes() {
  const char* value = std::getenv("NSA_CUDA_DS_MIB");
  if (!value) return {};
  const char* const end = value + std::strlen(value);
  std::int64_t mib = 0;
  const auto [behind, error] = std::from_chars(value, end, mib);
  if (error != std::errc() || behind != end || mib < 0 || mib > 1 << 20) return {};
  return mib << 20;
}

const char* version() { return NSA_VERSION; }

const char* name_of(Backend backend) {
  switch (backend) {
    case Backend::kAuto:
      return "auto";
    case Backend::kReference:
      return "reference";
    case Backend::kCPU:
      return "cpu";
    case Backend::kCUDA:
      return "cuda";
  }
  return "unknown";
}

Status supports(Backend backend, const Problem& problem) {
  const std::string name = std::string("backend ") + name_of(backend) + ": ";
  if (backend == Backend::kAuto) return Status::invalid_argument(name + "ask choose_backend");
  if (backend != Backend::kReference && backend != Backend::kCPU && backend != Backend::kCUDA)
    return Status::invalid_argument("backend = " + std::to_string(static_cast<int>(backend)) +
                                    ": must be kAuto, kReference, kCPU or kCUDA");
  if (problem.dtype == DType::kFloat8E4M3)
    return Status::unsupported(name + name_of(problem.dtype) + ": a cache may store it, no operation computes in it");
  const bool on_device = problem.device.type == DeviceType::kCUDA;
  if (on_device != (backend == Backend::kCUDA))
    return Status::unsupported(name + "tensors on " +
                               (on_device ? "cuda:" + std::to_string(problem.device.index) : std::string("the cpu")) +
                               (on_device ? ": takes tensors in host memory" : ": takes tensors on a CUDA device"));
  if (backend == Backend::kReference) return {};
  return backend == Backend::kCUDA ? supports_cuda(name, problem) : supports_cpu(name, problem);
}

Status supports_layout(const Call& call) {
  for (const Argument& argument : call.tensors) {
    const TensorView& t = argument.view;
    // gates (..., 3) are read one by one; int32, lse (of any branch) and the rotation's angles too.
    const bool one_by_one = argument.name.starts_with("lse") || argument.name.starts_with("rope_");
    const bool of_elements = t.dtype == call.problem.dtype || t.dtype == DType::kFloat8E4M3;
    if (!of_elements || t.size(-1) <= 3 || t.numel() == 0 || one_by_one) continue;
    const auto item = static_cast<std::int64_t>(size_of(t.dtype));
    bool aligned = reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0;
    const bool plain = t.stride[static_cast<std::size_t>(t.rank - 1)] == 1;  // else it is copied first
    for (int i = 0; plain && i + 1 < t.rank; ++i)
      aligned = aligned && (t.size(i) == 1 || t.stride[static_cast<std::size_t>(i)] * item % 16 == 0);
    if (!aligned)
      return Status::unsupported("backend cuda: " + argument.name + ": " + t.describe() +
                                 ": every row must begin at a multiple of 16 bytes");
  }
  return {};
}

Status supports_topk(const Problem& problem, std::int64_t topk, bool backward) {
  const std::int64_t most = cuda::max_topk(problem, backward);
  if (topk <= most) return {};
  return Status::unsupported("backend cuda: topk = " + std::to_string(topk) + ": must be at most " +
                             std::to_string(most) + (backward ? " in the backward" : "") + " on this device for " +
                             name_of(problem.dtype) + " and head dims " + std::to_string(problem.key_dim) + "/" +
                             std::to_string(problem.value_dim));
}

Status choose_backend(const Problem& problem, const Context& context, Backend& chosen) {
  chosen = context.backend;
  if (chosen == Backend::kAuto)
    if (Status status = wish_of_environment(chosen); !status.ok()) return status;
  if (chosen == Backend::kAuto) chosen = problem.device.type == DeviceType::kCUDA ? Backend::kCUDA : Backend::kCPU;
  return supports(chosen, problem);
}

std::string variant_of(Backend backend) {
  return backend == Backend::kReference ? reference::variant()
         : backend == Backend::kCUDA    ? cuda::variant()
                                        : cpu::variant();
}

std::string describe_devices() { return cuda::describe_devices(); }

int device_count() { return cuda::device_count(); }

std::string describe_kernels(const KernelQuery& query) {
  if (query.num_kv_heads < 1 || query.num_heads < 1 || query.num_heads % query.num_kv_heads != 0)
    return "num_kv_heads = " + std::to_string(query.num_kv_heads) +
           ": must divide num_heads = " + std::to_string(query.num_heads);
  return cuda::describe_kernels(query);
}

std::string describe_instruction_sets() { return cpu::describe_instruction_sets(); }

int default_num_threads() { return omp_get_max_threads(); }

std::string describe_backends() {
  const Status gpu = cuda::available();
  std::string text = std::string("cpu: float32, bfloat16, head dims that are multiples of 8; runs as ") +
                     cpu::variant() + "\ncuda: float32, bfloat16, float16, head dims 64/64, 128/128, 192/128; " +
                     (gpu.ok() ? std::string("runs as ") + cuda::variant() : "cannot run: " + gpu.message()) +
                     "\nreference: every type and head dim, fp64 loops; runs as " + reference::variant() + "\n";
  const char* wish = std::getenv("NSA_BACKEND");
  const std::string because =
      wish && *wish ? std::string(", NSA_BACKEND = ") + wish : std::string(", NSA_BACKEND is not set");
  const auto choice = [&](const Device& device) {
    Backend chosen = Backend::kAuto;
    const Status status = choose_backend({.device = device}, {}, chosen);
    return status.ok() ? name_of(chosen) + because : "none, " + status.message();
  };
  text += "chosen: " + choice({});
  return gpu.ok() ? text + "\nchosen for tensors on a GPU: " + choice({DeviceType::kCUDA, 0}) : text;
}

}  // namespace nsa
