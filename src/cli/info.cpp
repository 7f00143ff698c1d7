// nsa info: what this build has, what the machine has, what was chosen and why.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>
#include <thread>

#include "cli/commands.h"
#include "lm/machine.h"
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

void print_info() {
  const char* wish = std::getenv("OMP_NUM_THREADS");
  fmt::print("nsa {}\n", version());
  print_section("backends", describe_backends());
  print_section("instruction sets of the backend cpu", describe_instruction_sets());
  print_section("devices",
                fmt::format("cpu: {}, {} logical cores", lm::cpu_name(), std::thread::hardware_concurrency()));
  print_section("threads", fmt::format("{} to a call, {}", default_num_threads(),
                                       wish ? fmt::format("OMP_NUM_THREADS = {}", wish)
                                            : std::string("OpenMP's default (OMP_NUM_THREADS is not set)")));
}

}  // namespace

void add_info(CLI::App& app) {
  app.add_subcommand("info", "Print version, backends, instruction sets and devices, what was chosen and why.")
      ->callback(print_info);
}

}  // namespace nsa::cli
