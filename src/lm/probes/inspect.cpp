#include "lm/probes/inspect.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>
#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>

#include "base/device.h"
#include "base/error.h"
#include "lm/model/selector_loss.h"

namespace nsa::lm {
namespace {

std::array<double, 3> three(const at::Tensor& gates) {
  return {gates[0].item<float>(), gates[1].item<float>(), gates[2].item<float>()};
}

SelectionMap make_map(const std::int32_t* indices, std::int64_t length, const NSAConfig& cfg, int num_kv_heads,
                      int kv_head, int num_queries) {
  SelectionMap map;
  const auto count = std::min<std::int64_t>(num_queries, length);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t t = (i + 1) * length / count - 1;
    const std::int32_t* const row = indices + (t * num_kv_heads + kv_head) * cfg.topk;
    map.query_positions.push_back(t);
    auto& blocks = map.blocks.emplace_back();
    auto& forced = map.forced.emplace_back();
    for (const std::int32_t block : std::span(row, static_cast<std::size_t>(cfg.topk))) {
      if (block < 0) continue;
      blocks.push_back(block);
      if (is_forced(block, t, cfg)) forced.push_back(block);
    }
  }
  return map;
}

/// `q` (S, G, Dk) and `k` (S, 1, Dk) of one KV head.
std::optional<SelectionRecall> selection_recall(const at::Tensor& q, const at::Tensor& k, const SelectionMap& map,
                                                const NSAConfig& cfg) {
  SelectionRecall sum;
  double all = 0;
  const auto positions = base::upload(at::tensor(map.query_positions, at::kLong), q.device());
  const auto attention = block_attention(q.index_select(0, positions), k, positions, cfg).to(at::kDouble).cpu();
  for (std::size_t i = 0; i < map.query_positions.size(); ++i) {
    const std::int64_t t = map.query_positions[i];
    const double* const masses = attention.const_data_ptr<double>() + static_cast<std::int64_t>(i) * attention.size(2);
    std::vector<double> unforced;
    for (std::int64_t b = 0; b <= t / cfg.block_size; ++b) {
      if (!is_forced(b, t, cfg)) unforced.push_back(masses[b]);
    }
    const std::size_t picks = map.blocks[i].size() - map.forced[i].size();
    if (picks >= unforced.size()) continue;
    double total = 0;
    for (const double mass : unforced) total += mass;
    all += total;
    sum.random += total * static_cast<double>(picks) / static_cast<double>(unforced.size());
    for (const auto block : map.blocks[i]) {
      if (!is_forced(block, t, cfg)) sum.selected += masses[block];
    }
    std::sort(unforced.begin(), unforced.end(), std::greater<>());
    for (std::size_t b = 0; b < picks; ++b) sum.oracle += unforced[b];
  }
  if (all == 0) return {};
  return SelectionRecall{sum.selected / all, sum.oracle / all, sum.random / all};
}

/// Of a forward over `tokens`, with keys.
std::vector<LayerTrace> traced(const Model& model, const std::vector<std::int64_t>& tokens) {
  require_selection(model);
  std::vector<LayerTrace> trace;
  ForwardOptions options;
  options.trace = &trace;
  options.trace_keys = true;
  options.logit_rows = at::tensor({0}, at::kLong);
  model.forward(single(tokens), options);
  return trace;
}

}  // namespace

void require_selection(const Model& model) {
  const auto kind = model.config().attention;
  if (kind == AttentionKind::kNsa) return;
  throw base::Error(fmt::format("attention {}: only a model with attention nsa selects blocks", name_of(kind)));
}

std::vector<LayerView> inspect(const Model& model, const std::vector<std::int64_t>& tokens, int num_queries) {
  const at::NoGradGuard no_grad;
  const auto& config = model.config();
  const auto trace = traced(model, tokens);
  const auto length = static_cast<std::int64_t>(tokens.size());
  const std::array<std::int32_t, 2> offsets = {0, static_cast<std::int32_t>(length)};
  std::vector<LayerView> layers;
  for (std::size_t number = 0; number < trace.size(); ++number) {
    const LayerTrace& seen = trace[number];
    if (!seen.gates.defined()) continue;
    auto& layer = layers.emplace_back();
    layer.layer = static_cast<int>(number);
    const auto gates = seen.gates.to(at::kFloat).mean(0).cpu();  // (H, 3)
    layer.gates = three(gates.mean(0));
    for (std::int64_t h = 0; h < gates.size(0); ++h) layer.gates_by_head.push_back(three(gates[h]));
    const auto stats = selection_stats(seen.indices, offsets, config.nsa);
    layer.blocks = seen.indices.cpu().contiguous();
    const auto* const indices = layer.blocks.const_data_ptr<std::int32_t>();
    const std::int64_t group = config.num_heads / config.num_kv_heads;
    for (int head = 0; head < config.num_kv_heads; ++head) {
      auto& view = layer.kv_heads.emplace_back();
      view.stats = stats[static_cast<std::size_t>(head)];
      view.map = make_map(indices, length, config.nsa, config.num_kv_heads, head, num_queries);
      view.recall =
          selection_recall(seen.q.narrow(1, head * group, group), seen.k_slc.narrow(1, head, 1), view.map, config.nsa);
    }
  }
  return layers;
}

std::vector<BlockRead> read_block(const Model& model, const std::vector<std::int64_t>& tokens, std::int64_t place) {
  const at::NoGradGuard no_grad;
  const auto trace = traced(model, tokens);
  const NSAConfig& cfg = model.config().nsa;
  const std::int64_t last = static_cast<std::int64_t>(tokens.size()) - 1, block = place / cfg.block_size;
  const auto numbers = at::arange(last / cfg.block_size + 1, at::kLong);
  const auto unforced = is_eligible(numbers, at::tensor({last}, at::kLong), cfg);
  std::vector<BlockRead> reads;
  for (std::size_t number = 0; number < trace.size(); ++number) {
    const LayerTrace& seen = trace[number];
    if (!seen.gates.defined()) continue;
    const auto positions = base::upload(at::tensor({last}, at::kLong), seen.q.device());
    const auto q = seen.q.narrow(0, last, 1);
    const std::int64_t group = q.size(1) / seen.k_slc.size(1);
    // Each head by itself: its attention to the selected blocks is its own softmax.
    const auto attention =
        block_attention(q, seen.k_slc.repeat_interleave(group, 1), positions, cfg).squeeze(0).to(at::kDouble).cpu();
    const std::int64_t blocks = attention.size(1);
    at::Tensor importances;  // (Hkv, blocks)
    if (last + 1 >= cfg.kernel_size) {
      importances = block_importances(q, model.compressed_keys(number, seen.k_cmp), positions, blocks, cfg)
                        .squeeze(0)
                        .to(at::kDouble)
                        .cpu();
    }
    const auto indices = seen.indices.narrow(0, last, 1).squeeze(0).to(at::kLong).cpu();  // (Hkv, topk)
    for (std::int64_t head = 0; head < indices.size(0); ++head) {
      const auto chosen = indices[head].masked_select(indices[head].ge(0));
      BlockRead read{static_cast<int>(number), static_cast<int>(head)};
      read.selected = chosen.eq(block).any().item<bool>();
      read.forced = is_forced(block, last, cfg);
      const auto masses = attention.narrow(0, head * group, group);  // (G, blocks)
      const auto here = masses.select(1, block);
      read.dense_mass = here.mean().item<double>();
      if (read.selected) read.mass = (here / masses.index_select(1, chosen).sum(1)).mean().item<double>();
      if (importances.defined()) {
        const auto ahead = importances[head].gt(importances[head][block]);
        read.rank = ahead.logical_and(unforced).sum().item<std::int64_t>();
      }
      reads.push_back(read);
    }
  }
  return reads;
}

void to_json(nlohmann::json& json, const BlockRead& read) {
  json = {{"layer", read.layer}, {"kv_head", read.kv_head}, {"selected", read.selected},    {"forced", read.forced},
          {"rank", read.rank},   {"mass", read.mass},       {"dense_mass", read.dense_mass}};
}

void to_json(nlohmann::json& json, const LayerView& layer) {
  json["layer"] = layer.layer;
  json["gates"] = {{"cmp", layer.gates[0]}, {"slc", layer.gates[1]}, {"swa", layer.gates[2]}};
  json["gates_by_head"] = layer.gates_by_head;
  for (std::size_t head = 0; head < layer.kv_heads.size(); ++head) {
    const auto& [stats, recall, map] = layer.kv_heads[head];
    nlohmann::json shares;
    if (recall) shares = {{"selected", recall->selected}, {"oracle", recall->oracle}, {"random", recall->random}};
    json["kv_heads"].push_back(
        {{"kv_head", head},
         {"unforced_share", stats.unforced_share},
         {"entropy", stats.entropy},
         {"entropy_max", stats.entropy_max},
         {"neighbour_overlap", stats.neighbour_overlap},
         {"selection_recall", shares},
         {"map", {{"query_positions", map.query_positions}, {"blocks", map.blocks}, {"forced", map.forced}}}});
  }
}

}  // namespace nsa::lm
