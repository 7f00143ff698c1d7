// The forward of one branch of attention.
#pragma once

#include "cuda/common/fill.h"
#include "cuda/operations/branch.h"
#include "cuda/operations/nonfinite_guard.h"

namespace nsa::cuda {

RangeArgs range_args(const Branch& b, const TensorView& o, const TensorView& lse);

/// The attention of one branch without its fallback (guard.launch_fallback()), and without packed rows past the last
/// sequence.
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
  if (!e.arena.measuring())
    if (Status s = fill({{p.o, 0}, {p.lse, kMinusInfinity}}, p.packed.cu_seqlens_q, nullptr, e.stream); !s.ok())
      return s;
  return guard.launch_fallback();
}

}  // namespace nsa::cuda
