// What the choice of a backend asks of a call beyond its Problem.
#pragma once

#include "core/call.h"
#include "nsa/status.h"

namespace nsa {

/// Whether the CUDA backend can read tensors laid out like this: rows of 16-byte pieces. Unsupported names the tensor.
Status supports_layout(const Call& call);

}  // namespace nsa
