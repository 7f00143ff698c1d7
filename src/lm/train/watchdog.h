// Ends a process whose device never finishes its work.
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

/// A rank that dies leaves the others in a device collective that never ends: NCCL does not detect this within one
/// machine. The host then waits for the device and polls no flag. torchrun detects it and sends SIGTERM. So this thread
/// times out when a signal has arrived and the work in progress does not end.
class Watchdog {
 public:
  using Duration = std::chrono::steady_clock::duration;
  static constexpr std::size_t kRecent = 8;  // a first step takes longer than all others

  /// `stopped` returns whether a signal has arrived. `on_timeout` receives the argument of begin() and ends the
  /// process. After the signal a task may take `patience` plus twice the longest of the last kRecent tasks.
  Watchdog(std::function<bool()> stopped, std::function<void(const std::string&)> on_timeout, Duration patience);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// A task on the device, or a wait for it, begins; `where` goes into the message.
  void begin(std::string where);
  void end();

 private:
  using Clock = std::chrono::steady_clock;
  void poll();

  std::function<bool()> stopped_;
  std::function<void(const std::string&)> on_timeout_;
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
