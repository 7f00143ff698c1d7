#include "lm/machine.h"

#include <fstream>
#include <nlohmann/json.hpp>

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

nlohmann::json machine_json(int threads) {
  Backend backend;
  check(choose_backend({}, {}, backend));
  return {{"cpu", cpu_name()}, {"threads", threads}, {"isa", variant_of(backend)}, {"backend", name_of(backend)}};
}

}  // namespace nsa::lm
