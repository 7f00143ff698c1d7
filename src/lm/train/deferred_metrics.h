// Numbers of training steps that stay on the device until they are needed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace nsa::lm {

/// What steps leave on the device until somebody looks, so that none of them waits for it.
class DeferredMetrics {
 public:
  explicit DeferredMetrics(at::Device device);

  void add_loss(const at::Tensor& loss_sum) { loss_sum_.add_(loss_sum); }
  void add_norm(const at::Tensor& norm);
  /// Waits for the device; returns the sum of the losses. Throws Failure when a norm was not finite; `step` is the next
  /// step.
  double sync(std::int64_t step);
  /// Resumes at `step` with this sum.
  void restart(std::int64_t step, double loss_sum);

 private:
  at::Tensor loss_sum_;      // float64
  at::Tensor largest_norm_;  // of the gradients, since the last look, which was before step `synced_`
  std::int64_t synced_ = 0;
};

}  // namespace nsa::lm
