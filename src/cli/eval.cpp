// nsa eval: loss on held-out documents, by position in the context and by recurrence distance.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "cli/baseline.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "lm/data/packing.h"
#include "lm/train/compare.h"
#include "lm/train/evaluate.h"

namespace nsa::cli {
namespace {

constexpr const char *kAgainst = "--against", *kWindow = "--window";

std::string interval(const lm::Difference& difference) {
  if (!difference.half_width) return fmt::format("{:+.4f}", difference.mean);
  return fmt::format("{:+.4f} +- {:.4f}", difference.mean, *difference.half_width);
}

struct EvalCommand {
  CheckpointOptions checkpoint;
  JsonOption json;
  std::vector<std::string> data;
  std::string against, window;
  std::int64_t context = 0, tokens = 262144;
  BaselineOptions baseline;
  MachineOptions machine;

  /// Another run on the same rows.
  lm::Evaluation evaluate(const std::string& path, std::string_view option, const lm::OpenedCheckpoint& first,
                          const lm::OpenedTexts& texts, const std::vector<lm::PackedSequence>& rows) const {
    const auto other = lm::open_checkpoint(path, {}, first.model().device(), checkpoint.ids.empty());
    const auto attention = other.model().config().attention;
    if (option == kWindow && attention != lm::AttentionKind::kWindow) {
      throw base::Error(fmt::format("{} {}: attention {}: must be window", option, path, lm::name_of(attention)));
    }
    const auto expected = first.loaded.tokenizer, found = other.loaded.tokenizer;
    const int vocab = first.model().config().vocab_size;
    if (found != expected || other.model().config().vocab_size != vocab) {
      throw base::Error(fmt::format("{} {}: tokenizer '{}' of {} tokens: must be '{}' of {}, that of {}", option, path,
                                    found, other.model().config().vocab_size, expected, vocab, checkpoint.path));
    }
    return lm::evaluate(other.model(), texts.documents, rows, other.tokenizer.get());
  }

  void run() {
    if (!window.empty() && against.empty()) {
      throw base::Error("--window: needs --against, a run with full attention");
    }
    json.open();
    const auto device = machine.choose();
    const auto opened = checkpoint.open(device.device);
    const auto attention = baseline.of(opened.model().config());
    const auto texts = checkpoint.texts(opened, data);
    const auto length = context > 0 ? context : opened.loaded.context;
    const auto rows = lm::choose_rows(lm::pack_documents(texts.documents, length), tokens);
    if (rows.empty()) throw base::Error(fmt::format("{}: no text of two tokens or more to predict", texts.source));
    const auto result = lm::evaluate(opened.model(), texts.documents, rows, opened.tokenizer.get(), attention);
    nlohmann::json out = {{"kind", "nsa-eval"},   {"checkpoint", checkpoint.path},       {"set", checkpoint.changes},
                          {"data", texts.source}, {"documents", texts.documents.size()}, {"tokens", result.tokens},
                          {"context", length}};
    baseline.describe(out, opened.model().config().nsa, {length});
    out.update(nlohmann::json(result));
    out["rows"] = result.rows;

    fmt::print("device: {}\n", device.text);
    fmt::print("{}: {} tokens of {}, context {}\n", checkpoint.path, result.tokens, texts.source, length);
    baseline.print(opened.model().config().nsa, length);
    fmt::print("loss {:.4f} nats/token", result.loss);
    if (result.bits_per_byte) fmt::print(", {:.4f} bits/byte", *result.bits_per_byte);
    fmt::print("\n");
    std::optional<lm::Comparison> difference;
    if (!against.empty()) {
      const auto theirs = evaluate(against, kAgainst, opened, texts, rows);
      difference = lm::compare(result, theirs);
      out["against"] = *difference;
      out["against"].update({{"checkpoint", against}, {"loss", theirs.loss}});
      fmt::print("{}: {:.4f}; difference {} (95 % interval over {} rows)\n", against, theirs.loss,
                 interval(difference->all), rows.size());
      if (!window.empty()) {
        const auto& nsa = opened.model().config().nsa;
        const std::int64_t selected = std::int64_t{nsa.topk} * nsa.block_size;
        const auto floor = evaluate(window, kWindow, opened, texts, rows);
        nlohmann::json retained = {{"checkpoint", window}, {"loss", floor.loss}};
        fmt::print("{}: {:.4f}; retained long-range gain: ", window, floor.loss);
        for (const auto& [name, text, from] :
             {std::tuple{"retained_gain", "", std::int64_t{0}},
              std::tuple{"retained_gain_beyond_selected", "; beyond the selected tokens ", selected}}) {
          const auto share = lm::retained_gain(result, theirs, floor, from);
          retained[name] = nullptr;
          if (share) retained[name] = *share;
          fmt::print("{}{}", text, share ? fmt::format("{:.3f}", *share) : "-");
        }
        fmt::print("\n");
        out["window"] = retained;
      }
    }
    const auto print = [&](const char* what, const std::vector<lm::LossPart>& parts,
                           const std::vector<lm::Difference> lm::Comparison::*differences) {
      fmt::print("\n{:>15}  {:>10}  {:>9}{}\n", what, "nats/token", "tokens", difference ? "  difference" : "");
      for (std::size_t i = 0; i < parts.size(); ++i) {
        const auto& part = parts[i];
        if (part.tokens == 0) continue;
        const auto range =
            part.to > 0 ? fmt::format("{:>6} ..{:>6}", part.from, std::min(part.to - 1, length)) : "others";
        const auto lead = difference ? "  " + interval(((*difference).*differences)[i]) : "";
        fmt::print("{:>15}  {:>10.4f}  {:>9}{}\n", range, part.loss, part.tokens, lead);
      }
    };
    print("position", result.by_position, &lm::Comparison::by_position);
    fmt::print("\nRecurring tokens (after the same {} tokens as before), by distance to the previous occurrence:\n",
               result.recurrence_match);
    print("distance", result.by_recurrence, &lm::Comparison::by_recurrence);
    json.write(out);
  }
};

}  // namespace

void add_eval(CLI::App& app) {
  static std::unique_ptr<EvalCommand> state;  // the callback refers to it
  state = std::make_unique<EvalCommand>();
  auto* const command =
      app.add_subcommand("eval", "Evaluate the loss on held-out documents, by position and by recurrence distance.");
  state->checkpoint.add(*command);
  auto* const data =
      command->add_option("--data", state->data, "Text files or folders; default: the documents that the run held out");
  state->checkpoint.add_ids(*command, "File with one document per line, as token ids")->excludes(data);
  command->add_option("--context", state->context, "Maximum sequence length, tokens; 0: as in training")
      ->check(CLI::Range(0, 1 << 24));
  command->add_option("--tokens", state->tokens, "Approximate number of tokens to evaluate, evenly spread; 0: all")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 50));
  command->add_option(kAgainst, state->against,
                      "Second run to evaluate on the same rows; prints the difference with its 95 % interval");
  command->add_option(
      kWindow, state->window,
      "Run with window attention; prints the retained long-range gain, (L_window - L) / (L_window - L_against)");
  state->baseline.add(*command);
  state->machine.add(*command);
  state->json.add(*command, "the results");
  command->callback([] { state->run(); });
}

}  // namespace nsa::cli
