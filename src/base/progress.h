// One line that tells how far a run is: redrawn in place on a terminal, printed now and then elsewhere. Debian 12 has
// no progress bar for C++.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace nsa::base {

class Progress {
 public:
  /// `total` steps, 0 while that is not known. Writes to stderr.
  explicit Progress(std::int64_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void set_total(std::int64_t total) { total_ = total; }
  /// `note` goes behind the bar, e.g. "loss 2.31"; `seconds_left` < 0: not known. Elsewhere than on a terminal a line
  /// is printed at most every ten seconds.
  void update(std::int64_t done, const std::string& note, double seconds_left);
  /// Takes the bar away, prints a line above it and lets the bar come back with the next update.
  void print(const std::string& line);

 private:
  using Clock = std::chrono::steady_clock;
  void clear();

  std::int64_t total_;
  bool terminal_;
  bool drawn_ = false;
  Clock::time_point last_{};
};

/// "1:02:03" or "2:03"
std::string format_duration(double seconds);

}  // namespace nsa::base
