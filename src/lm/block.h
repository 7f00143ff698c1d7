// One layer of the decoder: x + attention(norm(x)), then x + ffn(norm(x)), the last sum left to the next norm.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lm/config.h"
#include "lm/model.h"
#include "lm/norm.h"
#include "lm/ops.h"
#include "lm/rope.h"

namespace nsa::lm {

/// Makes parameters, in order and with their initial values.
class ParameterStore {
 public:
  ParameterStore(NamedTensors& list, std::uint64_t seed);
  at::Tensor normal(const std::string& name, at::IntArrayRef shape, double deviation);
  /// The weight of a linear layer, which starts with outputs `scale` times as large as its inputs, whatever the width.
  at::Tensor matrix(const std::string& name, std::int64_t rows, std::int64_t columns, double scale = 1);
  at::Tensor constant(const std::string& name, at::IntArrayRef shape, double value);
  at::Tensor add(const std::string& name, at::Tensor value);

 private:
  NamedTensors& list_;
  at::Generator generator_;
};

/// The weights of a layer as a forward uses them: in the compute dtype, projections of one input joined into one
/// matrix. Made anew for every training step (so that gradients reach the parameters) and once for a generation.
struct BlockWeights {
  at::Tensor attention_norm, ffn_norm;  // float32 (hidden)
  at::Tensor in_proj;                   // q, k of each branch, v of each branch, gate.0, one below the other
  at::Tensor gate_bias;                 // of gate.0
  at::Tensor gate_out, gate_out_bias;   // gate.2
  at::Tensor o_proj;
  at::Tensor ffn_in;  // gate_proj above up_proj
  at::Tensor ffn_out;
  CompressionTensors phi_k, phi_v;
};

/// What attention reads, made from a layer's input. `full` and `window` use q, k_slc and v_slc alone.
struct Projected {
  at::Tensor q;                                         // (rows, H, Dk), rotated
  at::Tensor k_cmp, v_cmp, k_slc, v_slc, k_swa, v_swa;  // (rows, Hkv, D); k_slc, k_swa rotated
  at::Tensor gates;                                     // (rows, H, 3)
};

/// What all layers of one forward share.
struct ForwardState {
  at::Tensor cu_seqlens;              // on the model's device
  std::vector<std::int64_t> offsets;  // cu_seqlens on the host
  std::int64_t longest = 1;           // sequence, tokens
  Rotation rotation;                  // at each token's position in its sequence
  Rotation table;                     // of every position
  ForwardOptions options;
};

class Block {
 public:
  Block(ParameterStore& store, const std::string& prefix, const ModelConfig& config);

  BlockWeights weights(at::ScalarType dtype) const;

 private:
  ModelConfig config_;
  at::Tensor attention_norm_, q_proj_, o_proj_;
  std::vector<at::Tensor> k_proj_, v_proj_;  // cmp, slc, swa; or one
  at::Tensor gate_0_, gate_0_bias_, gate_2_, gate_2_bias_;
  CompressionTensors phi_k_, phi_v_;
  at::Tensor ffn_norm_, gate_proj_, up_proj_, down_proj_;
};

/// A whole layer, in which `attend` gives (rows, H, Dv); `rotation` holds each row's angles.
using Attend = std::function<at::Tensor(const Projected&)>;
Residual block_forward(const ModelConfig& config, const BlockWeights& weights, const Residual& in,
                       const Rotation& rotation, const Attend& attend);

/// Attention within packed sequences; `layer` is the layer's number, `trace` may be null.
at::Tensor packed_attention(const ModelConfig& config, const BlockWeights& weights, const Projected& in,
                            const ForwardState& state, int layer, LayerTrace* trace);

}  // namespace nsa::lm
