// The public functions: validate, choose the backend, log, run.
#include <cstdlib>
#include <string>

#include "core/backend.h"

namespace nsa {
namespace {

/// NSA_BACKEND and the context's wish, resolved.
Status choose_backend(const Context& context, Backend& chosen) {
  chosen = context.backend;
  if (chosen == Backend::kAuto) {
    const char* wish = std::getenv("NSA_BACKEND");
    const std::string name = wish ? wish : "auto";
    if (name == "reference") {
      chosen = Backend::kReference;
    } else if (name == "cpu" || name == "auto" || name.empty()) {
      chosen = Backend::kCPU;
    } else {
      return Status::invalid_argument("NSA_BACKEND = '" + name + "': must be auto, cpu or reference");
    }
  }
  return {};
}

}  // namespace

#define NSA_DEFINE(name, Params)                                                                           \
  Status name(const Params& params, const Context& context) {                                              \
    Backend backend;                                                                                       \
    if (Status s = choose_backend(context, backend); !s.ok()) return s;                                    \
    return backend == Backend::kReference ? reference::name(params, context) : cpu::name(params, context); \
  }
NSA_BACKEND_OPERATIONS(NSA_DEFINE)
#undef NSA_DEFINE

}  // namespace nsa
