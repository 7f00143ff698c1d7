// nsa info: what this build has, what the machine has, what was chosen and why.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>
#include <thread>

#include "base/device.h"
#include "base/machine.h"
#include "cli/commands.h"
#include "nsa/backend.h"

namespace nsa::cli {
namespace {

void print_section(const char* title, std::string_view lines) {
  fmt::print("{}\n", title);
  while (!lines.empty()) {
    const auto end = lines.find('\n');
    fmt::print("  {}\n", lines.substr(0, end));
    lines.remove_prefix(end == std::string_view::npos ? lines.size() : end + 1);
  }
}

void print_info(bool device_alone) {
  if (device_alone) {
    fmt::print("{}\n", lm::choose_device("auto").kind());
    return;
  }
  const char* wish = std::getenv("OMP_NUM_THREADS");
  fmt::print("nsa {}\n", version());
  print_section("backends", describe_backends());
  print_section("instruction sets of the backend cpu", describe_instruction_sets());
  print_section("devices", fmt::format("cpu: {}, {} logical cores\ncuda: {}", lm::cpu_name(),
                                       std::thread::hardware_concurrency(), describe_devices()));
  print_section("device of the language model (--device auto)", lm::choose_device("auto").text);
  print_section("threads", fmt::format("{} to a call, {}", default_num_threads(),
                                       wish ? fmt::format("OMP_NUM_THREADS = {}", wish)
                                            : std::string("OpenMP's default (OMP_NUM_THREADS is not set)")));
}

}  // namespace

void add_info(CLI::App& app) {
  auto* const command =
      app.add_subcommand("info", "Print version, backends, instruction sets and devices, what was chosen and why.");
  static bool device_alone = false;  // the callback refers to it
  command->add_flag("--chosen-device", device_alone, "Print only what --device auto means here: cpu or cuda");
  command->callback([] { print_info(device_alone); });
}

}  // namespace nsa::cli
