// nsa needle: needle retrieval by context length and needle depth, as a table and as JSON.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cli/baseline.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "lm/probes/needle.h"

namespace nsa::cli {
namespace {

struct NeedleCommand {
  CheckpointOptions checkpoint;
  JsonOption json;
  std::vector<std::string> data;
  lm::NeedleOptions options;
  BaselineOptions baseline;
  std::string dtype = "float32";
  MachineOptions machine;

  void run() {
    json.open();
    const auto device = machine.choose();
    auto opened = lm::open_checkpoint(checkpoint.path, checkpoint.changes, device.device, false);
    if (opened.loaded.tokenizer.empty())
      throw base::Error(fmt::format("{}: no tokenizer: needles and texts are made of its tokens", checkpoint.path));
    opened.tokenizer = lm::tokenizer_of(checkpoint.path, opened.loaded);
    if (dtype == "bfloat16") opened.loaded.model.place(device.device, at::kBFloat16);
    options.forward.attention = baseline.of(opened.model().config());
    const auto texts = lm::open_texts(checkpoint.path, data, opened);
    if (options.lengths.empty()) {
      const auto context = opened.loaded.context;
      for (const auto part : {8, 4, 2, 1}) options.lengths.push_back(std::max<std::int64_t>(64, context / part));
    }
    fmt::print("device: {}\n", device.text);
    for (const auto length : options.lengths) baseline.print(opened.model().config().nsa, length);
    fmt::print(
        "{}, {} samples each; exact: all tokens of the answers, with its 95 % interval; gain: nats per token from the "
        "needle\n",
        options.task, options.samples);
    fmt::print("{:>9} {:>6} {:>14} {:>14} {:>14} {:>13} {:>6}\n", "length", "depth", "exact", "", "answers right",
               "tokens right", "gain");
    const auto print = [this](std::int64_t length, const auto& row) { print_row(length, row); };
    const auto report = lm::run_needle(opened, texts.documents, options, print);
    auto out = to_json(report.cells, opened.model().config().nsa);
    if (options.diagnose) out["diagnosis"] = diagnosis(report.reads);
    json.write(out);
  }

  /// Prints the KV heads that carry retrieval, and whether misses come from the selection.
  static nlohmann::json diagnosis(const std::vector<lm::NeedleRead>& reads) {
    const auto heads = lm::retrieval_heads(reads);
    nlohmann::json out = {{"heads", nlohmann::json::array()}, {"misses", nlohmann::json::array()}};
    fmt::print(
        "\nblock of the answer, read by the query that copies it: share selected, median rank, attention mass\n");
    fmt::print("{:>5} {:>7} {:>8}  {:>9} {:>6} {:>6}  {:>9} {:>6} {:>6}\n", "layer", "KV head", "carries", "hits: sel.",
               "rank", "mass", "misses", "rank", "mass");
    const auto mean = [](const lm::RetrievalHead::Mean& of) -> nlohmann::json {
      return {
          {"selected", of.selected}, {"median_rank", of.median_rank}, {"mass", of.mass}, {"dense_mass", of.dense_mass}};
    };
    for (const auto& head : heads) {
      fmt::print("{:>5} {:>7} {:>8}  {:>10.2f} {:>6} {:>6.3f}  {:>9.2f} {:>6} {:>6.3f}\n", head.layer, head.kv_head,
                 head.carries ? "yes" : "", head.hits.selected, head.hits.median_rank, head.hits.mass,
                 head.misses.selected, head.misses.median_rank, head.misses.mass);
      out["heads"].push_back({{"layer", head.layer},
                              {"kv_head", head.kv_head},
                              {"carries", head.carries},
                              {"hits", mean(head.hits)},
                              {"misses", mean(head.misses)}});
    }
    std::size_t lost = 0;
    for (const auto& read : reads) {
      if (read.exact) continue;
      const bool not_selected = lm::block_not_selected(read, heads);
      lost += not_selected;
      out["misses"].push_back({{"length", read.length},
                               {"depth", read.depth},
                               {"sample", read.sample},
                               {"not_selected", not_selected},
                               {"blocks", read.blocks}});
    }
    const auto misses = out["misses"].size();
    fmt::print("misses: {} of {}; block not selected by any head that carries retrieval: {}; selected, not used: {}\n",
               misses, reads.size(), lost, misses - lost);
    return out;
  }

  /// One line per depth; a darker shade is better.
  void print_row(std::int64_t length, const std::vector<lm::NeedleCell>& row) const {
    static const std::string shades = " .:-=+*#%@";
    for (std::size_t d = 0; d < row.size(); ++d) {
      const auto& cell = row[d];
      const double exact = cell.exact / static_cast<double>(options.samples);
      const auto [low, high] = lm::wilson_interval(cell.exact, options.samples);
      const auto shade = shades[static_cast<std::size_t>(exact * static_cast<double>(shades.size() - 1))];
      fmt::print("{:>9} {:>6.2f} {:>6}{}{}{} {:>5.1f} {:>14} {:>14.1f} {:>13.1f} {:>6.2f}\n", length, options.depths[d],
                 "", shade, shade, shade, 100 * exact, fmt::format("{:.1f} - {:.1f}", 100 * low, 100 * high),
                 100 * cell.answers, 100 * cell.accuracy, cell.loss_without - cell.loss);
    }
    std::fflush(stdout);
  }

  nlohmann::json to_json(const std::vector<std::vector<lm::NeedleCell>>& cells, const NSAConfig& nsa) const {
    nlohmann::json out = {{"kind", "nsa-needle"},       {"checkpoint", checkpoint.path}, {"set", checkpoint.changes},
                          {"lengths", options.lengths}, {"depths", options.depths},      {"samples", options.samples}};
    out["task"] = options.task;
    if (options.task != "single") out["lines"] = options.lines;
    baseline.describe(out, nsa, options.lengths);
    for (const auto& row : cells) {
      std::map<std::string, nlohmann::json> lines;
      for (const auto& cell : row) {
        lines["accuracy"].push_back(cell.accuracy);
        lines["answers"].push_back(cell.answers);
        lines["exact"].push_back(cell.exact / static_cast<double>(options.samples));
        lines["exact_interval"].push_back(lm::wilson_interval(cell.exact, options.samples));
        lines["loss"].push_back(cell.loss);
        lines["loss_without_needle"].push_back(cell.loss_without);
      }
      for (const auto& [name, line] : lines) out[name].push_back(line);
    }
    return out;
  }
};

}  // namespace

void add_needle(CLI::App& app) {
  static std::unique_ptr<NeedleCommand> state;  // the callback refers to it
  state = std::make_unique<NeedleCommand>();
  auto* const command =
      app.add_subcommand("needle", "Measure needle retrieval: key-value needles at several depths of long contexts.");
  auto& options = state->options;
  state->checkpoint.add(*command);
  command->add_option("--data", state->data, "Text files or folders for the haystack; default: the held-out documents");
  command
      ->add_option("--lengths", options.lengths,
                   "Context lengths, tokens, comma-separated; default: 1/8, 1/4, 1/2 and all of the training context")
      ->delimiter(',')
      ->check(CLI::Range(64, 1 << 24));
  command->add_option("--depths", options.depths, "Needle depths, comma-separated; 0: start, 1: end of the context")
      ->delimiter(',')
      ->check(CLI::Range(0.0, 1.0));
  command->add_option("--samples", options.samples, "Number of samples per length and depth")
      ->check(CLI::Range(1, 100000));
  command
      ->add_option(
          "--task", options.task,
          "Task, as in RULER: single; multikey: the others of --lines have other keys; multivalue: the same "
          "key, all values are asked for in order; multiquery: all lines are asked for; tracking: each value is "
          "the key of the next line. --depths places the first line, the others are anywhere")
      ->check(CLI::IsMember(lm::needle_tasks()));
  command->add_option("--lines", options.lines, "Key-value lines in the context, for --task other than single")
      ->check(CLI::Range(2, 1024));
  command->add_option("--needle", options.needle, "Needle template with the placeholders {key} and {value}")
      ->default_str("'\\n{key} = {value}\\n'");
  command
      ->add_option("--question", options.question, "Question template at the end of the context; the answer is {value}")
      ->default_str("'\\n{key} = '");
  command->add_option("--seed", options.seed, "Seed of needle positions, keys and values");
  command->add_flag("--diagnose", options.diagnose,
                    "Report by layer and KV head how the block of each answer is read, for attention nsa");
  state->baseline.add(*command);
  command->add_option("--dtype", state->dtype, "Data type of matmuls and attention: float32 or bfloat16")
      ->check(CLI::IsMember({"float32", "bfloat16"}));
  state->machine.add(*command);
  state->json.add(*command, "the results");
  command->callback([] { state->run(); });
}

}  // namespace nsa::cli
