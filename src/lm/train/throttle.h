// The host waits for the device once a step.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

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

}  // namespace nsa::lm
