#include "lm/train/stall_watch.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace nsa::lm {
namespace {

constexpr std::chrono::milliseconds kLook{50};

}  // namespace

StallWatch::StallWatch(std::function<bool()> stopped, std::function<void(const std::string&)> give_up,
                       Duration patience)
    : stopped_(std::move(stopped)), give_up_(std::move(give_up)), patience_(patience), thread_([this] { watch(); }) {}

StallWatch::~StallWatch() {
  {
    const std::scoped_lock lock(mutex_);
    leaving_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void StallWatch::begin(std::string where) {
  const std::scoped_lock lock(mutex_);
  working_ = true;
  where_ = std::move(where);
  begin_ = Clock::now();
}

void StallWatch::end() {
  const std::scoped_lock lock(mutex_);
  if (working_) recent_[next_++ % kRecent] = Clock::now() - begin_;
  working_ = false;
}

void StallWatch::watch() {
  std::optional<Clock::time_point> signal;  // when it was first seen
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kLook, [this] { return leaving_; })) {
    if (!signal) {
      if (stopped_()) signal = Clock::now();
      continue;
    }
    const auto longest = *std::max_element(recent_.begin(), recent_.end());
    if (!working_ || Clock::now() < std::max(*signal, begin_) + patience_ + 2 * longest) continue;
    const std::string where = where_;
    lock.unlock();
    give_up_(where);
    return;
  }
}

}  // namespace nsa::lm
