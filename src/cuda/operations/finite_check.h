// Kernels that suppose finite values: what has to be looked at before them.
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

/// For kernels that suppose finite values: a flag that is set where there are others. The first kernel that asks has
/// the values of all branches looked at. The kernels that stand in where the flag is set come behind all that suppose
/// finite values, one after the other.
class Finiteness {
 public:
  Finiteness(std::initializer_list<TensorView> values, Execution& e) : dtype_(values.begin()->dtype) {
    inputs_.flag = e.arena.take<int>(1);
    const TensorView* before = nullptr;
    Checked* next = inputs_.tensors;
    for (const TensorView& t : values) {
      const bool again = before && t.data == before->data && t.stride == before->stride;
      if (!again) *next++ = checked(t);
      before = &t;
    }
  }

  /// Somebody else looks at the values, and sets `flag` before the first kernel that asks.
  explicit Finiteness(int* flag) : looked_(true) { inputs_.flag = flag; }

  int* flag() const { return inputs_.flag; }
  Status look(Execution& e) {
    if (looked_) return {};
    looked_ = true;
    return status_of(find_nonfinite(dtype_, inputs_, e.stream), "find_nonfinite");
  }

  /// Has something launched later, by stand_in().
  void later(std::function<Status()> launch) { later_.push_back(std::move(launch)); }
  /// Comes before anything that reads results and does not look at the flag.
  Status stand_in() {
    for (const auto& launch : std::exchange(later_, {}))
      if (Status s = launch(); !s.ok()) return s;
    return {};
  }

 private:
  DType dtype_ = DType::kBFloat16;
  NonfiniteArgs inputs_{};
  bool looked_ = false;
  std::vector<std::function<Status()>> later_;
};

}  // namespace nsa::cuda
