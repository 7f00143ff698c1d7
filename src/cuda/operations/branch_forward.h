// The forward of one branch of attention.
#pragma once

#include "cuda/operations/branch.h"
#include "cuda/operations/finite_check.h"

namespace nsa::cuda {

/// Of the last `lse` of packed tensors.
inline constexpr unsigned kMinusInfinity = 0xff800000u;

/// Rows past the last sequence.
Status fill_outputs(const TensorView& o, const TensorView& lse, const Packed& packed, Execution& e);

RangeArgs range_args(const Branch& b, const TensorView& o, const TensorView& lse);

/// The attention of one branch.
template <class Params>
Status forward(const Params& p, Finiteness& values, Execution& e);
extern template Status forward(const CompressedAttentionParams&, Finiteness&, Execution&);
extern template Status forward(const SelectedAttentionParams&, Finiteness&, Execution&);
extern template Status forward(const SlidingWindowAttentionParams&, Finiteness&, Execution&);

}  // namespace nsa::cuda
