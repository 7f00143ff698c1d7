// What Model is made of; for the model and the cached decoder alone.
#pragma once

#include <vector>

#include "lm/layers/linear.h"
#include "lm/model/block.h"
#include "lm/model/model.h"
#include "lm/model/selector_loss.h"

namespace nsa::lm {

struct Model::Impl {
  ModelConfig config;
  NamedTensors parameters;
  at::Tensor embedding, norm;
  at::Tensor head;        // the embedding where that is tied
  at::Tensor fused_head;  // head_weights(), by fuse()
  std::vector<Block> blocks;
  at::Device device = at::kCPU;
  at::ScalarType dtype = at::kFloat;
  Rotation table;  // grows on demand

  const Rotation& rotation(std::int64_t positions);
  /// The selector losses of the layers that left what their queries of the sample and their keys are.
  void ask_selectors(std::vector<LayerTrace>& trace, const SelectorSample& sample, const Rotation& rotations) const;
  /// The head as logits() multiplies by it, in the compute dtype.
  at::Tensor head_weights() const;
  /// The last norm and the head: (rows, hidden) -> (rows, vocab_size) in the compute dtype.
  at::Tensor logits(const Residual& x, const LinearWeight& head) const;
};

}  // namespace nsa::lm
