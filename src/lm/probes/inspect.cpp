#include "lm/probes/inspect.h"

#include <ATen/core/grad_mode.h>
#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>

#include "base/error.h"

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

}  // namespace

std::vector<LayerView> inspect(const Model& model, const std::vector<std::int64_t>& tokens, int num_queries) {
  const auto& config = model.config();
  if (config.attention != AttentionKind::kNsa) {
    throw Error(fmt::format("attention {}: only a model with attention nsa selects blocks", name_of(config.attention)));
  }
  const at::NoGradGuard no_grad;
  std::vector<LayerTrace> trace;
  ForwardOptions options;
  options.trace = &trace;
  model.forward(single(tokens), options);

  const auto length = static_cast<std::int64_t>(tokens.size());
  const std::array<std::int32_t, 2> offsets = {0, static_cast<std::int32_t>(length)};
  std::vector<LayerView> layers;
  for (const LayerTrace& seen : trace) {
    auto& layer = layers.emplace_back();
    const auto gates = seen.gates.to(at::kFloat).mean(0).cpu();  // (H, 3)
    layer.gates = three(gates.mean(0));
    for (std::int64_t h = 0; h < gates.size(0); ++h) layer.gates_by_head.push_back(three(gates[h]));
    const auto chosen = seen.indices.cpu();
    const auto* const indices = chosen.const_data_ptr<std::int32_t>();
    for (int head = 0; head < config.num_kv_heads; ++head) {
      layer.kv_heads.push_back({selection_stats({indices, static_cast<std::size_t>(chosen.numel())}, offsets,
                                                config.nsa, config.num_kv_heads, head),
                                make_map(indices, length, config.nsa, config.num_kv_heads, head, num_queries)});
    }
  }
  return layers;
}

void to_json(nlohmann::json& json, const LayerView& layer) {
  json["gates"] = {{"cmp", layer.gates[0]}, {"slc", layer.gates[1]}, {"swa", layer.gates[2]}};
  json["gates_by_head"] = layer.gates_by_head;
  for (std::size_t head = 0; head < layer.kv_heads.size(); ++head) {
    const auto& [stats, map] = layer.kv_heads[head];
    json["kv_heads"].push_back(
        {{"kv_head", head},
         {"unforced_share", stats.unforced_share},
         {"entropy", stats.entropy},
         {"entropy_max", stats.entropy_max},
         {"neighbour_overlap", stats.neighbour_overlap},
         {"map", {{"query_positions", map.query_positions}, {"blocks", map.blocks}, {"forced", map.forced}}}});
  }
}

}  // namespace nsa::lm
