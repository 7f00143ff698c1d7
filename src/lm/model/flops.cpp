#include "lm/model/flops.h"

#include <algorithm>

#include "lm/model/model.h"
#include "lm/model/parameter_counts.h"

namespace nsa::lm {
namespace {

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
