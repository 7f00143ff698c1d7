// What the choice of a backend asks of a call beyond its Problem.
#pragma once

#include <cstdint>
#include <optional>

#include "core/call.h"
#include "nsa/status.h"

namespace nsa {

/// Whether the CUDA backend can read tensors laid out like this: rows of 16-byte vectors. Unsupported names the tensor.
Status supports_layout(const Call& call);

/// Whether the CUDA backend has shared memory for rows of `topk` selected blocks.
Status supports_topk(const Problem& problem, std::int64_t topk, bool backward);

/// The environment variable NSA_CUDA_DS_MIB in bytes, if it is set to a number.
std::optional<std::int64_t> wanted_d_s_bytes();

}  // namespace nsa
