// How far the host runs ahead of the device: one step, without waiting for a step's numbers.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <optional>

namespace nsa::lm {

/// Lets the host run one step ahead of the device and no further: the device never waits for the next step, and the
/// times between two steps are the device's.
class StepThrottle {
 public:
  explicit StepThrottle(at::Device device);
  /// At the end of a step.
  void step();
  /// Waits for the end of the last step.
  void finish();

 private:
  at::Device device_;
  std::optional<c10::Event> before_;  // the end of the step before; on the CPU none
};

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
