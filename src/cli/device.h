// --device, and options whose default depends on it.
#pragma once

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

#include "base/device.h"

namespace nsa::cli {

/// Must outlive the command, whose callbacks refer to it.
class DeviceOption {
 public:
  void add(CLI::App& command) {
    option_ = command.add_option("--device", wish_,
                                 "Device: cpu, cuda, or auto (cuda if this build and this machine support it)");
    option_->check(CLI::IsMember({"auto", "cpu", "cuda"}))->take_last();
  }

  /// Sets the default of `option` on a GPU: `value` becomes `on_cuda`.
  template <class T>
  void on_cuda(CLI::Option* option, T& value, const T& on_cuda) {
    if (value == on_cuda) return;
    option->description(fmt::format("{}; on cuda {}", option->get_description(), on_cuda));
    setters_.push_back([option, &value, on_cuda] {
      if (option->count() == 0) value = on_cuda;
    });
  }

  /// Chooses the device and sets the defaults that depend on it. Throws base::Error if the device is not available.
  base::DeviceChoice choose() const {
    auto choice = base::choose_device(wish_);
    if (choice.device.is_cuda()) {
      for (const auto& set : setters_) set();
    }
    return choice;
  }

  /// The device that was named on the command line: cpu, cuda, or nothing.
  std::string named() const { return wish_ == "auto" ? "" : wish_; }

 private:
  std::string wish_ = "auto";
  CLI::Option* option_ = nullptr;
  std::vector<std::function<void()>> setters_;
};

}  // namespace nsa::cli
