// Time in training: the watchdog ends a process only if a signal has arrived and its device does not finish; how many
// steps fit a budget.
#include "lm/train/watchdog.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "lm/train/throughput_meter.h"

namespace nsa::lm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kPatience{200};

/// A watchdog and its message.
struct Watched {
  std::atomic<bool> signal{false}, timed_out{false};
  std::string message;  // once timed_out
  Watchdog watchdog{[this] { return signal.load(); },
                    [this](const std::string& where) {
                      message = where;
                      timed_out = true;
                    },
                    kPatience};

  void work(milliseconds time, const std::string& where) {
    watchdog.begin(where);
    std::this_thread::sleep_for(time);
    watchdog.end();
  }
  /// Milliseconds until the timeout, at most `most`.
  double times_out_within(milliseconds most) const {
    const auto start = Clock::now();
    while (!timed_out && Clock::now() < start + most) std::this_thread::sleep_for(milliseconds(1));
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  }
};

TEST(Watchdog, TimesOutOnlyAfterASignal) {
  Watched watched;
  watched.watchdog.begin("step 3");
  std::this_thread::sleep_for(3 * kPatience);
  EXPECT_FALSE(watched.timed_out);  // without a signal it may take any time
  watched.signal = true;
  EXPECT_GE(watched.times_out_within(milliseconds(5000)), 0.9 * kPatience.count());
  ASSERT_TRUE(watched.timed_out);
  EXPECT_EQ(watched.message, "step 3");
}

TEST(Watchdog, NoTimeoutBetweenOrWithinShortTasks) {
  Watched watched;
  watched.signal = true;
  for (int i = 0; i < 8; ++i) watched.work(kPatience / 4, "step");
  std::this_thread::sleep_for(5 * kPatience);
  EXPECT_FALSE(watched.timed_out);
}

TEST(Watchdog, WaitsForTwiceTheLongestTask) {
  Watched watched;
  watched.work(2 * kPatience, "long");
  watched.work(milliseconds(1), "short");
  watched.signal = true;
  watched.watchdog.begin("stuck");
  EXPECT_GE(watched.times_out_within(milliseconds(10000)), 4.9 * kPatience.count());
  EXPECT_EQ(watched.message, "stuck");
}

TEST(Watchdog, ForgetsTasksBeforeTheRecentOnes) {
  Watched watched;
  watched.work(4 * kPatience, "first");
  for (std::size_t i = 0; i < Watchdog::kRecent; ++i) watched.work(milliseconds(1), "others");
  watched.signal = true;
  watched.watchdog.begin("stuck");
  EXPECT_LT(watched.times_out_within(8 * kPatience), 7.0 * kPatience.count());
  EXPECT_TRUE(watched.timed_out);
}

TEST(Watchdog, PatienceCountsFromTheBeginOfTheTask) {
  Watched watched;
  watched.signal = true;
  std::this_thread::sleep_for(2 * kPatience);
  watched.watchdog.begin("stuck");
  EXPECT_GE(watched.times_out_within(milliseconds(5000)), 0.9 * kPatience.count());
}

TEST(Watchdog, DestructorDoesNotWait) {
  const auto start = Clock::now();
  {
    Watched watched;
    watched.signal = true;
    watched.watchdog.begin("interrupted by an error");
  }
  EXPECT_LT(Clock::now() - start, kPatience);
}

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
