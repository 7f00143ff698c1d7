#include "lm/train/throughput_meter.h"

#include <algorithm>
#include <span>

namespace nsa::lm {
namespace {

constexpr std::size_t kTimedSteps = 10;
constexpr double kTimedShare = 0.1;

}  // namespace

ThroughputMeter::Step ThroughputMeter::mean_of_last(std::size_t count) const {
  const auto last = std::span(steps_).last(std::min(count, steps_.size()));
  Step mean;
  for (const Step& step : last) {
    mean.seconds += step.seconds / static_cast<double>(last.size());
    mean.tokens += step.tokens / static_cast<double>(last.size());
  }
  return mean;
}

std::optional<std::int64_t> ThroughputMeter::steps_left(double budget, double spent) const {
  if (steps_.size() < kTimedSteps || spent < kTimedShare * budget) return std::nullopt;
  const double more = std::max(0., budget - spent) / mean_of_last(steps_.size() / 2).seconds;
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(more));
}

}  // namespace nsa::lm
