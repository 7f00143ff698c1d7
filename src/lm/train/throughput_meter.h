// Throughput of a training run, from the steps so far.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace nsa::lm {

/// Means over several steps. A device has a queue, so the host measures a step that waits for earlier ones as twice as
/// long, and the next one as half.
class ThroughputMeter {
 public:
  struct Step {
    double seconds = 0, tokens = 0;
  };

  void add(double seconds, std::int64_t tokens) { steps_.push_back({seconds, static_cast<double>(tokens)}); }

  /// Mean of the last `count` steps, or of all if there are fewer; zeros before the first step.
  Step mean_of_last(std::size_t count) const {
    const auto last = std::span(steps_).last(std::min(count, steps_.size()));
    Step mean;
    for (const Step& step : last) {
      mean.seconds += step.seconds / static_cast<double>(last.size());
      mean.tokens += step.tokens / static_cast<double>(last.size());
    }
    return mean;
  }

  /// Number of further steps that fit a run of `budget` seconds, of which `spent` have passed: at least one. The time
  /// of a step is the mean of the later half so far, as the first steps are slow. None before ten steps and a tenth of
  /// the budget.
  std::optional<std::int64_t> steps_left(double budget, double spent) const {
    if (steps_.size() < kTimedSteps || spent < kTimedShare * budget) return std::nullopt;
    const double more = std::max(0., budget - spent) / mean_of_last(steps_.size() / 2).seconds;
    return std::max<std::int64_t>(1, static_cast<std::int64_t>(more));
  }

 private:
  static constexpr std::size_t kTimedSteps = 10;
  static constexpr double kTimedShare = 0.1;

  std::vector<Step> steps_;
};

}  // namespace nsa::lm
