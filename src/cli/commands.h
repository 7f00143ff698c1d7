// The subcommands of `nsa`, one file each. A function adds its subcommand, whose callback does the work.
#pragma once

#include <string>

namespace CLI {
class App;
}
namespace nsa::lm {
class Ranks;
}

namespace nsa::cli {

/// The options that `command` was given, but where its results go, as the content of a file for --config.
std::string toml_of(const CLI::App& command);

/// How a subcommand ends the program with a code other than 0 that is not an error.
struct Exit {
  int code;
};

/// `ranks`: the processes that train together.
void add_train(CLI::App& app, const lm::Ranks& ranks);
void add_generate(CLI::App& app);
void add_bench(CLI::App& app);
void add_info(CLI::App& app);
void add_eval(CLI::App& app);
void add_recall(CLI::App& app);
void add_needle(CLI::App& app);
void add_inspect(CLI::App& app);
void add_debug(CLI::App& app);

}  // namespace nsa::cli
