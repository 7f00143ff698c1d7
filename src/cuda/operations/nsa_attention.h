// The three branches and their gated sum, where the window's keys need not be those of the whole sequences.
#pragma once

#include "cuda/operations/finite_check.h"

namespace nsa::cuda {

/// nsa_attention of packed tensors whose k_swa and v_swa begin behind the first tokens: `window` says where. values: of
/// v_c, v_slc and v_swa.
Status attend_branches(const NsaAttentionParams& p, const Packed& window, Finiteness& values, Execution& e);

}  // namespace nsa::cuda
