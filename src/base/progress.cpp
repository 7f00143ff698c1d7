#include "base/progress.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace nsa::base {
namespace {

constexpr int kBarWidth = 24;
constexpr auto kRedraw = std::chrono::milliseconds(100);
constexpr auto kReprint = std::chrono::seconds(10);

}  // namespace

Progress::Progress(std::int64_t total) : total_(total), terminal_(::isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() { clear(); }

void Progress::clear() {
  if (drawn_) write_stderr("\r\033[K");
  drawn_ = false;
}

void Progress::update(std::int64_t done, const std::string& note, double seconds_left) {
  const auto now = Clock::now();
  const bool last = total_ > 0 && done >= total_;
  if (!last && last_ != Clock::time_point{} && now - last_ < (terminal_ ? Clock::duration(kRedraw) : kReprint)) return;
  last_ = now;
  const double share = total_ > 0 ? static_cast<double>(done) / static_cast<double>(total_) : 0;
  std::string line = total_ > 0 ? fmt::format("step {}/{}", done, total_) : fmt::format("step {}", done);
  if (terminal_) {
    const int filled = static_cast<int>(std::lround(share * kBarWidth));
    line += " [" + std::string(static_cast<std::size_t>(filled), '=') +
            std::string(static_cast<std::size_t>(kBarWidth - filled), ' ') + "]";
  }
  line += "  " + note;
  if (seconds_left >= 0) line += "  " + format_duration(seconds_left) + " left";
  if (terminal_) {
    write_stderr(fmt::format("\r{}\033[K", line));
    drawn_ = true;
  } else {
    write_stderr(fmt::format("{}\n", line));
  }
}

void Progress::print(const std::string& line) {
  clear();
  write_stderr(fmt::format("{}\n", line));
}

std::string format_duration(double seconds) {
  const auto whole = static_cast<std::int64_t>(std::max(0.0, std::round(seconds)));
  if (whole < 3600) return fmt::format("{}:{:02}", whole / 60, whole % 60);
  return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}

}  // namespace nsa::base
