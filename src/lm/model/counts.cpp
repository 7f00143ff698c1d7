#include "lm/model/counts.h"

#include <algorithm>

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

double triangle(std::int64_t n) { return 0.5 * static_cast<double>(n) * static_cast<double>(n + 1); }

/// Pairs of a query and a key at most `window` tokens back, itself included.
double window_pairs(std::int64_t length, std::int64_t window) {
  const std::int64_t growing = std::min(length, window);
  return triangle(growing) + static_cast<double>(length - growing) * static_cast<double>(window);
}

double compressed_pairs(std::int64_t length, const NSAConfig& cfg) {
  // Block i is visible to the queries from i * d + l - 1 on.
  const auto blocks = static_cast<double>(cfg.num_compressed(length));
  return blocks * static_cast<double>(length - cfg.kernel_size + 1) - cfg.kernel_stride * blocks * (blocks - 1) / 2;
}

double selected_pairs(std::int64_t length, const NSAConfig& cfg) {
  const std::int64_t block = cfg.block_size, places = cfg.topk, all = std::min(length, places * block);
  // Behind that, a query sees topk - 1 whole blocks and its own one up to itself.
  const std::int64_t blocks = (length - all) / block, rest = (length - all) % block;
  return triangle(all) + static_cast<double>((places - 1) * block) * static_cast<double>(length - all) +
         static_cast<double>(blocks) * triangle(block) + triangle(rest);
}

double attention_pairs(const ModelConfig& config, std::int64_t length) {
  const NSAConfig& cfg = config.nsa;
  switch (config.attention) {
    case AttentionKind::kNsa:
      return compressed_pairs(length, cfg) + selected_pairs(length, cfg) + window_pairs(length, cfg.window_size);
    case AttentionKind::kWindow:
      return window_pairs(length, cfg.window_size);
    case AttentionKind::kFull:
      break;
  }
  return triangle(length);
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

ModelFlops training_flops(const ModelConfig& config, std::int64_t length) {
  const ParameterCounts counts = parameter_counts(config);
  const auto tokens = static_cast<double>(length);
  // The embedding is looked up, but where it is tied the same matrix makes the logits.
  const std::int64_t looked_up = config.tied_head ? 0 : std::int64_t{config.vocab_size} * config.hidden_size;
  const auto weights = static_cast<double>(counts.gates + counts.extra_kv + counts.rest - looked_up);
  double pairs = 0;
  for (int i = 0; i < config.num_layers; ++i) pairs += config.num_heads * attention_pairs(config.of_layer(i), length);
  ModelFlops flops;
  flops.rest = 6 * (weights * tokens + pairs * (config.head_dim + config.v_head_dim));
  if (config.attention != AttentionKind::kNsa) return flops;
  // Each KV head runs through one set of weights, whether it is its own or that of all.
  const double uses = config.phi_per_kv_head ? 1 : config.num_kv_heads;
  flops.phi = 6 * static_cast<double>(counts.phi) * uses * static_cast<double>(config.nsa.num_compressed(length));
  return flops;
}

}  // namespace nsa::lm
