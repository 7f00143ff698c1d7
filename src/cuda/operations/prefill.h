// A chunk of the prompt on Hopper: the kernels of a forward pass, over what the chunk sees of the cache side by side.
#pragma once

#include "core/backend.h"
#include "cuda/common/cache.cuh"

namespace nsa::cuda {

/// Whether the chunk is served so.
bool gathers_chunk(const DecodeParams& p, const StepGeometry& geometry);

/// Where a step finds keys and values. Selected and compressed ones of the step itself are in the cache already.
struct ChunkTokens {
  CachedTokens k_slc, v_slc, k_c, v_c, k_swa, v_swa;
};

/// The attention of all queries of the chunk. The plan has been made.
Status attend_chunk(const DecodeParams& p, const StepGeometry& geometry, const ChunkTokens& tokens, Execution& e);

}  // namespace nsa::cuda
