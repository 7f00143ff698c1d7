// NSA_LOG=1: one line per call on stderr.
#pragma once

#include "core/call.h"
#include "nsa/backend.h"

namespace nsa {

/// "nsa: compressed_attention backend=cpu variant=avx512 batched q=bfloat16 (2, 512, 16, 128) ...". Nothing unless
/// NSA_LOG is set to something other than 0.
void log_call(const char* operation, Backend backend, const char* variant, const Call& call);

}  // namespace nsa
