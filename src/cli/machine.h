// --device and --threads: where a command computes.
#pragma once

#include <ATen/Parallel.h>

#include "cli/device.h"

namespace nsa::cli {

/// Lives as long as the command.
class MachineOptions : public DeviceOption {
 public:
  void add(CLI::App& command) {
    DeviceOption::add(command);
    command.add_option("--threads", threads_, "0: one for each core")->check(CLI::Range(0, 1024));
  }

  /// DeviceOption::choose(), and torch's number of threads.
  lm::DeviceChoice choose() const {
    auto choice = DeviceOption::choose();
    if (threads_ > 0) at::set_num_threads(threads_);
    return choice;
  }

 private:
  int threads_ = 0;
};

}  // namespace nsa::cli
