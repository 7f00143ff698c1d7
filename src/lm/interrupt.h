// Ctrl-C and SIGTERM as a flag that a loop asks.
#pragma once

namespace nsa::lm {

/// While it lives, the first SIGINT or SIGTERM sets the flag; a second one ends the program as usual.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

  /// The signal that came, or 0.
  int signal() const;
};

}  // namespace nsa::lm
