// Loss on held-out documents, and by position in the context.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <vector>

#include "lm/data/corpus.h"
#include "lm/data/packing.h"
#include "lm/model/model.h"

namespace nsa::lm {

struct PositionLoss {
  std::int64_t from = 0, to = 0;  // positions in the context, `to` excluded
  double loss = 0;                // nats per token
  std::int64_t tokens = 0;
};

/// What the attention of one layer did, averaged over tokens and heads.
struct LayerScalars {
  double gate_cmp = 0, gate_slc = 0, gate_swa = 0;
  double unforced_share = 0, selection_entropy = 0, neighbour_overlap = 0;
};
std::vector<LayerScalars> layer_scalars(const Model& model, const Batch& batch, const std::vector<LayerTrace>& trace);
void to_json(nlohmann::json& json, const LayerScalars& scalars);

struct Evaluation {
  double loss = 0;  // nats per token
  std::optional<double> bits_per_byte;
  std::int64_t tokens = 0;
  std::vector<PositionLoss> by_position;
  std::vector<LayerScalars> layers;  // of the row evaluated last; attention `nsa` only
};
void to_json(nlohmann::json& json, const Evaluation& evaluation);

/// Evenly spaced rows that together hold about `max_tokens`; all of them where that is 0.
std::vector<PackedSequence> choose_rows(const std::vector<PackedSequence>& rows, std::int64_t max_tokens);

/// Without gradients. `byte_level`: a token is a byte, so that bits per byte can be told. Throws Failure when the
/// loss is not finite.
Evaluation evaluate(const Model& model, const std::vector<Document>& documents, const std::vector<PackedSequence>& rows,
                    bool byte_level);

/// Negative log-likelihood of each target, float32 (total), on the logits' device; differentiable. `targets` in host
/// memory.
at::Tensor token_losses(const at::Tensor& logits, const at::Tensor& targets);

}  // namespace nsa::lm
