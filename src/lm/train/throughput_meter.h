// Throughput of a training run, from the steps so far.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
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
  Step mean_of_last(std::size_t count) const;

  /// Number of further steps that fit a run of `budget` seconds, of which `spent` have passed: at least one. The time
  /// of a step is the mean of the later half so far, as the first steps are slow. None before ten steps and a tenth of
  /// the budget.
  std::optional<std::int64_t> steps_left(double budget, double spent) const;

 private:
  std::vector<Step> steps_;
};

}  // namespace nsa::lm
