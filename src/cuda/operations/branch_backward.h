// The backward of one branch of attention.
#pragma once

#include <optional>

#include "cuda/common/cut_sequences.h"
#include "cuda/operations/branch.h"
#include "cuda/operations/nonfinite_guard.h"
#include "cuda/operations/query_spans.h"

namespace nsa::cuda {

/// A float32 array shaped like lse.
PerRow take_rows(Arena& arena, const TensorView& q);

struct BranchGradients {
  const TensorView &d_q, &d_k, &d_v;
  Strided sum_from, sum_to;  // float32 sums of dQ over branches
};

/// The backward of a branch as its kernels take it.
struct Prepared {
  BackwardArgs args{};
  InverseArgs inverse{};
  sm90::Kernels hopper;
  bool keys = false, selected = false;    // are dK or dV wanted? the branch
  std::optional<std::int64_t> ds_budget;  // for dS, if it goes from d_kv to range_d_q through memory
  const Branch* branch = nullptr;
  const BranchGradients* out = nullptr;
  CutSequences cut;  // of a window of a packed call that has several (StoredSelection)
};

/// The memory for dS if it is to be stored: of the compressed branch, where dQ and dK or dV are wanted.
std::optional<std::int64_t> ds_budget_for(const Branch& b, const TensorView& d_o, bool queries, const TensorView& d_k,
                                          const TensorView& d_v);

/// Takes what the branch needs from the workspace. `ds_budget`: of ds_budget_for. `flag` is set where inputs are not
/// finite. `stored`: of the selection, dK and dV will be made by windows (StoredSelection), except by the fallback.
Prepared prepare(const Branch& b, const TensorView& d_o, const TensorView& lse, PerRow delta, PerRow gate,
                 const BranchGradients& out, std::optional<std::int64_t> ds_budget, bool stored, int* flag,
                 Execution& e);

/// Memory for dK and dV from the workspace. `hopper`: of the kernels of sm90, too.
void take_key_memory(Prepared& x, bool hopper, Arena& arena);

/// The sums of dQ are those of the span already.
Prepared span_of(Prepared x, const QuerySpan& span);

/// dQ of a branch.
Status run_queries(const Prepared& x, Execution& e);

/// dQ of two ranges of the same queries, at once where the same kernel takes both.
Status run_both(const Prepared& compressed, const Prepared& window, Execution& e);

/// dK and dV; of a span of a call whose dS is stored, too.
Status run_keys(const Prepared& x, const Packed& packed, const NSAConfig* compressed, Execution& e);

/// After the windows of the selection, the fallback kernels for inputs that are not finite: dQ; dK and dV, and rows
/// past the end.
Status launch_queries_fallback(const Prepared& x, Execution& e);
Status launch_keys_fallback(const Prepared& x, const Packed& packed, Execution& e);

/// Before the keys of the spans of a call whose dS is stored.
Status begin_spans(const Prepared& x, Execution& e);

/// Backward of one branch on its own: delta first.
template <class Params>
Status single_backward(const Params& p, const TensorView& d_k, const TensorView& d_v, const NSAConfig* compressed,
                       Execution& e);
extern template Status single_backward(const CompressedAttentionBackwardParams&, const TensorView&, const TensorView&,
                                       const NSAConfig*, Execution&);
extern template Status single_backward(const SelectedAttentionBackwardParams&, const TensorView&, const TensorView&,
                                       const NSAConfig*, Execution&);
extern template Status single_backward(const SlidingWindowAttentionBackwardParams&, const TensorView&,
                                       const TensorView&, const NSAConfig*, Execution&);

}  // namespace nsa::cuda
