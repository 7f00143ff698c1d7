// The watchdog ends a process only if a signal has arrived and its device does not finish.
#include "lm/train/watchdog.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

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

}  // namespace
}  // namespace nsa::lm
