// Timing of work on a CUDA device.
#pragma once

#include <c10/core/Device.h>

#include <functional>

#include "lm/timing.h"

namespace nsa::lm {

/// Calls `work` once to warm up, then `options.repeats` times, each between two events on the device and after its
/// second-level cache was flushed. No further run is started after `options.budget_s`, once there is one. Time that the
/// device waits for the host counts only where the host is slower than the flush (0.1 ms or more) and the work
/// together.
Timing time_device_runs(const std::function<void()>& work, const TimingOptions& options, at::Device device);

}  // namespace nsa::lm
