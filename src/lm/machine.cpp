#include "lm/machine.h"

#include <ATen/Context.h>
#include <torch/version.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "lm/device.h"
#include "lm/ops.h"
#include "nsa/backend.h"

namespace nsa::lm {

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
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
    machine["cuda"] = at::Context::versionCUDART();
    machine["cudnn"] = at::Context::versionCuDNN();
  }
  return machine;
}

}  // namespace nsa::lm
