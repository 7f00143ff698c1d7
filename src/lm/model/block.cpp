#include "lm/model/block.h"

#include <ATen/TensorOperators.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "lm/layers/linear.h"

namespace nsa::lm {
namespace {

const std::array<const char*, 3> kBranches = {"cmp", "slc", "swa"};

std::int64_t num_kv_sets(const ModelConfig& config) {
  return config.attention == AttentionKind::kNsa && !config.share_kv ? 3 : 1;
}

/// Gates of a head: one for each branch of `nsa`.
std::int64_t gates_per_head(const ModelConfig& config) {
  return config.attention == AttentionKind::kNsa ? 3 : config.gated ? 1 : 0;
}

bridge::CompressionTensors make_phi(ParameterStore& store, const std::string& prefix, const ModelConfig& config,
                                    std::int64_t dim) {
  const std::int64_t sets = config.phi_per_kv_head ? config.num_kv_heads : 1;
  const std::int64_t tokens = config.nsa.kernel_size;
  bridge::CompressionTensors phi;
  phi.kind = config.phi;
  if (phi.kind == CompressionKind::kMean) return phi;
  phi.pe = store.constant(prefix + ".pe", {sets, tokens, dim}, 0);
  if (phi.kind == CompressionKind::kLinear) {
    phi.w1 = store.add(prefix + ".w1", bridge::mean_weight(sets, tokens, dim));
    phi.b1 = store.constant(prefix + ".b1", {sets, dim}, 0);
    return phi;
  }
  const std::int64_t hidden = config.phi_hidden > 0 ? config.phi_hidden : 2 * dim;
  // The further units of W1 are drawn by the store, whose generator carries the seed.
  phi.w1 = store.normal(prefix + ".w1", {sets, tokens * dim, hidden}, 1);
  phi.b1 = store.constant(prefix + ".b1", {sets, hidden}, 0);
  phi.w2 = store.normal(prefix + ".w2", {sets, hidden, dim}, 1);
  phi.b2 = store.constant(prefix + ".b2", {sets, dim}, 0);
  bridge::initialise_mlp(phi.w1, phi.w2, tokens);
  return phi;
}

/// RMSNorm of each head of x (rows, heads, D), in float32 and back in x's dtype.
at::Tensor norm_heads(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const auto rows = x.reshape({-1, x.size(2)}).to(at::kFloat).contiguous();
  return rms_norm(rows, weight, eps, x.scalar_type()).view(x.sizes());
}

/// The rows projected by in_proj, taken apart; `rotation` holds each row's angles.
AttentionInputs take_apart(const ModelConfig& config, const BlockWeights& weights, const at::Tensor& projected,
                           const Rotation& rotation) {
  const std::int64_t rows = projected.size(0), kv_heads = config.num_kv_heads;
  const auto sets = static_cast<std::size_t>(num_kv_sets(config));
  // Keys to compress stay as they are; where there is one set, it serves for those too and is rotated afterwards.
  const bool normed_heads = weights.q_norm.defined();  // they are rotated behind their norms
  std::vector<HeadGroup> groups = {{config.num_heads, config.head_dim, !normed_heads}};
  for (std::size_t set = 0; set < sets; ++set) groups.push_back({kv_heads, config.head_dim, set > 0 && !normed_heads});
  groups.insert(groups.end(), sets, {kv_heads, config.v_head_dim, false});
  AttentionInputs out;
  std::vector<at::Tensor> parts;
  if (weights.gate_out.defined()) {
    groups.push_back({1, weights.gate_bias.size(0), false});
    auto split = split_heads_and_gates(projected, groups, rotation, weights.gate_bias,
                                       {weights.gate_out, weights.weights_ready}, weights.gate_out_bias);
    parts = std::move(split.heads);
    out.gates = split.gates.view({rows, config.num_heads, -1});
  } else {
    parts = split_heads(projected, groups, rotation);
  }
  if (normed_heads) {
    parts[0] = rotate(norm_heads(parts[0], weights.q_norm, config.norm_eps), rotation);
    for (std::size_t set = 0; set < sets; ++set) {
      const auto keys = norm_heads(parts[1 + set], weights.k_norm[set], config.norm_eps);
      parts[1 + set] = set > 0 ? rotate(keys, rotation) : keys;
    }
  }
  const auto key = [&](std::size_t set) { return parts[1 + set]; };
  const auto value = [&](std::size_t set) { return parts[1 + sets + std::min(set, sets - 1)]; };

  out.q = parts[0];
  out.k_cmp = key(0);
  out.v_cmp = value(0);
  out.k_slc = sets == 1 ? rotate(key(0), rotation) : key(1);
  out.v_slc = value(1);
  out.k_swa = sets == 1 ? out.k_slc : key(2);
  out.v_swa = value(2);
  return out;
}

}  // namespace

Block::Block(ParameterStore& store, const std::string& prefix, const ModelConfig& config) : config_(config) {
  Parameters& p = parameters_;
  const std::int64_t hidden = config.hidden_size, heads = config.num_heads, kv_heads = config.num_kv_heads;
  const auto matrix = [&](const std::string& name, std::int64_t rows, std::int64_t columns) {
    return store.matrix(prefix + name + ".weight", rows, columns);
  };
  // What all layers add to the residual stream starts, summed, with the deviation of one matrix's output.
  const auto residual_matrix = [&](const std::string& name, std::int64_t rows, std::int64_t columns) {
    return store.matrix(prefix + name + ".weight", rows, columns, 1 / std::sqrt(2.0 * config.num_layers));
  };
  p.attention_norm = store.constant(prefix + "attention_norm.weight", {hidden}, 1);
  p.q_proj = matrix("attention.q_proj", heads * config.head_dim, hidden);
  const auto sets = num_kv_sets(config);
  for (std::int64_t i = 0; i < sets; ++i) {
    const std::string branch = sets == 1 ? "" : std::string(".") + kBranches[static_cast<std::size_t>(i)];
    p.k_proj.push_back(matrix("attention.k_proj" + branch, kv_heads * config.head_dim, hidden));
    p.v_proj.push_back(matrix("attention.v_proj" + branch, kv_heads * config.v_head_dim, hidden));
    if (config.qk_norm) {
      p.k_norm.push_back(store.constant(prefix + "attention.k_norm" + branch + ".weight", {config.head_dim}, 1));
    }
  }
  if (config.qk_norm) p.q_norm = store.constant(prefix + "attention.q_norm.weight", {config.head_dim}, 1);
  if (config.attention == AttentionKind::kNsa) {
    p.phi_k = make_phi(store, prefix + "attention.phi_k", config, config.head_dim);
    p.phi_v = make_phi(store, prefix + "attention.phi_v", config, config.v_head_dim);
  }
  if (const std::int64_t gates = gates_per_head(config) * heads; gates > 0) {
    p.gate_0 = matrix("attention.gate.0", hidden / 4, hidden);
    p.gate_0_bias = store.constant(prefix + "attention.gate.0.bias", {hidden / 4}, 0);
    p.gate_2 = store.constant(prefix + "attention.gate.2.weight", {gates, hidden / 4}, 0);
    p.gate_2_bias = store.constant(prefix + "attention.gate.2.bias", {gates}, 0);
  }
  p.o_proj = residual_matrix("attention.o_proj", hidden, heads * config.v_head_dim);
  p.ffn_norm = store.constant(prefix + "ffn_norm.weight", {hidden}, 1);
  p.gate_proj = matrix("ffn.gate_proj", config.ffn_size, hidden);
  p.up_proj = matrix("ffn.up_proj", config.ffn_size, hidden);
  p.down_proj = residual_matrix("ffn.down_proj", hidden, config.ffn_size);
}

BlockWeights Block::weights(at::ScalarType dtype) const {
  if (fused_) return *fused_;
  const Parameters& p = parameters_;
  std::vector<at::Tensor> in = {p.q_proj};
  in.insert(in.end(), p.k_proj.begin(), p.k_proj.end());
  in.insert(in.end(), p.v_proj.begin(), p.v_proj.end());
  if (p.gate_0.defined()) in.push_back(p.gate_0);
  std::vector<std::vector<at::Tensor>> groups = {in,         {p.gate_0_bias},          {p.gate_2},   {p.gate_2_bias},
                                                 {p.o_proj}, {p.gate_proj, p.up_proj}, {p.down_proj}};
  for (const bridge::CompressionTensors* phi : {&p.phi_k, &p.phi_v})
    for (const at::Tensor& weight : {phi->pe, phi->w1, phi->b1, phi->w2, phi->b2}) groups.push_back({weight});
  const auto all = concat_cast(groups, dtype);
  auto next = all.begin();  // in the order of BlockWeights
  return {
      .attention_norm = p.attention_norm,
      .ffn_norm = p.ffn_norm,
      .q_norm = p.q_norm,
      .k_norm = p.k_norm,
      .in_proj = *next++,
      .gate_bias = *next++,
      .gate_out = *next++,
      .gate_out_bias = *next++,
      .o_proj = *next++,
      .ffn_in = *next++,
      .ffn_out = *next++,
      .phi_k = {config_.phi, *next++, *next++, *next++, *next++, *next++},
      .phi_v = {config_.phi, *next++, *next++, *next++, *next++, *next++},
  };
}

void Block::fuse(at::ScalarType dtype) {
  fused_ = weights(dtype);
  parameters_ = {};  // before the packed copies take memory
  for (at::Tensor* matrix : {&fused_->in_proj, &fused_->gate_out, &fused_->o_proj, &fused_->ffn_in, &fused_->ffn_out}) {
    if (matrix->defined()) *matrix = packed(*matrix);
  }
}

Residual block_forward(const ModelConfig& config, const BlockWeights& weights, const Residual& in,
                       const Rotation& rotation, const Attend& attend) {
  const auto weight = [&](const at::Tensor& matrix) { return LinearWeight{matrix, weights.weights_ready}; };
  const auto [x, projected] = norm_and_linear(in, weights.attention_norm, config.norm_eps, weight(weights.in_proj));
  const auto inputs = take_apart(config, weights, projected, rotation);
  auto o = attend(inputs);
  if (config.gated) o = o * inputs.gates;
  const Residual attended = {x, linear(o.reshape({o.size(0), o.size(1) * o.size(2)}), weight(weights.o_proj))};
  const auto [y, hidden] = norm_and_linear(attended, weights.ffn_norm, config.norm_eps, weight(weights.ffn_in));
  return {y, swiglu_and_linear(hidden, weight(weights.ffn_out))};
}

}  // namespace nsa::lm
