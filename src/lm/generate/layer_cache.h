// The cached keys and values of one layer of one sequence.
#pragma once

#include <cstdint>
#include <memory>

#include "lm/model/block.h"

namespace nsa::lm {

class LayerCache {
 public:
  virtual ~LayerCache() = default;
  /// Appends the projected tokens, `in` (m, heads, D), for which there must be room, and attends: o (m, H, Dv).
  virtual at::Tensor attend(const BlockWeights& weights, const AttentionInputs& in) = 0;
};

/// The cache for the model's kind of attention, of keys and values like `options`. `rotation` is the table that rotates
/// compressed keys; it must outlive the cache.
std::unique_ptr<LayerCache> make_layer_cache(const ModelConfig& config, std::int64_t capacity,
                                             const at::TensorOptions& options, const Rotation& rotation);

}  // namespace nsa::lm
