// Attention of a layer within packed sequences, of one of the three kinds.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "bridge/compression.h"
#include "lm/layers/rope.h"
#include "lm/model/config.h"
#include "lm/model/model.h"
#include "lm/model/selector_loss.h"

namespace nsa::lm {

/// What attention reads, made from a layer's input. `full` and `window` use q, k_slc and v_slc alone.
struct AttentionInputs {
  at::Tensor q;                                         // (rows, H, Dk), rotated
  at::Tensor k_cmp, v_cmp, k_slc, v_slc, k_swa, v_swa;  // (rows, Hkv, D); k_slc, k_swa rotated
  at::Tensor gates;                                     // (rows, H, 3); (rows, H, 1) of a model that is `gated`
};

/// What all layers of one forward share.
struct ForwardState {
  at::Tensor cu_seqlens;              // on the model's device
  std::vector<std::int64_t> offsets;  // cu_seqlens on the host
  std::int64_t longest = 1;           // sequence, tokens
  Rotation rotation;                  // at each token's position in its sequence
  Rotation table;                     // of every position
  ForwardOptions options;
  std::optional<SelectorSample> sample;  // of the selector loss, if it is on and a query can select
};

/// Attention within packed sequences; `layer` is the layer's number, `trace` may be null.
at::Tensor packed_attention(const ModelConfig& config, const bridge::CompressionTensors& phi_k,
                            const bridge::CompressionTensors& phi_v, const AttentionInputs& in,
                            const ForwardState& state, int layer, LayerTrace* trace);

}  // namespace nsa::lm
