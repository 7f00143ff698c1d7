// Names of libnsa's enumerations, as options and files give them.
#pragma once

#include <string>

#include "nsa/operations.h"

namespace nsa::base {

/// "mean", "linear" or "mlp". Throws Error for any other name.
CompressionKind compression_kind(const std::string& name);

}  // namespace nsa::base
