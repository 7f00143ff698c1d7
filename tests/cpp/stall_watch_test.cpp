// A rank that waits for its device without end is ended after a signal, and no other.
#include "lm/train/stall_watch.h"

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

/// A watch, and what it told.
struct Watched {
  std::atomic<bool> signal{false}, gave_up{false};
  std::string told;  // once gave_up
  StallWatch watch{[this] { return signal.load(); },
                   [this](const std::string& where) {
                     told = where;
                     gave_up = true;
                   },
                   kPatience};

  void work(milliseconds time, const std::string& where) {
    watch.begin(where);
    std::this_thread::sleep_for(time);
    watch.end();
  }
  /// Milliseconds until it gave up, or `most`.
  double gives_up_within(milliseconds most) const {
    const auto start = Clock::now();
    while (!gave_up && Clock::now() < start + most) std::this_thread::sleep_for(milliseconds(1));
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  }
};

TEST(StallWatch, GivesUpWorkThatDoesNotEndAfterASignal) {
  Watched watched;
  watched.watch.begin("step 3");
  std::this_thread::sleep_for(3 * kPatience);
  EXPECT_FALSE(watched.gave_up);  // without a signal it may take any time
  watched.signal = true;
  EXPECT_GE(watched.gives_up_within(milliseconds(5000)), 0.9 * kPatience.count());
  ASSERT_TRUE(watched.gave_up);
  EXPECT_EQ(watched.told, "step 3");
}

TEST(StallWatch, LetsWorkEndAndWhatIsNotWorkTakeItsTime) {
  Watched watched;
  watched.signal = true;
  for (int i = 0; i < 8; ++i) watched.work(kPatience / 4, "step");
  std::this_thread::sleep_for(5 * kPatience);
  EXPECT_FALSE(watched.gave_up);
}

TEST(StallWatch, WaitsForTwiceTheLongestPiece) {
  Watched watched;
  watched.work(2 * kPatience, "long");
  watched.work(milliseconds(1), "short");
  watched.signal = true;
  watched.watch.begin("stuck");
  EXPECT_GE(watched.gives_up_within(milliseconds(10000)), 4.9 * kPatience.count());
  EXPECT_EQ(watched.told, "stuck");
}

TEST(StallWatch, ForgetsTheFirstPieces) {
  Watched watched;
  watched.work(4 * kPatience, "first");
  for (std::size_t i = 0; i < StallWatch::kRecent; ++i) watched.work(milliseconds(1), "others");
  watched.signal = true;
  watched.watch.begin("stuck");
  EXPECT_LT(watched.gives_up_within(8 * kPatience), 7.0 * kPatience.count());
  EXPECT_TRUE(watched.gave_up);
}

TEST(StallWatch, CountsFromTheBeginningOfTheWorkToo) {
  Watched watched;
  watched.signal = true;
  std::this_thread::sleep_for(2 * kPatience);
  watched.watch.begin("stuck");
  EXPECT_GE(watched.gives_up_within(milliseconds(5000)), 0.9 * kPatience.count());
}

TEST(StallWatch, EndsAtOnceWhenItIsDestroyed) {
  const auto start = Clock::now();
  {
    Watched watched;
    watched.signal = true;
    watched.watch.begin("interrupted by an error");
  }
  EXPECT_LT(Clock::now() - start, kPatience);
}

}  // namespace
}  // namespace nsa::lm
