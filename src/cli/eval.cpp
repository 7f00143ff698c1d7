// nsa eval: loss on held-out documents, and by position in the context.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "cli/checkpoint.h"
#include "cli/commands.h"
#include "cli/machine.h"
#include "cli/output.h"
#include "lm/data/packing.h"
#include "lm/run/open.h"
#include "lm/train/evaluate.h"

namespace nsa::cli {
namespace {

struct EvalCommand {
  CheckpointOptions checkpoint;
  JsonOption json;
  std::vector<std::string> data;
  std::int64_t context = 0, tokens = 262144;
  MachineOptions machine;

  void run() {
    json.open();
    const auto device = machine.choose();
    const auto opened = lm::open_checkpoint(checkpoint.path, checkpoint.changes, device.device, checkpoint.ids.empty());
    const auto texts = checkpoint.ids.empty() ? lm::open_texts(checkpoint.path, data, *opened.tokenizer)
                                              : lm::open_ids(checkpoint.ids, opened.model());
    const auto length = context > 0 ? context : opened.loaded.context;
    const auto rows = lm::choose_rows(lm::pack_documents(texts.documents, length), tokens);
    const auto result =
        lm::evaluate(opened.model(), texts.documents, rows, opened.tokenizer && opened.tokenizer->is_byte_level());
    fmt::print("device: {}\n", device.text);
    fmt::print("{}: {} tokens of {}, context {}\n", checkpoint.path, result.tokens, texts.source, length);
    fmt::print("loss {:.4f} nats/token", result.loss);
    if (result.bits_per_byte) fmt::print(", {:.4f} bits/byte", *result.bits_per_byte);
    fmt::print("\n\n{:>15}  {:>10}  {:>9}\n", "position", "nats/token", "tokens");
    for (const auto& part : result.by_position) {
      fmt::print("{:>6} ..{:>6}  {:>11.4f}  {:>9}\n", part.from, part.to - 1, part.loss, part.tokens);
    }
    nlohmann::json out = {{"kind", "nsa-eval"},   {"checkpoint", checkpoint.path},       {"set", checkpoint.changes},
                          {"data", texts.source}, {"documents", texts.documents.size()}, {"tokens", result.tokens},
                          {"context", length}};
    out.update(nlohmann::json(result));
    json.write(out);
  }
};

}  // namespace

void add_eval(CLI::App& app) {
  static std::unique_ptr<EvalCommand> state;  // the callback refers to it
  state = std::make_unique<EvalCommand>();
  auto* const command = app.add_subcommand("eval", "Measure the loss on held-out documents, and by position.");
  state->checkpoint.add(*command);
  auto* const data = command->add_option("--data", state->data,
                                         "Text files or folders; without it the documents that the run held out");
  state->checkpoint.add_ids(*command, "File with documents as numbers of tokens, one on each line")->excludes(data);
  command->add_option("--context", state->context, "Longest sequence, tokens; 0: as in training")
      ->check(CLI::Range(0, 1 << 24));
  command->add_option("--tokens", state->tokens, "Evaluate about this many tokens, evenly spread; 0: all")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 50));
  state->machine.add(*command);
  state->json.add(*command, "the results");
  command->callback([] { state->run(); });
}

}  // namespace nsa::cli
