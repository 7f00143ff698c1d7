// --device and --threads of a command.
#pragma once

#include "cli/device.h"
#include "nsa/backend.h"

namespace nsa::cli {

/// Must outlive the command.
class MachineOptions : public DeviceOption {
 public:
  void add(CLI::App& command) {
    DeviceOption::add(command);
    command.add_option("--threads", threads_, "Number of CPU threads; 0: one per core")
        ->check(CLI::Range(0, kMaxThreads));
  }

  /// DeviceOption::choose(), and torch's number of threads.
  base::DeviceChoice choose() const {
    auto choice = DeviceOption::choose();
    base::set_threads(threads_);
    return choice;
  }

 private:
  int threads_ = 0;
};

}  // namespace nsa::cli
