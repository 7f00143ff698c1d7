// The mean time of a step, and the number of steps that fit a budget of time.
#include "lm/train/throughput_meter.h"

#include <gtest/gtest.h>

namespace nsa::lm {
namespace {

TEST(ThroughputMeter, MeanOfLastSteps) {
  ThroughputMeter meter;
  EXPECT_EQ(meter.mean_of_last(3).seconds, 0);
  meter.add(9, 100);
  EXPECT_EQ(meter.mean_of_last(3).seconds, 9);
  meter.add(1, 10);
  meter.add(3, 30);
  EXPECT_EQ(meter.mean_of_last(2).seconds, 2);
  EXPECT_EQ(meter.mean_of_last(2).tokens, 20);
}

TEST(ThroughputMeter, StepsLeftAfterTenStepsAndATenthOfTheBudget) {
  ThroughputMeter meter;
  for (int i = 0; i < 9; ++i) meter.add(20, 1);
  EXPECT_FALSE(meter.steps_left(1000, 180));
  meter.add(20, 1);
  EXPECT_FALSE(meter.steps_left(1000, 99));
  EXPECT_EQ(meter.steps_left(1000, 200), 40);
  EXPECT_EQ(meter.steps_left(1000, 999), 1);
  EXPECT_EQ(meter.steps_left(1000, 1001), 1);
}

/// Step times as on a GPU: a slow first step; one of every ten waits for those before it, the next two are short.
TEST(ThroughputMeter, StepsLeftMeetTheBudget) {
  ThroughputMeter meter;
  const auto seconds = [](int step) {
    return step == 0 ? 9. : step % 10 == 9 ? .4 : step % 10 == 0 ? .01 : step % 10 == 1 ? .1 : .2;
  };
  double spent = 0;
  int step = 0;
  std::optional<std::int64_t> left;
  while (!left) {
    meter.add(seconds(step), 32768);
    spent += seconds(step++);
    left = meter.steps_left(900, spent);
  }
  for (; *left > 0; --*left) spent += seconds(step++);
  EXPECT_NEAR(spent, 900, 2);  // at the median of the steps: 863
}

}  // namespace
}  // namespace nsa::lm
