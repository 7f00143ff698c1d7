// How many steps a run of some minutes takes, and the speed that it shows.
#include "lm/train/pace.h"

#include <gtest/gtest.h>

namespace nsa::lm {
namespace {

TEST(Pace, IsTheMeanOfTheLastSteps) {
  Pace pace;
  EXPECT_EQ(pace.mean_of_last(3).seconds, 0);
  pace.add(9, 100);
  EXPECT_EQ(pace.mean_of_last(3).seconds, 9);
  pace.add(1, 10);
  pace.add(3, 30);
  EXPECT_EQ(pace.mean_of_last(2).seconds, 2);
  EXPECT_EQ(pace.mean_of_last(2).tokens, 20);
}

TEST(Pace, SettlesAfterTenStepsAndATenthOfTheTime) {
  Pace pace;
  for (int i = 0; i < 9; ++i) pace.add(20, 1);
  EXPECT_FALSE(pace.steps_left(1000, 180));
  pace.add(20, 1);
  EXPECT_FALSE(pace.steps_left(1000, 99));
  EXPECT_EQ(pace.steps_left(1000, 200), 40);
  EXPECT_EQ(pace.steps_left(1000, 999), 1);
  EXPECT_EQ(pace.steps_left(1000, 1001), 1);
}

/// As on a GPU: a slow first step; one of every ten waits for those before it, the next two take hardly any time.
TEST(Pace, ARunOfSomeMinutesEndsThen) {
  Pace pace;
  const auto seconds = [](int step) {
    return step == 0 ? 9. : step % 10 == 9 ? .4 : step % 10 == 0 ? .01 : step % 10 == 1 ? .1 : .2;
  };
  double spent = 0;
  int step = 0;
  std::optional<std::int64_t> left;
  while (!left) {
    pace.add(seconds(step), 32768);
    spent += seconds(step++);
    left = pace.steps_left(900, spent);
  }
  for (; *left > 0; --*left) spent += seconds(step++);
  EXPECT_NEAR(spent, 900, 2);  // at the median of the steps: 863
}

}  // namespace
}  // namespace nsa::lm
