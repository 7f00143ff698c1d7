// How fast a run goes, by its steps so far.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace nsa::lm {

/// Times of single steps say little where a device has a queue: the host sees a step that waits for those before it as
/// twice as long, and the next one as half. So all here are means.
class Pace {
 public:
  struct Step {
    double seconds = 0, tokens = 0;
  };

  void add(double seconds, std::int64_t tokens) { steps_.push_back({seconds, static_cast<double>(tokens)}); }

  /// The mean of the last `count` steps, or of all if there are fewer; zeros without any.
  Step mean_of_last(std::size_t count) const;

  /// How many more steps end a run after `budget` seconds, of which `spent` have passed: at least one, at the pace of
  /// the later half of those so far, as the first ones are slow. None before ten steps and a tenth of the budget.
  std::optional<std::int64_t> steps_left(double budget, double spent) const;

 private:
  std::vector<Step> steps_;
};

}  // namespace nsa::lm
