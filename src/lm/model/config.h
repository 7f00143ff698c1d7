// The shape of a language model, and its JSON form in config.json.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "lm/layers/rope_frequencies.h"
#include "nsa/config.h"

namespace nsa::lm {

enum class AttentionKind {
  kNsa,     // compressed, selected and sliding window attention, gated
  kFull,    // causal attention to everything: torch's scaled_dot_product_attention
  kWindow,  // sliding window attention alone
};

const char* name_of(AttentionKind kind);
/// Throws Error naming what is allowed.
AttentionKind attention_kind(const std::string& name);

struct ModelConfig {
  AttentionKind attention = AttentionKind::kNsa;
  int vocab_size = 257;
  int num_layers = 4;
  int hidden_size = 256;
  int num_heads = 8;     // H
  int num_kv_heads = 2;  // Hkv, divides H
  int head_dim = 32;     // Dk, even
  int v_head_dim = 32;   // Dv
  int ffn_size = 768;    // SwiGLU's inner width
  double rope_theta = 10000;
  RopeScaling rope;
  double norm_eps = 1e-6;
  bool tied_head = true;  // the embedding makes the logits, too
  bool qk_norm = false;   // RMSNorm of each head's queries and keys, before the rotation
  bool gated = false;     // attention `full` and `window`: a gate of its own on each head's output, as `nsa` has

  // Attention `nsa` only; `window` uses nsa.window_size.
  NSAConfig nsa;
  CompressionKind phi = CompressionKind::kMlp;
  int phi_hidden = 0;             // E; 0: 2 * D
  bool phi_per_kv_head = false;   // one phi for each KV head instead of one for all
  bool share_kv = false;          // one key and one value projection for the three branches
  std::vector<int> dense_layers;  // numbers, from 0 and ascending, of the layers that keep full attention

  /// Throws Error naming the field, its value and the rule.
  void validate() const;
  /// Of one layer alone: attention is `full` where the layer is dense.
  ModelConfig of_layer(int layer) const;
  bool operator==(const ModelConfig&) const = default;
};

void to_json(nlohmann::json& json, const ModelConfig& config);
/// Throws Error naming a field that is missing, unknown or of the wrong type.
void from_json(const nlohmann::json& json, ModelConfig& config);

/// `config` with the keys and values, the blocks and the rotation of "recipe", which ends ahead of full attention in
/// small models (docs/findings/training), or of "paper" (2502.11089). The recipe has partial RoPE (0.5) for NSA, full
/// RoPE for full and window attention. Throws Error naming what is allowed.
ModelConfig with_preset(ModelConfig config, const std::string& name);

/// `config` with each "field=value" of `changes` in place, e.g. "topk=32". Throws Error naming what is unknown or not
/// allowed.
ModelConfig with_changes(const ModelConfig& config, const std::vector<std::string>& changes);

}  // namespace nsa::lm
