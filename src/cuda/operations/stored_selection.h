// The backward of the selection with its dS in memory on the way from dK and dV to dQ: a window of the queries at a
// time (SelectedDs), by kernels of sm90.
#pragma once

#include <vector>

#include "cuda/operations/branch_backward.h"

namespace nsa::cuda {

class StoredSelection {
 public:
  /// Without windows dS is not stored: the branch is another one, not both of dQ and of dK or dV are wanted, there are
  /// no such kernels, or too little memory.
  StoredSelection() = default;
  StoredSelection(const Branch& b, const TensorView& d_o, bool queries, const TensorView& d_k, const TensorView& d_v);

  explicit operator bool() const { return !windows_.empty(); }
  const std::vector<QuerySpan>& windows() const { return windows_; }

  /// Takes what outlives a window.
  void take_sums(Arena& arena);
  /// Before the first window.
  Status begin(Execution& e) const;
  /// Makes `arena`, which has memory for `whole` behind `rest`, large enough for each of the windows there.
  void take_windows(const Prepared& whole, const Arena& rest, Arena& arena) const;
  /// A window of the whole branch, with memory of its own.
  Prepared window(const Prepared& whole, const QuerySpan& span, Arena& arena) const;
  /// dK and dV of a window, added to those of the windows before, and its dS.
  Status run_keys(const Prepared& window, Execution& e) const;
  /// dQ of a window, or of a span of it.
  Status run_queries(const Prepared& window, Execution& e) const;

 private:
  Geometry whole_;
  std::vector<QuerySpan> windows_;
  Strided sums_;
  std::int64_t floats_ = 0;  // of sums_; 0: no sequence is in several windows
};

}  // namespace nsa::cuda
