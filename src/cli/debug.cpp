// nsa debug compare: replays calls that NSA_DUMP wrote and compares them with the oracle.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "cli/commands.h"
#include "nsa/backend.h"
#include "replay/replay.h"

namespace nsa::cli {
namespace {

void compare(const std::string& path) {
  const auto call = replay::read_dump(path);
  fmt::print("{}: {} on the backend chosen by default ({}) against the fp64 oracle\n", path,
             base::printable(call.operation), variant_of(Backend::kCPU));
  fmt::print("{:<22} {:>12} {:>12} {:>12}  {}\n", "output", "max error", "max |oracle|", "of it", "");
  for (const auto& d : replay::compare_with_oracle(call)) {
    if (d.is_integer) {
      fmt::print("{:<22} {:>38.2f}  percent of rows equal\n", d.name, 100 * d.rows_equal);
      continue;
    }
    fmt::print("{:<22} {:>12.3e} {:>12.3e} {:>12.3e}  {}\n", d.name, d.max_error, d.max_oracle,
               d.max_oracle > 0 ? d.max_error / d.max_oracle : 0,
               d.not_finite_differ > 0
                   ? fmt::format("{} elements are non-finite in only one of them", d.not_finite_differ)
                   : "");
  }
}

}  // namespace

void add_debug(CLI::App& app) {
  static std::vector<std::string> dumps;  // the callback refers to them
  auto* const debug = app.add_subcommand("debug", "Debugging tools.");
  debug->require_subcommand(1);
  auto* const command =
      debug->add_subcommand("compare", "Replay dumped calls and print each output's error against the oracle.");
  command->add_option("dump", dumps, "Files written by a program that ran with NSA_DUMP=folder")->required();
  command->callback([] {
    for (const auto& path : dumps) compare(path);
  });
}

}  // namespace nsa::cli
