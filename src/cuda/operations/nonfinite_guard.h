// Kernels that require finite values: the scan before them and the fallback behind them.
#pragma once

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "cuda/common/nonfinite.h"
#include "cuda/common/views.h"

namespace nsa::cuda {

inline Checked checked(const TensorView& t) {
  const Rows r = rows_of(t, 2);
  return {.t = strided(t),
          .rows = static_cast<std::int64_t>(r.batches) * r.rows,
          .rows_per_batch = std::max(r.rows, 1),
          .heads = to_int(t.size(-2)),
          .columns = to_int(t.size(-1))};
}

/// For kernels that require finite values: a device flag that is set where there are others. The first kernel that
/// needs it scans the values of all branches. The fallback kernels, which work only where the flag is set, are launched
/// behind all kernels that require finite values, one after the other.
class NonfiniteGuard {
 public:
  NonfiniteGuard(std::initializer_list<TensorView> values, Execution& e) : dtype_(values.begin()->dtype) {
    inputs_.flag = e.arena.take<int>(1);
    const TensorView* before = nullptr;
    Checked* next = inputs_.tensors;
    for (const TensorView& t : values) {
      const bool again = before && t.data == before->data && t.stride == before->stride;
      if (!again) *next++ = checked(t);
      before = &t;
    }
  }

  /// Another kernel scans the values and sets `flag` before the first kernel that reads it.
  explicit NonfiniteGuard(int* flag) : scanned_(true) { inputs_.flag = flag; }

  int* flag() const { return inputs_.flag; }
  Status scan(Execution& e) {
    if (scanned_) return {};
    scanned_ = true;
    return status_of(find_nonfinite(dtype_, inputs_, e.stream), "find_nonfinite");
  }

  /// Defers a launch until launch_fallback().
  void defer(std::function<Status()> launch) { deferred_.push_back(std::move(launch)); }
  /// Must come before anything that reads results without reading the flag.
  Status launch_fallback() {
    for (const auto& launch : std::exchange(deferred_, {}))
      if (Status s = launch(); !s.ok()) return s;
    return {};
  }

 private:
  DType dtype_ = DType::kBFloat16;
  NonfiniteArgs inputs_{};
  bool scanned_ = false;
  std::vector<std::function<Status()>> deferred_;
};

}  // namespace nsa::cuda
