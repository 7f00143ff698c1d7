// The forward of one branch of attention.
#pragma once

#include "cuda/operations/branch.h"
#include "cuda/operations/nonfinite_guard.h"

namespace nsa::cuda {

/// Of the last `lse` of packed tensors.
inline constexpr unsigned kMinusInfinity = 0xff800000u;

/// Rows past the last sequence.
Status fill_outputs(const TensorView& o, const TensorView& lse, const Packed& packed, Execution& e);

RangeArgs range_args(const Branch& b, const TensorView& o, const TensorView& lse);

/// The attention of one branch without its fallback (guard.launch_fallback()).
template <class Params>
Status launch_forward(const Params& p, NonfiniteGuard& guard, Execution& e);
extern template Status launch_forward(const CompressedAttentionParams&, NonfiniteGuard&, Execution&);
extern template Status launch_forward(const SelectedAttentionParams&, NonfiniteGuard&, Execution&);
extern template Status launch_forward(const SlidingWindowAttentionParams&, NonfiniteGuard&, Execution&);

/// All of it. `value`: that of the branch.
template <class Params>
Status forward(const Params& p, const TensorView& value, Execution& e) {
  NonfiniteGuard guard({value}, e);
  if (Status s = launch_forward(p, guard, e); !s.ok()) return s;
  return guard.launch_fallback();
}

}  // namespace nsa::cuda
