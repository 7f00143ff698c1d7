#include "bench/device_timing.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <c10/core/Event.h>

#include <algorithm>
#include <chrono>
#include <map>

namespace nsa::bench {
namespace {

constexpr std::int64_t kFlushBytes = 512 << 20;  // several times any L2

/// An event behind all that has been launched.
c10::Event now(const c10::Stream& stream) {
  c10::Event event(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT);
  event.record(stream);
  return event;
}

Timing timing_of(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  // The device was ours alone: there is nothing to judge.
  return {.best_s = seconds.front(), .median_s = seconds[seconds.size() / 2], .by_median = true, .judged = true};
}

}  // namespace

std::vector<StageTiming> time_device_stages(const std::function<void(const StageMark&)>& work,
                                            const TimingOptions& options, at::Device device) {
  using Clock = std::chrono::steady_clock;
  const c10::Stream stream(c10::Stream::DEFAULT, device);
  const auto flush = at::empty({kFlushBytes}, at::TensorOptions(device).dtype(at::kByte));
  std::vector<std::string> order;
  work([&](const char* stage) { order.emplace_back(stage); });
  stream.synchronize();
  std::map<std::string, std::vector<double>> seconds;
  const auto start = Clock::now();
  for (int i = 0; i < options.repeats; ++i) {
    if (i > 0 && std::chrono::duration<double>(Clock::now() - start).count() > options.budget_s) break;
    flush.zero_();
    std::vector<c10::Event> events;
    events.push_back(now(stream));
    work([&](const char*) { events.push_back(now(stream)); });
    stream.synchronize();
    std::map<std::string, double> sums;
    for (std::size_t stage = 0; stage < order.size(); ++stage) {
      sums[order[stage]] += 1e-3 * events[stage].elapsedTime(events[stage + 1]);
    }
    for (const auto& [stage, sum] : sums) seconds[stage].push_back(sum);
  }
  std::vector<StageTiming> timings;
  for (const auto& stage : order) {
    const auto known = [&](const StageTiming& timing) { return timing.stage == stage; };
    if (std::none_of(timings.begin(), timings.end(), known)) timings.push_back({stage, timing_of(seconds[stage])});
  }
  return timings;
}

Timing time_device_runs(const std::function<void()>& work, const TimingOptions& options, at::Device device) {
  const auto marked = [&](const StageMark& mark) {
    work();
    mark("all");
  };
  return time_device_stages(marked, options, device).front().timing;
}

DeviceRates measure_device_rates(at::Device device, bool bfloat16) {
  const at::NoGradGuard no_grad;
  const TimingOptions options{.threads = 1, .repeats = 9, .budget_s = 2};
  const auto type = at::TensorOptions(device).dtype(bfloat16 ? at::kBFloat16 : at::kFloat);
  DeviceRates rates;
  {
    constexpr std::int64_t n = 8192;
    const auto a = at::randn({n, n}, type), b = at::randn({n, n}, type);
    auto c = at::empty({n, n}, type);
    const auto timing = time_device_runs([&] { at::mm_out(c, a, b); }, options, device);
    rates.gflops = 2e-9 * static_cast<double>(n * n * n) / timing.seconds();
  }
  constexpr std::int64_t bytes = 1 << 30;
  const auto from = at::randn({bytes / 4}, type.dtype(at::kFloat)), to = at::empty_like(from);
  const auto timing = time_device_runs([&] { to.copy_(from); }, options, device);
  rates.bytes_per_s = 2.0 * bytes / timing.seconds();
  return rates;
}

}  // namespace nsa::bench
