#include "lm/device_timing.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>

#include <algorithm>
#include <chrono>
#include <vector>

namespace nsa::lm {
namespace {

constexpr std::int64_t kFlushBytes = 512 << 20;  // several times any second-level cache

}  // namespace

Timing time_device_runs(const std::function<void()>& work, const TimingOptions& options, at::Device device) {
  using Clock = std::chrono::steady_clock;
  const c10::Stream stream(c10::Stream::DEFAULT, device);
  const auto flush = at::empty({kFlushBytes}, at::TensorOptions(device).dtype(at::kByte));
  work();
  stream.synchronize();
  std::vector<double> seconds;
  const auto start = Clock::now();
  while (static_cast<int>(seconds.size()) < options.repeats) {
    if (!seconds.empty() && std::chrono::duration<double>(Clock::now() - start).count() > options.budget_s) break;
    c10::Event begin(device.type(), c10::EventFlag::BACKEND_DEFAULT), end(device.type(), begin.flag());
    flush.zero_();
    begin.record(stream);
    work();
    end.record(stream);
    end.synchronize();
    seconds.push_back(1e-3 * begin.elapsedTime(end));
  }
  std::sort(seconds.begin(), seconds.end());
  // The device was ours alone: there is nothing to judge.
  return {.best_s = seconds.front(), .median_s = seconds[seconds.size() / 2], .by_median = true, .judged = true};
}

}  // namespace nsa::lm
