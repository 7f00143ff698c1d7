// nsa needle: a line hidden at several depths of contexts of several lengths, as a heat map and as JSON.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cli/checkpoint.h"
#include "cli/commands.h"
#include "cli/machine.h"
#include "cli/method.h"
#include "cli/output.h"
#include "lm/probes/needle.h"

namespace nsa::cli {
namespace {

struct NeedleCommand {
  CheckpointOptions checkpoint;
  JsonOption json;
  std::vector<std::string> data;
  lm::NeedleOptions options;
  MethodOptions method;
  MachineOptions machine;

  void run() {
    json.open();
    const auto device = machine.choose();
    const auto opened = lm::open_checkpoint(checkpoint.path, checkpoint.changes, device.device);
    options.forward.attention = method.of(opened.model().config());
    const auto texts = lm::open_texts(checkpoint.path, data, *opened.tokenizer);
    if (options.lengths.empty()) {
      const auto context = opened.loaded.context;
      for (const auto part : {8, 4, 2, 1}) options.lengths.push_back(std::max<std::int64_t>(64, context / part));
    }
    fmt::print("device: {}\n", device.text);
    for (const auto length : options.lengths) method.print(opened.model().config().nsa, length);
    fmt::print("answer tokens right, percent (nats/token gained by the needle), {} samples each\n{:>9} ",
               options.samples, "length");
    for (const double depth : options.depths) fmt::print(" {:>14}", fmt::format("depth {:.2f}", depth));
    fmt::print("\n");
    const auto cells = lm::run_needle(opened, texts.documents, options, print_row);
    json.write(to_json(cells, opened.model().config().nsa));
  }

  /// The darker the shade, the better.
  static void print_row(std::int64_t length, const std::vector<lm::NeedleCell>& row) {
    static const std::string shades = " .:-=+*#%@";
    fmt::print("{:>9} ", length);
    for (const auto& cell : row) {
      const auto shade = shades[static_cast<std::size_t>(cell.accuracy * static_cast<double>(shades.size() - 1))];
      fmt::print(" {0}{0}{0} {1:>3.0f} ({2:>4.1f})", shade, 100 * cell.accuracy, cell.loss_without - cell.loss);
    }
    fmt::print("\n");
    std::fflush(stdout);
  }

  nlohmann::json to_json(const std::vector<std::vector<lm::NeedleCell>>& cells, const NSAConfig& nsa) const {
    nlohmann::json out = {{"kind", "nsa-needle"},       {"checkpoint", checkpoint.path}, {"set", checkpoint.changes},
                          {"lengths", options.lengths}, {"depths", options.depths},      {"samples", options.samples}};
    method.describe(out, nsa, options.lengths);
    const auto table = [&](double lm::NeedleCell::*field) {
      std::vector<std::vector<double>> values;
      for (const auto& row : cells) {
        auto& line = values.emplace_back();
        for (const auto& cell : row) line.push_back(cell.*field);
      }
      return values;
    };
    out["accuracy"] = table(&lm::NeedleCell::accuracy);
    out["exact"] = table(&lm::NeedleCell::exact);
    out["loss"] = table(&lm::NeedleCell::loss);
    out["loss_without_needle"] = table(&lm::NeedleCell::loss_without);
    return out;
  }
};

}  // namespace

void add_needle(CLI::App& app) {
  static std::unique_ptr<NeedleCommand> state;  // the callback refers to it
  state = std::make_unique<NeedleCommand>();
  auto* const command =
      app.add_subcommand("needle", "Hide a line at several depths of long contexts and ask a checkpoint for it.");
  auto& options = state->options;
  state->checkpoint.add(*command);
  command->add_option("--data", state->data,
                      "Text files or folders for the haystack; without it the held-out documents");
  command
      ->add_option("--lengths", options.lengths, "Contexts, tokens; default: 1/8, 1/4, 1/2 and all of the training's")
      ->delimiter(',')
      ->check(CLI::Range(64, 1 << 24));
  command->add_option("--depths", options.depths, "0: at the start, 1: at the end")
      ->delimiter(',')
      ->check(CLI::Range(0.0, 1.0));
  command->add_option("--samples", options.samples, "Contexts of each length")->check(CLI::Range(1, 100000));
  command->add_option("--needle", options.needle, "What is hidden; {key} and {value} are filled in")
      ->default_str("'\\n{key} = {value}\\n'");
  command->add_option("--question", options.question, "What is asked at the end; the answer is {value}")
      ->default_str("'\\n{key} = '");
  command->add_option("--seed", options.seed, "Of places, keys and values");
  state->method.add(*command);
  state->machine.add(*command);
  state->json.add(*command, "the results");
  command->callback([] { state->run(); });
}

}  // namespace nsa::cli
