// The cached keys and values of one layer.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "lm/model/block.h"

namespace nsa::lm {

/// The sequences that a call appends tokens to, equally many to each.
struct CacheRows {
  std::int64_t first = 0, count = 1;
  std::int64_t start = -1;      // a prompt of one sequence: the tokens ahead; -1: a step of all sequences, m = 1
  std::vector<bool> idle = {};  // (count): those that take none, whose o is finite and has no meaning; empty: none
  at::Tensor num_new = {};      // the same for libnsa, int32 (count) on the device: 0 or m; undefined: m
  // A step's, for dense attention on the device; undefined where no layer has it.
  at::Tensor slots = {};    // int64 (count): where the new token goes, sequence * capacity + its position
  at::Tensor lengths = {};  // int32 (count): with it
};

class LayerCache {
 public:
  virtual ~LayerCache() = default;
  /// Appends m projected tokens to each of the sequences, within the capacity, and attends. `in`
  /// (count * m, heads, D), sequence by sequence; o (count * m, H, Dv).
  virtual at::Tensor attend(const BlockWeights& weights, const AttentionInputs& in, const CacheRows& rows) = 0;
  /// Whether a step is the same kernels every time, which find its lengths on the device.
  virtual bool steps_are_alike() const = 0;
  /// Its memory.
  virtual std::int64_t bytes() const = 0;
};

/// The cache for a layer's kind of attention, of keys and values like `options`: `capacity` tokens of each sequence.
/// `fp8`: what attention reads is stored in e4m3, with scales of 1; the layer's attention must be `nsa`. `rotation` is
/// the table that rotates compressed keys; it must outlive the cache.
std::unique_ptr<LayerCache> make_layer_cache(const ModelConfig& config, std::int64_t sequences, std::int64_t capacity,
                                             const at::TensorOptions& options, bool fp8, const Rotation& rotation);

}  // namespace nsa::lm
