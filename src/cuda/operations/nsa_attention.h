// The three branches and their gated sum, where the window's keys need not be those of the whole sequences.
#pragma once

#include "cuda/operations/nonfinite_guard.h"

namespace nsa::cuda {

/// nsa_attention of packed tensors whose k_swa and v_swa begin behind the first tokens: `window` says where. guard: of
/// v_c, v_slc and v_swa.
Status attend_branches(const NsaAttentionParams& p, const Packed& window, NonfiniteGuard& guard, Execution& e);

}  // namespace nsa::cuda
