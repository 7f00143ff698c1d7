// One layer of the decoder: x + attention(norm(x)), then x + ffn(norm(x)), the last sum left to the next norm.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "bridge/compression.h"
#include "lm/layers/norm.h"
#include "lm/layers/rope.h"
#include "lm/model/attention.h"
#include "lm/model/config.h"
#include "lm/model/parameters.h"

namespace nsa::lm {

/// The weights of a layer as a forward uses them: in the compute dtype, projections of one input joined into one
/// matrix. Made for every training step, so that gradients reach the parameters, and once by Model::fuse().
struct BlockWeights {
  at::Tensor attention_norm, ffn_norm;  // float32 (hidden)
  at::Tensor q_norm;                    // float32 (Dk); undefined without
  std::vector<at::Tensor> k_norm;       // of each set of keys; or none
  at::Tensor in_proj;                   // q, k of each branch, v of each branch, gate.0, one below the other
  at::Tensor gate_bias;                 // of gate.0
  at::Tensor gate_out, gate_out_bias;   // gate.2
  at::Tensor o_proj;
  at::Tensor ffn_in;  // gate_proj above up_proj
  at::Tensor ffn_out;
  bridge::CompressionTensors phi_k, phi_v;
  bool weights_ready = false;  // LinearWeight::weights_ready
};

class Block {
 public:
  Block(ParameterStore& store, const std::string& prefix, const ModelConfig& config);

  /// In the dtype, until fuse() has settled it.
  BlockWeights weights(at::ScalarType dtype) const;
  /// Keeps these weights in place of the parameters.
  void fuse(at::ScalarType dtype);
  /// Of this layer: ModelConfig::of_layer.
  const ModelConfig& config() const { return config_; }
  /// φ of keys: the parameters, or what is left of them.
  const bridge::CompressionTensors& phi_k() const { return fused_ ? fused_->phi_k : parameters_.phi_k; }

 private:
  struct Parameters {
    at::Tensor attention_norm, q_proj, o_proj;
    std::vector<at::Tensor> k_proj, v_proj;  // cmp, slc, swa; or one
    at::Tensor q_norm;
    std::vector<at::Tensor> k_norm;
    at::Tensor gate_0, gate_0_bias, gate_2, gate_2_bias;
    bridge::CompressionTensors phi_k, phi_v;
    at::Tensor ffn_norm, gate_proj, up_proj, down_proj;
  };

  ModelConfig config_;
  Parameters parameters_;
  std::optional<BlockWeights> fused_;
};

/// A full layer, in which `attend` gives (rows, H, Dv); `rotation` holds each row's angles.
using Attend = std::function<at::Tensor(const AttentionInputs&)>;
Residual block_forward(const ModelConfig& config, const BlockWeights& weights, const Residual& in,
                       const Rotation& rotation, const Attend& attend);

}  // namespace nsa::lm
