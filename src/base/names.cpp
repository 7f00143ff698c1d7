#include "base/names.h"

#include <fmt/core.h>

#include "base/error.h"

namespace nsa::base {

CompressionKind compression_kind(const std::string& name) {
  for (const auto kind : {CompressionKind::kMean, CompressionKind::kLinear, CompressionKind::kMlp}) {
    if (name == name_of(kind)) return kind;
  }
  throw Error(fmt::format("phi = '{}': must be mean, linear or mlp", name));
}

}  // namespace nsa::base
