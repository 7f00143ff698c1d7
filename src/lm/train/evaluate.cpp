#include "lm/train/evaluate.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cross_entropy_loss.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
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

/// Bounds of recurrence distances: the default window, the tokens that NSA selects by default, half of a context.
constexpr std::array<std::int64_t, 5> kRecurrenceEdges = {1, 513, 1025, 4097, 1 << 30};

/// For each i >= 1: the distance from the n-gram of `match` tokens and `tokens[i]` to its previous occurrence, or 0
/// without one; tokens.size() - 1 distances.
std::vector<std::int64_t> recurrence_distances(std::span<const std::int32_t> tokens, std::int64_t match) {
  const auto count = static_cast<std::int64_t>(tokens.size());
  std::vector<std::int64_t> distances(static_cast<std::size_t>(std::max<std::int64_t>(0, count - 1)));
  // Where match + 1 tokens ended last, by their hash, with linear probing.
  constexpr std::int64_t kNone = -1;
  std::vector<std::int64_t> last(std::bit_ceil(2 * tokens.size() + 1), kNone);
  constexpr std::uint64_t kBase = 0x9e3779b97f4a7c15;
  std::uint64_t hash = 0, oldest = 1;  // kBase^match
  for (std::int64_t i = 0; i < match; ++i) oldest *= kBase;
  const auto value = [&](std::int64_t i) {
    return static_cast<std::uint64_t>(tokens[static_cast<std::size_t>(i)]) + 1;
  };
  const auto same = [&](std::int64_t i, std::int64_t j) {
    const auto first = tokens.begin() + (i - match);
    return std::equal(first, first + match + 1, tokens.begin() + (j - match));
  };
  for (std::int64_t i = 0; i < count; ++i) {
    if (i > match) hash -= value(i - match - 1) * oldest;
    hash = hash * kBase + value(i);
    if (i < match) continue;
    std::size_t at = (hash ^ hash >> 32) & (last.size() - 1);
    while (last[at] != kNone && !same(last[at], i)) at = (at + 1) & (last.size() - 1);
    if (last[at] != kNone) distances[static_cast<std::size_t>(i - 1)] = i - last[at];
    last[at] = i;
  }
  return distances;
}

/// Of parts with these edges.
std::vector<LossPart> parts_between(std::span<const std::int64_t> edges) {
  std::vector<LossPart> parts;
  for (std::size_t i = 0; i + 1 < edges.size(); ++i) parts.push_back({.from = edges[i], .to = edges[i + 1]});
  return parts;
}

/// Sets the means of `parts`, the sums of each of which are that column of the rows'.
void average(std::vector<LossPart>& parts, const std::vector<RowLosses>& rows, std::vector<LossSum> RowLosses::*sums) {
  for (std::size_t i = 0; i < parts.size(); ++i) {
    LossSum total;
    for (const RowLosses& row : rows) total.add((row.*sums)[i].loss, (row.*sums)[i].tokens);
    parts[i].loss = total.mean();
    parts[i].tokens = total.tokens;
  }
}

std::int64_t bytes_of(const Tokenizer& tokenizer, std::int32_t token) {
  return token == tokenizer.end_of_document() ? 1 : static_cast<std::int64_t>(tokenizer.decode(token).size());
}

std::int64_t length_of(const PackedSequence& row) {
  std::int64_t length = 0;
  for (const Span& span : row) length += span.length;
  return length;
}

}  // namespace

at::Tensor token_losses(const at::Tensor& logits, const at::Tensor& targets) {
  return at::cross_entropy_loss(logits, base::upload(targets, logits.device()), {}, at::Reduction::None);
}

std::vector<LayerScalars> layer_scalars(const Model& model, const Batch& batch, const std::vector<LayerTrace>& trace) {
  const auto& config = model.config();
  const std::span<const std::int32_t> offsets(batch.cu_seqlens.const_data_ptr<std::int32_t>(),
                                              static_cast<std::size_t>(batch.cu_seqlens.numel()));
  std::vector<LayerScalars> layers;
  for (std::size_t number = 0; number < trace.size(); ++number) {
    const LayerTrace& layer = trace[number];
    if (!layer.gates.defined()) continue;
    const auto gates = layer.gates.detach().to(at::kFloat).mean(at::IntArrayRef{0, 1}).cpu();
    LayerScalars& scalars = layers.emplace_back(LayerScalars{.layer = static_cast<int>(number),
                                                             .gate_cmp = gates[0].item<float>(),
                                                             .gate_slc = gates[1].item<float>(),
                                                             .gate_swa = gates[2].item<float>()});
    if (layer.selector_loss.defined()) scalars.selector_loss = layer.selector_loss.item<float>();
    for (const SelectionStats& stats : selection_stats(layer.indices, offsets, config.nsa)) {
      scalars.unforced_share += stats.unforced_share / config.num_kv_heads;
      scalars.selection_entropy += stats.entropy / config.num_kv_heads;
      scalars.neighbour_overlap += stats.neighbour_overlap / config.num_kv_heads;
    }
  }
  return layers;
}

void to_json(nlohmann::json& json, const LayerScalars& scalars) {
  json = {{"layer", scalars.layer},
          {"gate_cmp", scalars.gate_cmp},
          {"gate_slc", scalars.gate_slc},
          {"gate_swa", scalars.gate_swa},
          {"unforced_share", scalars.unforced_share},
          {"selection_entropy", scalars.selection_entropy},
          {"neighbour_overlap", scalars.neighbour_overlap}};
  if (scalars.selector_loss) json["selector_loss"] = *scalars.selector_loss;
}

LossSum RowLosses::sum() const {
  LossSum total;
  for (const LossSum& part : by_position) total.add(part.loss, part.tokens);
  return total;
}

void to_json(nlohmann::json& json, const RowLosses& row) {
  const auto columns = [](const std::vector<LossSum>& parts) {
    nlohmann::json out = {{"loss", nlohmann::json::array()}, {"tokens", nlohmann::json::array()}};
    for (const LossSum& part : parts) out["loss"].push_back(part.loss), out["tokens"].push_back(part.tokens);
    return out;
  };
  const LossSum sum = row.sum();
  json = {{"loss", sum.loss},
          {"tokens", sum.tokens},
          {"by_position", columns(row.by_position)},
          {"by_recurrence", columns(row.by_recurrence)}};
}

void to_json(nlohmann::json& json, const LossPart& part) {
  json = {{"from", part.from}, {"to", part.to}, {"loss", part.loss}, {"tokens", part.tokens}};
}

void to_json(nlohmann::json& json, const Evaluation& evaluation) {
  json = {{"loss", evaluation.loss}, {"bits_per_byte", nullptr}, {"eval_tokens", evaluation.tokens}};
  if (evaluation.bits_per_byte) json["bits_per_byte"] = *evaluation.bits_per_byte;
  json["loss_by_position"] = evaluation.by_position;
  json["loss_by_recurrence"] = evaluation.by_recurrence;
  json["recurrence_match"] = evaluation.recurrence_match;
  if (!evaluation.layers.empty()) json["layers"] = evaluation.layers;
}

std::vector<LossSum> row_losses(const Evaluation& evaluation) {
  std::vector<LossSum> out;
  for (const RowLosses& row : evaluation.rows) {
    out.push_back(row.sum());
  }
  return out;
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
                    const Tokenizer* tokenizer, const SequenceAttention& attention) {
  const at::NoGradGuard no_grad;
  Evaluation result;
  std::int64_t longest = 1;
  for (const PackedSequence& row : rows) {
    for (const Span& span : row) longest = std::max(longest, span.length);
  }
  auto edges = position_edges(longest);
  edges.back() = std::min(edges.back(), longest);
  result.by_position = parts_between(edges);
  result.by_recurrence = parts_between(kRecurrenceEdges);
  result.by_recurrence.push_back({});
  result.recurrence_match = tokenizer && !tokenizer->is_byte_level() ? 3 : 8;
  std::int64_t bytes = 0;
  std::vector<LayerTrace> trace;
  for (const PackedSequence& row : rows) {
    const auto batch = make_batch(documents, {row});
    ForwardOptions options;
    options.trace = &trace;
    options.attention = attention;
    const auto losses = token_losses(model.forward(batch.batch, options), batch.targets).contiguous().cpu();
    const float* loss = losses.const_data_ptr<float>();
    RowLosses& sums = result.rows.emplace_back();
    sums.by_position.resize(result.by_position.size());
    sums.by_recurrence.resize(result.by_recurrence.size());
    for (const Span& span : row) {
      const auto tokens = std::span(documents[static_cast<std::size_t>(span.document)].tokens)
                              .subspan(static_cast<std::size_t>(span.begin), static_cast<std::size_t>(span.length + 1));
      const auto distances = recurrence_distances(tokens, result.recurrence_match);
      std::size_t position = 0;
      for (std::size_t t = 0; t < distances.size(); ++t, ++loss) {
        while (static_cast<std::int64_t>(t) >= result.by_position[position].to) ++position;
        const std::int64_t distance = distances[t];
        const auto part =
            std::find_if(result.by_recurrence.begin(), result.by_recurrence.end() - 1,
                         [&](const LossPart& part) { return distance >= part.from && distance < part.to; });
        sums.by_position[position].add(*loss, 1);
        sums.by_recurrence[static_cast<std::size_t>(part - result.by_recurrence.begin())].add(*loss, 1);
        if (tokenizer) bytes += bytes_of(*tokenizer, tokens[t + 1]);
      }
    }
    if (&row == &rows.back() && model.config().attention == AttentionKind::kNsa) {
      result.layers = layer_scalars(model, batch.batch, trace);
    }
  }
  average(result.by_position, result.rows, &RowLosses::by_position);
  average(result.by_recurrence, result.rows, &RowLosses::by_recurrence);
  LossSum total;
  for (const LossPart& part : result.by_position) total.add(part.loss * static_cast<double>(part.tokens), part.tokens);
  result.loss = total.mean();
  result.tokens = total.tokens;
  if (!std::isfinite(result.loss)) throw base::Failure("the loss on held-out documents is not finite");
  if (bytes > 0) result.bits_per_byte = total.loss / static_cast<double>(bytes) / std::log(2.0);
  return result;
}

}  // namespace nsa::lm
