// nsa recall: trains three small models on associative recall beyond the window: NSA, full and window attention.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/names.h"
#include "cli/baseline.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "lm/probes/recall.h"

namespace nsa::cli {
namespace {

struct RecallCommand {
  lm::RecallOptions options;
  std::string phi = "mlp";
  JsonOption json;
  int length = 0;
  CLI::Option* gap = nullptr;
  bool check = false;
  std::string dtype = "float32";
  std::vector<std::string> baselines;
  std::int64_t budget = 0;
  MachineOptions machine;

  void run() {
    json.open();
    const auto device = machine.choose();
    options.device = device.device;
    options.dtype = dtype == "bfloat16" ? at::kBFloat16 : at::kFloat;
    auto& task = options.task;
    auto& model = options.model;
    if (gap->count() == 0) task.gap = std::max(task.gap, model.num_layers * (model.nsa.window_size - 1) + 1);
    if (length > 0) task = task.stretched(length);
    model.phi = base::compression_kind(phi);
    model.v_head_dim = model.head_dim;
    fmt::print("device: {}\n", device.text);
    if (task.hops > 1) fmt::print("multi-hop recall: {} hops, each answered\n", task.hops);
    fmt::print("{} key-value pairs in sequences of {} tokens, window {}, {} selected tokens\n", task.pairs,
               task.length(), model.nsa.window_size, model.nsa.topk * model.nsa.block_size);
    for (const std::string& name : baselines) {
      const BaselineOptions baseline{name, budget};
      baseline.print(model.nsa, task.length());
      options.baselines.emplace_back(name, baseline.attention(model.nsa));
    }
    const auto report = lm::run_recall(options, [](const lm::RecallStep& step) {
      fmt::print("step {:>5}", step.step);
      print_model("NSA", step.nsa);
      print_model("full attention", step.full);
      fmt::print("\n");
      std::fflush(stdout);
    });
    const auto line = [](const char* name, double share) { fmt::print("{:<40} {:>6.1f} %\n", name, 100 * share); };
    const auto& last = report.history.back();
    for (const auto& [name, model] : {std::pair{"NSA", last.nsa}, {"full attention", last.full}}) {
      if (model.pairs == task.pairs && model.slot == task.slot) continue;
      fmt::print(
          "\nthe steps ended before the sequences of {} reached their full length: accuracy {:.0f} % with {} pairs "
          "every {} "
          "tokens; sequences grow at {:.0f} %\n",
          name, 100 * model.accuracy, model.pairs, model.slot, 100 * lm::kRecallGrowsAt);
    }
    fmt::print("\naccuracy on fresh sequences, after {:.0f} s\n", report.seconds);
    line("NSA", report.nsa.accuracy);
    line("NSA, window gate only", report.nsa_window_gate_only);
    line("NSA without the compressed branch", report.nsa_without_cmp);
    line("NSA without the selected branch", report.nsa_without_slc);
    line("full attention", report.full.accuracy);
    for (std::size_t i = 0; i < baselines.size(); ++i)
      line(("full + " + baselines[i]).c_str(), report.baselines[i].accuracy);
    line("window model", report.window.accuracy);
    line("chance", task.chance());
    std::vector<std::int64_t> hops(static_cast<std::size_t>(task.hops));
    std::iota(hops.begin(), hops.end(), 1);
    if (task.hops > 1) print_table(report, "hop", hops, &lm::RecallScore::by_hop);
    print_table(report, "distance, at least", {report.distances.begin(), report.distances.end() - 1},
                &lm::RecallScore::by_distance);
    if (!options.lengths.empty()) {
      print_table(report, "length", {options.lengths.begin(), options.lengths.end()}, &lm::RecallScore::by_length);
    }
    nlohmann::json out = report;
    if (!baselines.empty()) {
      out["baselines"] = baselines;
      out["budget"] = BaselineOptions{"", budget}.tokens(model.nsa, task.length());
    }
    json.write(out);
    if (check && !report.as_expected()) {
      fmt::print(
          "not as expected: NSA at least 95 % and at most a point behind full attention, window attention at chance\n");
      throw Exit{1};
    }
  }

  static void print_model(const char* name, const lm::RecallStep::Model& model) {
    fmt::print("  {} {:>3} pairs every {:>3} tokens: loss {:.3f} accuracy {:.3f}", name, model.pairs, model.slot,
               model.loss, model.accuracy);
  }

  /// Percent; a row for each model.
  static void print_table(const lm::RecallReport& report, const char* title, const std::vector<std::int64_t>& columns,
                          std::vector<double> lm::RecallScore::*field) {
    fmt::print("\n{:<24}", title);
    for (const auto column : columns) fmt::print("{:>8}", column);
    fmt::print("\n");
    std::vector<std::pair<std::string, const lm::RecallScore*>> rows = {{"NSA", &report.nsa},
                                                                        {"full attention", &report.full}};
    for (std::size_t i = 0; i < report.baselines.size(); ++i) {
      rows.emplace_back("full + " + report.options.baselines[i].first, &report.baselines[i]);
    }
    rows.emplace_back("window model", &report.window);
    for (const auto& [name, score] : rows) {
      fmt::print("{:<24}", name);
      for (const double share : score->*field) fmt::print("{:>8.1f}", 100 * share);
      fmt::print("\n");
    }
  }
};

}  // namespace

void add_recall(CLI::App& app) {
  static std::unique_ptr<RecallCommand> state;  // the callback refers to it
  state = std::make_unique<RecallCommand>();
  auto* const command = app.add_subcommand(
      "recall", "Train small models on associative recall beyond the window: NSA, full and window attention.");
  command->add_option("--seed", state->options.seed, "Seed of weights and data");
  command
      ->add_option("--steps", state->options.max_steps,
                   "Maximum number of optimizer steps; training ends earlier once the task is learned")
      ->check(CLI::Range(1, 1000000));
  command->add_option("--tokens-per-step", state->options.tokens_per_step, "Tokens per optimizer step")
      ->check(CLI::Range(1, 1 << 24));
  auto* const lr = command->add_option("--lr", state->options.lr, "Learning rate of AdamW");
  state->machine.on_cuda(lr->check(CLI::Range(0.0, 1e6)), state->options.lr, 3e-3);  // full attention's wider heads
  command
      ->add_option("--selector-loss", state->options.selector_loss,
                   "Weight of the selector loss of the NSA model, as in nsa train")
      ->check(CLI::Range(0.0, 1e6));
  auto& task = state->options.task;
  const auto count = CLI::Range(1, 1 << 20);
  command->add_option("--pairs", task.pairs, "Number of key-value pairs")->check(count)->group("Task");
  command->add_option("--hops", task.hops, "Number of hops per question; the value of each hop is the key of the next")
      ->check(CLI::Range(1, 64))
      ->group("Task");
  auto* const slot = command->add_option("--slot", task.slot, "Distance between consecutive keys, tokens")
                         ->check(CLI::Range(2, 1024))
                         ->group("Task");
  state->gap = command
                   ->add_option("--gap", task.gap,
                                "Distance from the last pair to the first question, tokens; minimum and default: "
                                "layers * (window size - 1) + 1")
                   ->check(count)
                   ->group("Task");
  const auto length = CLI::Range(16, 1 << 24);
  command->add_option("--length", state->length, "Sequence length, tokens; spreads the pairs over it by setting --slot")
      ->check(length)
      ->excludes(slot)
      ->group("Task");
  command
      ->add_option("--lengths", state->options.lengths,
                   "Additional sequence lengths for evaluation, tokens, comma-separated")
      ->delimiter(',')
      ->check(length)
      ->group("Task");
  command->add_option("--values", task.num_values, "Number of distinct values")->check(count)->group("Task");
  auto& model = state->options.model;
  const auto model_option = [&](const char* name, int& value, const char* help) {
    return command->add_option(name, value, help)->check(count)->group("Model");
  };
  model_option("--layers", model.num_layers, "Number of layers");
  model_option("--hidden-size", model.hidden_size, "Hidden size, channels");
  model_option("--ffn-size", model.ffn_size, "Intermediate size of the feed-forward layers, channels");
  model_option("--heads", model.num_heads, "Number of query heads");
  model_option("--kv-heads", model.num_kv_heads, "Number of key/value heads");
  state->machine.on_cuda(model_option("--head-dim", model.head_dim, "Head dimension of queries, keys and values"),
                         model.head_dim, lm::recall_model(at::kCUDA).head_dim);
  model_option("--kernel-size", model.nsa.kernel_size, "Compression block size l, tokens");
  model_option("--kernel-stride", model.nsa.kernel_stride, "Compression stride d, tokens");
  model_option("--block-size", model.nsa.block_size, "Selection block size l', tokens");
  model_option("--topk", model.nsa.topk, "Selected blocks per query n, forced blocks included");
  model_option("--window-size", model.nsa.window_size, "Sliding window size w, tokens");
  command->add_option("--rope-theta", model.rope_theta, "RoPE base (theta)")
      ->check(CLI::Range(1.0, 1e12))
      ->group("Model");
  command
      ->add_option("--partial-rotary-factor", model.rope.partial_rotary_factor,
                   "Rotary fraction: share of each head's channels that RoPE rotates, 0 to 1")
      ->check(CLI::Range(0.0, 1.0))
      ->group("Model");
  command->add_option("--phi", state->phi, "Compression function phi: mean, linear or mlp")->group("Model");
  command->add_flag("--share-kv", model.share_kv, "Share one key and one value projection between the three branches")
      ->group("Model");
  command->add_option("--dtype", state->dtype, "Data type of matmuls and attention: float32 or bfloat16")
      ->check(CLI::IsMember({"float32", "bfloat16"}));
  add_baseline(*command, state->baselines, state->budget,
               "Training-free sparse attention baselines for the full-attention model, comma-separated")
      ->delimiter(',');
  state->machine.add(*command);
  command->add_flag("--check", state->check,
                    "Exit with code 1 unless NSA reaches 95 %, at most a point behind full attention, and the window "
                    "stays at chance");
  state->json.add(*command, "the results");
  command->callback([] { state->run(); });
}

}  // namespace nsa::cli
