#include "lm/train/evaluate.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cross_entropy_loss.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <span>

#include "base/device.h"
#include "base/error.h"
#include "lm/model/selection_stats.h"

namespace nsa::lm {
namespace {

/// 0, 16, 32, 48, 64, 96, 128, 192, ...: powers of two and their middles.
std::vector<std::int64_t> position_edges(std::int64_t context) {
  std::vector<std::int64_t> edges = {0, 16, 32};
  for (std::int64_t edge = 32; edge < context; edge *= 2) {
    edges.push_back(edge + edge / 2);
    edges.push_back(2 * edge);
  }
  while (edges.size() > 2 && edges[edges.size() - 2] >= context) edges.pop_back();
  return edges;
}

std::int64_t length_of(const PackedSequence& row) {
  std::int64_t length = 0;
  for (const Span& span : row) length += span.length;
  return length;
}

}  // namespace

at::Tensor token_losses(const at::Tensor& logits, const at::Tensor& targets) {
  return at::cross_entropy_loss(logits, upload(targets, logits.device()), {}, at::Reduction::None);
}

std::vector<LayerScalars> layer_scalars(const Model& model, const Batch& batch, const std::vector<LayerTrace>& trace) {
  const auto& config = model.config();
  const std::span<const std::int32_t> offsets(batch.cu_seqlens.const_data_ptr<std::int32_t>(),
                                              static_cast<std::size_t>(batch.cu_seqlens.numel()));
  std::vector<LayerScalars> layers;
  std::vector<at::Tensor> chosen;
  for (const LayerTrace& layer : trace) {
    const auto gates = layer.gates.detach().to(at::kFloat).mean(at::IntArrayRef{0, 1}).cpu();
    layers.push_back(
        {.gate_cmp = gates[0].item<float>(), .gate_slc = gates[1].item<float>(), .gate_swa = gates[2].item<float>()});
    chosen.push_back(layer.indices.cpu());
  }
  // A GPU waits for this: all threads take part.
  at::parallel_for(0, static_cast<std::int64_t>(layers.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
      const std::span<const std::int32_t> indices(chosen[i].const_data_ptr<std::int32_t>(),
                                                  static_cast<std::size_t>(chosen[i].numel()));
      for (int head = 0; head < config.num_kv_heads; ++head) {
        const auto stats = selection_stats(indices, offsets, config.nsa, config.num_kv_heads, head);
        layers[i].unforced_share += stats.unforced_share / config.num_kv_heads;
        layers[i].selection_entropy += stats.entropy / config.num_kv_heads;
        layers[i].neighbour_overlap += stats.neighbour_overlap / config.num_kv_heads;
      }
    }
  });
  return layers;
}

void to_json(nlohmann::json& json, const LayerScalars& scalars) {
  json = {{"gate_cmp", scalars.gate_cmp},
          {"gate_slc", scalars.gate_slc},
          {"gate_swa", scalars.gate_swa},
          {"unforced_share", scalars.unforced_share},
          {"selection_entropy", scalars.selection_entropy},
          {"neighbour_overlap", scalars.neighbour_overlap}};
}

void to_json(nlohmann::json& json, const Evaluation& evaluation) {
  json = {{"loss", evaluation.loss}, {"bits_per_byte", nullptr}, {"eval_tokens", evaluation.tokens}};
  if (evaluation.bits_per_byte) json["bits_per_byte"] = *evaluation.bits_per_byte;
  json["loss_by_position"] = nlohmann::json::array();
  for (const auto& part : evaluation.by_position) {
    json["loss_by_position"].push_back(
        {{"from", part.from}, {"to", part.to}, {"loss", part.loss}, {"tokens", part.tokens}});
  }
  if (!evaluation.layers.empty()) json["layers"] = evaluation.layers;
}

std::vector<PackedSequence> choose_rows(const std::vector<PackedSequence>& rows, std::int64_t max_tokens) {
  std::int64_t total = 0;
  for (const PackedSequence& row : rows) total += length_of(row);
  if (max_tokens <= 0 || total <= max_tokens) return rows;
  const auto count = std::max<std::int64_t>(1, static_cast<std::int64_t>(rows.size()) * max_tokens / total);
  std::vector<PackedSequence> chosen;
  for (std::int64_t i = 0; i < count; ++i) {
    chosen.push_back(rows[static_cast<std::size_t>(i * static_cast<std::int64_t>(rows.size()) / count)]);
  }
  return chosen;
}

Evaluation evaluate(const Model& model, const std::vector<Document>& documents, const std::vector<PackedSequence>& rows,
                    bool byte_level) {
  const at::NoGradGuard no_grad;
  Evaluation result;
  std::int64_t longest = 1;
  for (const PackedSequence& row : rows) {
    for (const Span& span : row) longest = std::max(longest, span.length);
  }
  const auto edges = position_edges(longest);
  for (std::size_t i = 0; i + 1 < edges.size(); ++i) {
    result.by_position.push_back({edges[i], std::min(edges[i + 1], longest), 0, 0});
  }
  std::vector<LayerTrace> trace;
  for (const PackedSequence& row : rows) {
    const auto batch = make_batch(documents, {row});
    ForwardOptions options;
    options.trace = &trace;
    const auto losses = token_losses(model.forward(batch.batch, options), batch.targets).contiguous().cpu();
    const float* loss = losses.const_data_ptr<float>();
    for (const Span& span : row) {
      auto part = result.by_position.begin();
      for (std::int64_t t = 0; t < span.length; ++t, ++loss) {
        while (t >= part->to) ++part;
        part->loss += *loss;
        ++part->tokens;
      }
    }
    if (&row == &rows.back() && model.config().attention == AttentionKind::kNsa) {
      result.layers = layer_scalars(model, batch.batch, trace);
    }
  }
  for (auto& part : result.by_position) {
    result.loss += part.loss;
    result.tokens += part.tokens;
    if (part.tokens > 0) part.loss /= static_cast<double>(part.tokens);
  }
  if (result.tokens > 0) result.loss /= static_cast<double>(result.tokens);
  if (!std::isfinite(result.loss)) throw Failure("the loss on held-out documents is not finite");
  if (byte_level) result.bits_per_byte = result.loss / std::log(2.0);
  return result;
}

}  // namespace nsa::lm
