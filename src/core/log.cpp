#include "core/log.h"

#include <cstdio>
#include <cstdlib>
#include <string>

namespace nsa {

void log_call(const char* operation, Backend backend, const char* variant, const Call& call) {
  const char* wish = std::getenv("NSA_LOG");
  if (!wish || !*wish || std::string(wish) == "0") return;
  std::string line = std::string("nsa: ") + operation + " backend=" + name_of(backend) + " variant=" + variant +
                     (call.packed ? " packed" : " batched");
  for (const Argument& argument : call.tensors)
    if (argument.access != Access::kOutput) line += " " + argument.name + "=" + argument.view.describe();
  line += "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);  // one write: lines of several threads stay whole
}

}  // namespace nsa
