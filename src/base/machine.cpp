#include "base/machine.h"

#include <ATen/Context.h>
#include <dlfcn.h>
#include <torch/version.h>

#include <array>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/device.h"
#include "base/error.h"
#include "nsa/backend.h"

namespace nsa::base {

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

std::string driver_version() {
  void* const nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (nvml == nullptr) return "unknown";
  std::array<char, 96> version{};  // NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE: 80
  const auto initialise = reinterpret_cast<int (*)()>(dlsym(nvml, "nvmlInit_v2"));
  const auto read = reinterpret_cast<int (*)(char*, unsigned)>(dlsym(nvml, "nvmlSystemGetDriverVersion"));
  const bool known = initialise && read && initialise() == 0 && read(version.data(), version.size()) == 0;
  return known ? version.data() : "unknown";
}

nlohmann::json machine_json(int threads, at::Device device) {
  Backend backend = Backend::kCUDA;
  if (device.is_cpu()) check(choose_backend({}, {}, backend));
  nlohmann::json machine = {{"cpu", cpu_name()},
                            {"threads", threads},
                            {"isa", variant_of(backend)},
                            {"backend", name_of(backend)},
                            {"torch", TORCH_VERSION}};
  if (device.is_cuda()) {
    machine["gpu"] = gpu_name();
    machine["driver"] = driver_version();
    machine["cuda"] = at::Context::versionCUDART();
    machine["cudnn"] = at::Context::versionCuDNN();
  }
  return machine;
}

}  // namespace nsa::base
