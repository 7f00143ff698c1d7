#include "lm/model/parameter_counts.h"

namespace nsa::lm {
namespace {

/// Of one layer.
ParameterCounts layer_counts(const ModelConfig& config) {
  const std::int64_t hidden = config.hidden_size, heads = config.num_heads, kv_heads = config.num_kv_heads;
  const std::int64_t dk = config.head_dim, dv = config.v_head_dim;
  const std::int64_t kv = hidden * kv_heads * (dk + dv);
  ParameterCounts layer;
  layer.rest = 2 * hidden + hidden * heads * (dk + dv) + kv + 3 * hidden * config.ffn_size;
  if (config.qk_norm) layer.rest += 2 * dk;
  if (config.attention == AttentionKind::kNsa) {
    const std::int64_t sets = config.phi_per_kv_head ? kv_heads : 1, tokens = config.nsa.kernel_size;
    for (const std::int64_t d : {dk, dv}) {
      const std::int64_t width = config.phi_hidden > 0 ? config.phi_hidden : 2 * d;
      if (config.phi == CompressionKind::kLinear) layer.phi += sets * (tokens * d + tokens * d * d + d);
      if (config.phi == CompressionKind::kMlp) {
        layer.phi += sets * (tokens * d + tokens * d * width + width + width * d + d);
      }
    }
    if (!config.share_kv) layer.extra_kv = 2 * (kv + (config.qk_norm ? dk : 0));
  }
  if (const int gates = config.attention == AttentionKind::kNsa ? 3 : config.gated ? 1 : 0; gates > 0) {
    layer.gates = (hidden / 4) * (hidden + 1) + gates * heads * (hidden / 4 + 1);
  }
  return layer;
}

}  // namespace

ParameterCounts parameter_counts(const ModelConfig& config) {
  ParameterCounts sum;
  sum.rest = std::int64_t{config.hidden_size} * (config.vocab_size * (config.tied_head ? 1 : 2) + 1);
  for (int i = 0; i < config.num_layers; ++i) {
    const auto layer = layer_counts(config.of_layer(i));
    sum.phi += layer.phi;
    sum.gates += layer.gates;
    sum.extra_kv += layer.extra_kv;
    sum.rest += layer.rest;
  }
  return sum;
}

int ffn_size_of_equal_parameters(const ModelConfig& config, const ModelConfig& target) {
  const std::int64_t missing = parameter_counts(target).total() - parameter_counts(config).total();
  const std::int64_t column = std::int64_t{3} * config.hidden_size * config.num_layers;
  return static_cast<int>(config.ffn_size + (missing + column / 2) / column);
}

}  // namespace nsa::lm
