// nsa inspect: selected blocks, gates and selection recall of a checkpoint on a text.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "bench/recorded_blocks.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "lm/probes/inspect.h"
#include "lm/run/open.h"

namespace nsa::cli {
namespace {

struct InspectCommand {
  CheckpointOptions checkpoint;
  JsonOption json;
  std::vector<std::string> data;
  std::string blocks;
  std::int64_t tokens = 0;
  int queries = 64;
  bool maps = false;
  MachineOptions machine;

  void run() {
    json.open();
    const auto device = machine.choose();
    const auto opened = checkpoint.open(device.device);
    const auto texts = checkpoint.texts(opened, data);
    // The longest document shows most of the selection.
    const auto& document = *std::max_element(
        texts.documents.begin(), texts.documents.end(),
        [](const lm::Document& a, const lm::Document& b) { return a.tokens.size() < b.tokens.size(); });
    const auto wanted = static_cast<std::size_t>(tokens > 0 ? tokens : opened.loaded.context);
    const auto length = std::min(wanted, document.tokens.size());
    const std::vector<std::int64_t> text(document.tokens.begin(),
                                         document.tokens.begin() + static_cast<std::ptrdiff_t>(length));
    const auto layers = lm::inspect(opened.model(), text, queries);
    fmt::print("device: {}\n", device.text);
    fmt::print("{}: the first {} tokens of {}\n", checkpoint.path, length, base::printable(document.name));
    print_table(layers);
    if (!blocks.empty()) record_blocks(layers, opened.model().config().nsa);
    if (maps) print_maps(layers, opened.model().config().nsa.block_size);
    nlohmann::json out = {{"kind", "nsa-inspect"},
                          {"checkpoint", checkpoint.path},
                          {"set", checkpoint.changes},
                          {"document", document.name},
                          {"tokens", length},
                          {"block_size", opened.model().config().nsa.block_size},
                          {"topk", opened.model().config().nsa.topk},
                          {"layers", layers}};
    json.write(out);
  }

  void record_blocks(const std::vector<lm::LayerView>& layers, const NSAConfig& cfg) const {
    std::map<int, bench::RecordedBlocks> recorded;
    for (const auto& layer : layers) {
      const auto* const from = layer.blocks.const_data_ptr<std::int32_t>();
      recorded[layer.layer] = {.length = layer.blocks.size(0),
                               .kv_heads = layer.blocks.size(1),
                               .topk = layer.blocks.size(2),
                               .blocks = {from, from + layer.blocks.numel()}};
    }
    bench::write_blocks(blocks, recorded, cfg);
  }

  static void print_table(const std::vector<lm::LayerView>& layers) {
    fmt::print("{:>5} {:>7}  {:>21}  {:>8}  {:>15}  {:>9}  {:>23}\n", "", "", "mean gate", "not", "entropy of them",
               "shared with", "selection recall");
    fmt::print("{:>5} {:>7}  {:>6} {:>6} {:>7}  {:>8}  {:>7} {:>7}  {:>9}  {:>8} {:>6} {:>7}\n", "layer", "KV head",
               "cmp", "slc", "swa", "forced", "nats", "of most", "neighbour", "selected", "oracle", "random");
    for (const auto& layer : layers) {
      const std::size_t group = layer.gates_by_head.size() / layer.kv_heads.size();
      for (std::size_t head = 0; head < layer.kv_heads.size(); ++head) {
        const auto& [stats, recall, map] = layer.kv_heads[head];
        const auto shares =
            recall ? fmt::format("{:>8.3f} {:>6.3f} {:>7.3f}", recall->selected, recall->oracle, recall->random)
                   : fmt::format("{:>8} {:>6} {:>7}", "-", "-", "-");
        std::array<double, 3> gates{};
        for (std::size_t h = head * group; h < (head + 1) * group; ++h) {
          for (std::size_t b = 0; b < 3; ++b) gates[b] += layer.gates_by_head[h][b] / static_cast<double>(group);
        }
        fmt::print("{:>5} {:>7}  {:>6.3f} {:>6.3f} {:>7.3f}  {:>6.1f} %  {:>7.2f} {:>7.2f}  {:>8.1f}%  {}\n",
                   layer.layer, head, gates[0], gates[1], gates[2], 100 * stats.unforced_share, stats.entropy,
                   stats.entropy_max, 100 * stats.neighbour_overlap, shares);
      }
    }
  }

  /// A line per query, a column per block: '#' selected, '.' forced.
  static void print_maps(const std::vector<lm::LayerView>& layers, int block_size) {
    for (const auto& layer : layers) {
      for (std::size_t head = 0; head < layer.kv_heads.size(); ++head) {
        fmt::print("\nlayer {}, KV head {}: a line per query, a column per block of {} tokens; # selected, . forced\n",
                   layer.layer, head, block_size);
        const auto& map = layer.kv_heads[head].map;
        for (std::size_t q = 0; q < map.blocks.size(); ++q) {
          std::string line(static_cast<std::size_t>(map.query_positions[q] / block_size + 1), ' ');
          for (const auto block : map.blocks[q]) line[static_cast<std::size_t>(block)] = '#';
          for (const auto block : map.forced[q]) line[static_cast<std::size_t>(block)] = '.';
          fmt::print("{:>7} |{}|\n", map.query_positions[q], line);
        }
      }
    }
  }
};

}  // namespace

void add_inspect(CLI::App& app) {
  static std::unique_ptr<InspectCommand> state;  // the callback refers to it
  state = std::make_unique<InspectCommand>();
  auto* const command = app.add_subcommand("inspect", "Print selected blocks, gates and selection recall on a text.");
  state->checkpoint.add(*command);
  auto* const data = command->add_option(
      "--data", state->data, "Text files or folders; the longest document is read; default: the held-out documents");
  state->checkpoint.add_ids(*command, "File with one document per line, as token ids; the longest is read")
      ->excludes(data);
  command->add_option("--tokens", state->tokens, "Number of tokens to read; 0: the training context")
      ->check(CLI::Range(0, 1 << 24));
  command->add_option("--queries", state->queries, "Number of queries in a selection map")
      ->check(CLI::Range(1, 100000));
  command->add_option("--blocks", state->blocks, "File for the selected blocks of all queries, for nsa bench --blocks");
  command->add_flag("--maps", state->maps, "Print the selection maps");
  state->machine.add(*command);
  state->json.add(*command, "the results with the selection maps");
  command->callback([] { state->run(); });
}

}  // namespace nsa::cli
