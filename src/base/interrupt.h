// Converts Ctrl-C, SIGTERM and a lost terminal into a flag that a loop can poll.
#pragma once

#include <array>
#include <csignal>

namespace nsa::base {

/// While it lives, the first SIGINT, SIGTERM or SIGHUP sets the flag; a second of its kind ends the program as usual.
/// A signal that was ignored before (nohup, a job in the background) stays ignored.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

  /// The signal that came, or 0.
  int signal() const;

 private:
  std::array<struct sigaction, 3> before_;
};

}  // namespace nsa::base
