// NSA_DUMP=folder: every call leaves its inputs in a file, for `nsa debug compare` or anything that reads safetensors.
#pragma once

#include "core/call.h"
#include "nsa/status.h"

namespace nsa {

/// Writes folder/PROCESS-NNNNNN-operation.safetensors, never over a file or link that is there: the tensors that the
/// call reads, contiguous, under the names of its parameters ("k_slc", "weights.w1", "cache.block_table"), a backward's
/// forward without a prefix; in __metadata__ "operation", "layout" (batched or packed) and every scalar parameter under
/// its name, as decimal text. Nothing unless NSA_DUMP is set.
Status dump(const char* operation, const Call& call);

}  // namespace nsa
