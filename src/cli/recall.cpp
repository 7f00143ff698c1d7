// nsa recall: trains two small models to recall key-value pairs from beyond the window, with NSA and with the window
// alone.
#include <ATen/Parallel.h>
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "cli/commands.h"
#include "cli/exit.h"
#include "cli/output.h"
#include "lm/recall.h"

namespace nsa::cli {
namespace {

struct RecallCommand {
  lm::RecallOptions options;
  std::string json;
  int threads = 0;
  bool check = false;

  void run() const {
    if (threads > 0) at::set_num_threads(threads);
    const auto& task = options.task;
    const auto model = lm::recall_model(task, lm::AttentionKind::kNsa);
    fmt::print("{} key-value pairs in sequences of {} tokens, window {}, {} selected tokens\n", task.pairs,
               task.length(), model.nsa.window_size, model.nsa.topk * model.nsa.block_size);
    const auto report = lm::run_recall(options, [](const lm::RecallStep& step) {
      fmt::print("step {:>5}  {:>3} pairs  loss {:.3f}  accuracy {:.3f}\n", step.step, step.pairs, step.loss,
                 step.accuracy);
      std::fflush(stdout);
    });
    const auto line = [](const char* name, double share) { fmt::print("{:<40} {:>6.1f} %\n", name, 100 * share); };
    fmt::print("\nright answers on fresh sequences, after {:.0f} s\n", report.seconds);
    line("NSA", report.nsa);
    line("NSA, window gate alone", report.nsa_window_alone);
    line("NSA without the compressed branch", report.nsa_without_cmp);
    line("NSA without the selected branch", report.nsa_without_slc);
    line("window model", report.window);
    line("chance", task.chance());
    write_json(json, report);
    if (check && !report.as_expected()) {
      fmt::print("not as expected: NSA at least 95 %, the window alone at chance\n");
      throw Exit{1};
    }
  }
};

}  // namespace

void add_recall(CLI::App& app) {
  static std::unique_ptr<RecallCommand> state;  // the callback refers to it
  state = std::make_unique<RecallCommand>();
  auto* const command =
      app.add_subcommand("recall", "Train on recalling key-value pairs from beyond the window: NSA and window alone.");
  command->add_option("--seed", state->options.seed, "Of weights and data");
  command->add_option("--steps", state->options.most_steps, "Most optimiser steps; it ends earlier when all is learnt")
      ->check(CLI::Range(1, 1000000));
  command->add_option("--tokens-per-step", state->options.tokens_per_step, "Tokens of an optimiser step")
      ->check(CLI::Range(1, 1 << 24));
  command->add_option("--lr", state->options.lr, "Learning rate of AdamW");
  command->add_option("--threads", state->threads, "0: one for each core")->check(CLI::Range(0, 1024));
  command->add_flag("--check", state->check, "Exit code 1 unless NSA reaches 95 % and the window stays at chance");
  command->add_option("--json", state->json, "Write the results to this file");
  command->callback([] { state->run(); });
}

}  // namespace nsa::cli
