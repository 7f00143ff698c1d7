// Loss on held-out documents, and by position in the context.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <vector>

#include "lm/data/corpus.h"
#include "lm/data/packing.h"
#include "lm/data/tokenizer.h"
#include "lm/model/model.h"

namespace nsa::lm {

/// Mean over the tokens of a range of positions, or of distances.
struct LossPart {
  std::int64_t from = 0, to = 0;  // `to` excluded
  double loss = 0;                // nats per token
  std::int64_t tokens = 0;
};

/// Nats, and of how many tokens.
struct LossSum {
  double loss = 0;
  std::int64_t tokens = 0;
  void add(double nats, std::int64_t count) { loss += nats, tokens += count; }
  double mean() const { return tokens > 0 ? loss / static_cast<double>(tokens) : 0; }
};

/// Of one row, the sums of each part below.
struct RowLosses {
  std::vector<LossSum> by_position, by_recurrence;
  LossSum sum() const;
};
/// Nats and tokens of the row and, in lists, of its parts.
void to_json(nlohmann::json& json, const RowLosses& row);

/// What the attention of one layer did, averaged over tokens and heads.
struct LayerScalars {
  int layer = 0;
  double gate_cmp = 0, gate_slc = 0, gate_swa = 0;
  double unforced_share = 0, selection_entropy = 0, neighbour_overlap = 0;
  std::optional<double> selector_loss;  // where it was computed
};
/// Of the layers that are sparse.
std::vector<LayerScalars> layer_scalars(const Model& model, const Batch& batch, const std::vector<LayerTrace>& trace);
void to_json(nlohmann::json& json, const LayerScalars& scalars);

struct Evaluation {
  double loss = 0;  // nats per token
  std::optional<double> bits_per_byte;
  std::int64_t tokens = 0;
  std::vector<LossPart> by_position;  // in the context
  /// By the distance to the previous occurrence of the token after the same `recurrence_match` tokens. The last part, 0
  /// to 0, holds the tokens without one in the context.
  std::vector<LossPart> by_recurrence;
  std::int64_t recurrence_match = 0;
  std::vector<RowLosses> rows;
  std::vector<LayerScalars> layers;  // of the row evaluated last; attention `nsa` only
};
void to_json(nlohmann::json& json, const LossPart& part);
void to_json(nlohmann::json& json, const Evaluation& evaluation);

/// The sum of each row.
std::vector<LossSum> row_losses(const Evaluation& evaluation);

/// Evenly spaced rows that together hold about `max_tokens`; all of them where that is 0.
std::vector<PackedSequence> choose_rows(const std::vector<PackedSequence>& rows, std::int64_t max_tokens);

/// Without gradients. `tokenizer` tells how many bytes of text a token has (the end of a document counts as one), for
/// bits per byte; it may be null. `attention`: see ForwardOptions. Throws Failure when the loss is not finite.
Evaluation evaluate(const Model& model, const std::vector<Document>& documents, const std::vector<PackedSequence>& rows,
                    const Tokenizer* tokenizer, const SequenceAttention& attention = {});

/// Negative log-likelihood of each target, float32 (total), on the logits' device; differentiable. `targets` in host
/// memory.
at::Tensor token_losses(const at::Tensor& logits, const at::Tensor& targets);

}  // namespace nsa::lm
