// The program `nsa`.
#include <unistd.h>

#include <exception>
#include <new>

#include "cli/program.h"

namespace {

std::terminate_handler default_handler;

/// For exceptions that nothing catches, as in the constructors of LibTorch's globals: exhausted memory ends as it does
/// in program.cpp, anything else as without this handler.
void terminate() {
  try {
    if (std::current_exception()) throw;
  } catch (const std::bad_alloc&) {
    constexpr char kMessage[] = "nsa: out of memory\n";
    [[maybe_unused]] const auto written = write(STDERR_FILENO, kMessage, sizeof kMessage - 1);
    _exit(1);
  } catch (...) {
  }
  default_handler();
}

/// Runs before the constructors of the libraries: LibTorch's need 0.4 GB of address space.
[[gnu::section(".preinit_array"), gnu::used]] void (*const before_libraries)() = [] {
  default_handler = std::set_terminate(terminate);
};

}  // namespace

// Without the destructors of LibTorch's globals, which take as long as its start. The output is closed by then.
int main(int argc, char** argv) { _exit(nsa_program(argc, argv, nullptr)); }
