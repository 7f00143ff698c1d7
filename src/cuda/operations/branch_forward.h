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

/// The attention of one branch, but for what stands in for it (values.stand_in()).
template <class Params>
Status launch_forward(const Params& p, Finiteness& values, Execution& e);
extern template Status launch_forward(const CompressedAttentionParams&, Finiteness&, Execution&);
extern template Status launch_forward(const SelectedAttentionParams&, Finiteness&, Execution&);
extern template Status launch_forward(const SlidingWindowAttentionParams&, Finiteness&, Execution&);

/// All of it. `value`: that of the branch.
template <class Params>
Status forward(const Params& p, const TensorView& value, Execution& e) {
  Finiteness values({value}, e);
  if (Status s = launch_forward(p, values, e); !s.ok()) return s;
  return values.stand_in();
}

}  // namespace nsa::cuda
