// Names of libnsa's enumerations, as options and files give them.
#pragma once

#include <string>

#include <fmt/core.h>

#include "base/error.h"
#include "nsa/operations.h"

namespace nsa::base {

/// "mean", "linear" or "mlp". Throws Error for any other name.
inline CompressionKind compression_kind(const std::string& name) {
  for (const auto kind : {CompressionKind::kMean, CompressionKind::kLinear, CompressionKind::kMlp}) {
    if (name == name_of(kind)) return kind;
  }
  throw Error(fmt::format("phi = '{}': must be mean, linear or mlp", name));
}

}  // namespace nsa::base
