// Ends a process that waits for its device without end.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace nsa::lm {

/// A rank that dies leaves the others in a collective on the device that never ends: NCCL does not notice within one
/// machine. The host waits for the device then and looks at no flag. torchrun does notice, and sends SIGTERM. So this
/// thread gives up when a signal has come and the work that had begun does not end.
class StallWatch {
 public:
  using Duration = std::chrono::steady_clock::duration;
  static constexpr std::size_t kRecent = 8;  // a first step takes longer than all others

  /// `stopped` says whether a signal has come. `give_up` gets what begin() was told and ends the process. A piece of
  /// work may take `patience` and twice the longest of the last kRecent ones after the signal.
  StallWatch(std::function<bool()> stopped, std::function<void(const std::string&)> give_up, Duration patience);
  ~StallWatch();
  StallWatch(const StallWatch&) = delete;
  StallWatch& operator=(const StallWatch&) = delete;

  /// Work on the device begins, or waits for it: `where` is for the message.
  void begin(std::string where);
  void end();

 private:
  using Clock = std::chrono::steady_clock;
  void watch();

  std::function<bool()> stopped_;
  std::function<void(const std::string&)> give_up_;
  const Duration patience_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool working_ = false, leaving_ = false;
  std::string where_;
  Clock::time_point begin_{};
  std::array<Duration, kRecent> recent_{};
  std::size_t next_ = 0;
  std::thread thread_;  // last: it uses the rest
};

}  // namespace nsa::lm
