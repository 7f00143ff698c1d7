// Timing of work on a CUDA device, and what the device does at most.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <string>
#include <vector>

#include "bench/timing.h"

namespace nsa::bench {

/// Receives the name of a stage after all or a part of it has been launched.
using StageMark = std::function<void(const char* stage)>;

struct StageTiming {
  std::string stage;
  Timing timing;
};

/// Calls `work` once to warm up, then `options.repeats` times, each between two events on the device and after its
/// L2 was flushed. No further run is started after `options.budget_s`, once there is one. Time that the
/// device waits for the host counts only where the host is slower than the flush (0.1 ms or more) and the work
/// together.
Timing time_device_runs(const std::function<void()>& work, const TimingOptions& options, at::Device device);

/// The same for each stage that the work marks, in the order of the first run: from the end of the stage before to its
/// own, all parts together. What comes after the last mark is not timed.
std::vector<StageTiming> time_device_stages(const std::function<void(const StageMark&)>& work,
                                            const TimingOptions& options, at::Device device);

/// What the device does at most, by torch: a product of two 8192 x 8192 matrices of random numbers, and a copy of 1 GiB
/// in its memory, read and written. Medians.
struct DeviceRates {
  double gflops = 0, bytes_per_s = 0;
};
DeviceRates measure_device_rates(at::Device device, bool bfloat16);

}  // namespace nsa::bench
