// What is supported by which backend, and the choice among them: decided here and nowhere else.
#include <omp.h>

#include <cstdlib>
#include <string>

#include "core/backend.h"

namespace nsa {
namespace {

Status wish_of_environment(Backend& wish) {
  const char* value = std::getenv("NSA_BACKEND");
  const std::string name = value ? value : "";
  for (Backend backend : {Backend::kAuto, Backend::kReference, Backend::kCPU})
    if (name == name_of(backend)) {
      wish = backend;
      return {};
    }
  wish = Backend::kAuto;
  if (name.empty()) return {};
  return Status::invalid_argument("NSA_BACKEND = '" + name + "': must be auto, cpu or reference");
}

}  // namespace

const char* version() { return NSA_VERSION; }

const char* name_of(Backend backend) {
  switch (backend) {
    case Backend::kAuto:
      return "auto";
    case Backend::kReference:
      return "reference";
    case Backend::kCPU:
      return "cpu";
  }
  return "unknown";
}

Status supports(Backend backend, const Problem& problem) {
  const std::string name = std::string("backend ") + name_of(backend) + ": ";
  if (backend == Backend::kAuto) return Status::invalid_argument(name + "ask choose_backend");
  if (problem.device.type != DeviceType::kCPU)
    return Status::unsupported(name + "tensors on cuda:" + std::to_string(problem.device.index) +
                               ": takes tensors in host memory");
  if (backend == Backend::kReference) return {};
  if (problem.dtype != DType::kFloat32 && problem.dtype != DType::kBFloat16)
    return Status::unsupported(name + name_of(problem.dtype) +
                               ": takes float32 and bfloat16 (the reference backend takes every type)");
  for (std::int64_t dim : {problem.key_dim, problem.value_dim})
    if (dim % 8 != 0)
      return Status::unsupported(name + "head dim " + std::to_string(dim) +
                                 ": takes multiples of 8 (the reference backend takes every head dim)");
  return {};
}

Status choose_backend(const Problem& problem, const Context& context, Backend& chosen) {
  chosen = context.backend;
  if (chosen == Backend::kAuto)
    if (Status status = wish_of_environment(chosen); !status.ok()) return status;
  if (chosen == Backend::kAuto) chosen = Backend::kCPU;
  return supports(chosen, problem);
}

std::string variant_of(Backend backend) {
  return backend == Backend::kReference ? reference::variant() : cpu::variant();
}

std::string describe_instruction_sets() { return cpu::describe_instruction_sets(); }

int default_num_threads() { return omp_get_max_threads(); }

std::string describe_backends() {
  std::string text = std::string("cpu: float32, bfloat16, head dims that are multiples of 8; runs as ") +
                     cpu::variant() + "\nreference: every type and head dim, fp64 loops; runs as " +
                     reference::variant() + "\n";
  const char* wish = std::getenv("NSA_BACKEND");
  Backend chosen;
  if (Status status = choose_backend({}, {}, chosen); !status.ok()) return text + "chosen: none, " + status.message();
  return text + "chosen: " + name_of(chosen) +
         (wish && *wish ? std::string(", NSA_BACKEND = ") + wish : std::string(", NSA_BACKEND is not set"));
}

}  // namespace nsa
