#include "lm/train/watchdog.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace nsa::lm {
namespace {

constexpr std::chrono::milliseconds kPollInterval{50};

}  // namespace

Watchdog::Watchdog(std::function<bool()> stopped, std::function<void(const std::string&)> on_timeout, Duration patience)
    : stopped_(std::move(stopped)),
      on_timeout_(std::move(on_timeout)),
      patience_(patience),
      thread_([this] { poll(); }) {}

Watchdog::~Watchdog() {
  {
    const std::scoped_lock lock(mutex_);
    leaving_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void Watchdog::begin(std::string where) {
  const std::scoped_lock lock(mutex_);
  working_ = true;
  where_ = std::move(where);
  begin_ = Clock::now();
}

void Watchdog::end() {
  const std::scoped_lock lock(mutex_);
  if (working_) recent_[next_++ % kRecent] = Clock::now() - begin_;
  working_ = false;
}

void Watchdog::poll() {
  std::optional<Clock::time_point> signal;  // when it was first polled
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kPollInterval, [this] { return leaving_; })) {
    if (!signal) {
      if (stopped_()) signal = Clock::now();
      continue;
    }
    const auto longest = *std::max_element(recent_.begin(), recent_.end());
    if (!working_ || Clock::now() < std::max(*signal, begin_) + patience_ + 2 * longest) continue;
    const std::string where = where_;
    lock.unlock();
    on_timeout_(where);
    return;
  }
}

}  // namespace nsa::lm
