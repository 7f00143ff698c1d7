// The arguments of combine and of its backward, which nsa_attention launches too.
#pragma once

#include "core/backend.h"
#include "cuda/common/params.h"
#include "cuda/common/views.h"

namespace nsa::cuda {

CombineArgs combine_args(const CombineParams& p);
CombineBackwardArgs combine_backward_args(const TensorView& d_o, const TensorView& o_cmp, const TensorView& o_slc,
                                          const TensorView& o_swa, const TensorView& gates, const TensorView& d_gates);

}  // namespace nsa::cuda
