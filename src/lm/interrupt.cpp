#include "lm/interrupt.h"

#include <csignal>

namespace nsa::lm {
namespace {

volatile std::sig_atomic_t g_signal = 0;

void install(void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = static_cast<int>(SA_RESETHAND) | SA_RESTART;
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
}

}  // namespace

InterruptGuard::InterruptGuard() {
  g_signal = 0;
  install([](int signal) { g_signal = signal; });
}

InterruptGuard::~InterruptGuard() { install(SIG_DFL); }

int InterruptGuard::signal() const { return g_signal; }

}  // namespace nsa::lm
