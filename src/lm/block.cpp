#include "lm/block.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>

#include "lm/fused.h"
#include "lm/joined.h"
#include "lm/phi_init.h"
#include "lm/random.h"

namespace nsa::lm {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const std::array<const char*, 3> kBranches = {"cmp", "slc", "swa"};

std::int64_t num_kv_sets(const ModelConfig& config) {
  return config.attention == AttentionKind::kNsa && !config.share_kv ? 3 : 1;
}

CompressionTensors make_phi(ParameterStore& store, const std::string& prefix, const ModelConfig& config,
                            std::int64_t dim) {
  const std::int64_t sets = config.phi_per_kv_head ? config.num_kv_heads : 1;
  const std::int64_t tokens = config.nsa.kernel_size;
  CompressionTensors phi;
  phi.kind = config.phi;
  if (phi.kind == CompressionKind::kMean) return phi;
  phi.pe = store.constant(prefix + ".pe", {sets, tokens, dim}, 0);
  if (phi.kind == CompressionKind::kLinear) {
    phi.w1 = store.add(prefix + ".w1", mean_weight(sets, tokens, dim));
    phi.b1 = store.constant(prefix + ".b1", {sets, dim}, 0);
    return phi;
  }
  const std::int64_t hidden = config.phi_hidden > 0 ? config.phi_hidden : 2 * dim;
  // The further units of W1 are drawn by the store, whose generator carries the seed.
  phi.w1 = store.normal(prefix + ".w1", {sets, tokens * dim, hidden}, 1);
  phi.b1 = store.constant(prefix + ".b1", {sets, hidden}, 0);
  phi.w2 = store.normal(prefix + ".w2", {sets, hidden, dim}, 1);
  phi.b2 = store.constant(prefix + ".b2", {sets, dim}, 0);
  initialise_mlp(phi.w1, phi.w2, tokens);
  return phi;
}

class FusedSwiglu : public torch::autograd::Function<FusedSwiglu> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x) {
    ctx->save_for_backward({x});
    return fused_swiglu(x);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& d_outputs) {
    return {fused_swiglu_backward(d_outputs[0], ctx->get_saved_variables()[0])};
  }
};

/// silu(gate) * up of x = (gate, up).
at::Tensor swiglu(const at::Tensor& x) {
  if (swiglu_is_fused(x)) return FusedSwiglu::apply(x);
  const auto parts = x.chunk(2, 1);
  return at::silu(parts[0]) * parts[1];
}

class FusedBiasedSilu : public torch::autograd::Function<FusedBiasedSilu> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& bias) {
    ctx->save_for_backward({x, bias});
    return fused_biased_silu(x, bias);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& d_outputs) {
    const auto saved = ctx->get_saved_variables();
    const auto [d_x, d_bias] = fused_biased_silu_backward(d_outputs[0], saved[0], saved[1]);
    return {d_x, d_bias};
  }
};

at::Tensor biased_silu(const at::Tensor& x, const at::Tensor& bias) {
  return biased_silu_is_fused(x, bias) ? FusedBiasedSilu::apply(x, bias) : at::silu(x + bias);
}

at::Tensor full_attention(const Projected& in, const std::vector<std::int64_t>& offsets) {
  std::vector<at::Tensor> outputs;
  for (std::size_t b = 0; b + 1 < offsets.size(); ++b) {
    const auto sequence = [&](const at::Tensor& t) { return t.slice(0, offsets[b], offsets[b + 1]); };
    if (offsets[b] == offsets[b + 1]) continue;
    outputs.push_back(causal_attention(sequence(in.q), sequence(in.k_slc), sequence(in.v_slc)));
  }
  return outputs.size() == 1 ? outputs[0] : at::cat(outputs, 0);
}

at::Tensor sparse_attention(const ModelConfig& config, const BlockWeights& weights, const Projected& in,
                            const ForwardState& state, int layer, LayerTrace* trace) {
  auto gates = in.gates;
  if (state.options.gate_scale != std::array<double, 3>{1, 1, 1}) {
    gates = gates * at::tensor(c10::ArrayRef<double>(state.options.gate_scale), gates.options());
  }
  NsaInputs inputs{
      .q = in.q,
      .k_cmp = in.k_cmp,
      .v_cmp = in.v_cmp,
      .k_slc = in.k_slc,
      .v_slc = in.v_slc,
      .k_swa = in.k_swa,
      .v_swa = in.v_swa,
      .gates = gates,
      .phi_k = weights.phi_k,
      .phi_v = weights.phi_v,
      .rotation = state.table,
      .cu_seqlens = state.cu_seqlens,
      .longest = state.longest,
      .noise = state.options.noise,
      .seed = derive_seed({state.options.seed, static_cast<std::uint64_t>(layer)}),
  };
  const auto outputs = native_sparse_attention(inputs, config.nsa);
  if (trace) *trace = {gates, outputs.indices};
  return outputs.o;
}

/// The normed rows (rows, hidden) projected; `rotation` holds each row's angles.
Projected project(const ModelConfig& config, const BlockWeights& weights, const at::Tensor& normed,
                  const Rotation& rotation) {
  const std::int64_t rows = normed.size(0), kv_heads = config.num_kv_heads;
  const auto sets = static_cast<std::size_t>(num_kv_sets(config));
  // Keys to compress stay as they are; where there is one set, it serves for those too and is rotated afterwards.
  std::vector<HeadGroup> groups = {{config.num_heads, config.head_dim, true}};
  for (std::size_t set = 0; set < sets; ++set) groups.push_back({kv_heads, config.head_dim, set > 0});
  groups.insert(groups.end(), sets, {kv_heads, config.v_head_dim, false});
  if (weights.gate_out.defined()) groups.push_back({1, weights.gate_bias.size(0), false});
  const auto parts = split_heads(at::linear(normed, weights.in_proj), groups, rotation);
  const auto key = [&](std::size_t set) { return parts[1 + set]; };
  const auto value = [&](std::size_t set) { return parts[1 + sets + std::min(set, sets - 1)]; };

  Projected out;
  out.q = parts[0];
  out.k_cmp = key(0);
  out.v_cmp = value(0);
  out.k_slc = sets == 1 ? rotate(key(0), rotation) : key(1);
  out.v_slc = value(1);
  out.k_swa = sets == 1 ? out.k_slc : key(2);
  out.v_swa = value(2);
  if (weights.gate_out.defined()) {
    const auto hidden = biased_silu(parts.back().squeeze(1), weights.gate_bias);
    out.gates = at::linear(hidden, weights.gate_out, weights.gate_out_bias).sigmoid().view({rows, config.num_heads, 3});
  }
  return out;
}

}  // namespace

ParameterStore::ParameterStore(NamedTensors& list, std::uint64_t seed)
    : list_(list), generator_(at::detail::createCPUGenerator(seed)) {}

at::Tensor ParameterStore::add(const std::string& name, at::Tensor value) {
  value.requires_grad_(true);
  list_.emplace_back(name, value);
  return value;
}

at::Tensor ParameterStore::normal(const std::string& name, at::IntArrayRef shape, double deviation) {
  return add(name, at::empty(shape).normal_(0, deviation, generator_));
}

at::Tensor ParameterStore::matrix(const std::string& name, std::int64_t rows, std::int64_t columns, double scale) {
  return normal(name, {rows, columns}, scale / std::sqrt(static_cast<double>(columns)));
}

at::Tensor ParameterStore::constant(const std::string& name, at::IntArrayRef shape, double value) {
  return add(name, at::full(shape, value, at::kFloat));
}

Block::Block(ParameterStore& store, const std::string& prefix, const ModelConfig& config) : config_(config) {
  const std::int64_t hidden = config.hidden_size, heads = config.num_heads, kv_heads = config.num_kv_heads;
  const auto matrix = [&](const std::string& name, std::int64_t rows, std::int64_t columns) {
    return store.matrix(prefix + name + ".weight", rows, columns);
  };
  // What all layers add to the residual stream starts, summed, with the deviation of one matrix's output.
  const auto residual_matrix = [&](const std::string& name, std::int64_t rows, std::int64_t columns) {
    return store.matrix(prefix + name + ".weight", rows, columns, 1 / std::sqrt(2.0 * config.num_layers));
  };
  attention_norm_ = store.constant(prefix + "attention_norm.weight", {hidden}, 1);
  q_proj_ = matrix("attention.q_proj", heads * config.head_dim, hidden);
  const auto sets = num_kv_sets(config);
  for (std::int64_t i = 0; i < sets; ++i) {
    const std::string branch = sets == 1 ? "" : std::string(".") + kBranches[static_cast<std::size_t>(i)];
    k_proj_.push_back(matrix("attention.k_proj" + branch, kv_heads * config.head_dim, hidden));
    v_proj_.push_back(matrix("attention.v_proj" + branch, kv_heads * config.v_head_dim, hidden));
  }
  if (config.attention == AttentionKind::kNsa) {
    phi_k_ = make_phi(store, prefix + "attention.phi_k", config, config.head_dim);
    phi_v_ = make_phi(store, prefix + "attention.phi_v", config, config.v_head_dim);
    gate_0_ = matrix("attention.gate.0", hidden / 4, hidden);
    gate_0_bias_ = store.constant(prefix + "attention.gate.0.bias", {hidden / 4}, 0);
    gate_2_ = store.constant(prefix + "attention.gate.2.weight", {3 * heads, hidden / 4}, 0);
    gate_2_bias_ = store.constant(prefix + "attention.gate.2.bias", {3 * heads}, 0);
  }
  o_proj_ = residual_matrix("attention.o_proj", hidden, heads * config.v_head_dim);
  ffn_norm_ = store.constant(prefix + "ffn_norm.weight", {hidden}, 1);
  gate_proj_ = matrix("ffn.gate_proj", config.ffn_size, hidden);
  up_proj_ = matrix("ffn.up_proj", config.ffn_size, hidden);
  down_proj_ = residual_matrix("ffn.down_proj", hidden, config.ffn_size);
}

BlockWeights Block::weights(at::ScalarType dtype) const {
  std::vector<at::Tensor> in = {q_proj_};
  in.insert(in.end(), k_proj_.begin(), k_proj_.end());
  in.insert(in.end(), v_proj_.begin(), v_proj_.end());
  if (gate_0_.defined()) in.push_back(gate_0_);
  std::vector<std::vector<at::Tensor>> groups = {in,        {gate_0_bias_},         {gate_2_},   {gate_2_bias_},
                                                 {o_proj_}, {gate_proj_, up_proj_}, {down_proj_}};
  for (const CompressionTensors* phi : {&phi_k_, &phi_v_})
    for (const at::Tensor& weight : {phi->pe, phi->w1, phi->b1, phi->w2, phi->b2}) groups.push_back({weight});
  const auto all = joined(groups, dtype);
  auto next = all.begin();  // in the order of BlockWeights
  return {
      .attention_norm = attention_norm_,
      .ffn_norm = ffn_norm_,
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

Residual block_forward(const ModelConfig& config, const BlockWeights& weights, const Residual& in,
                       const Rotation& rotation, const Attend& attend) {
  const auto dtype = weights.in_proj.scalar_type();
  const auto [x, normed] = add_and_norm(in, weights.attention_norm, config.norm_eps, dtype);
  const auto o = attend(project(config, weights, normed, rotation));
  const Residual attended = {x, at::linear(o.reshape({o.size(0), o.size(1) * o.size(2)}), weights.o_proj)};
  const auto [y, normed_y] = add_and_norm(attended, weights.ffn_norm, config.norm_eps, dtype);
  return {y, at::linear(swiglu(at::linear(normed_y, weights.ffn_in)), weights.ffn_out)};
}

at::Tensor packed_attention(const ModelConfig& config, const BlockWeights& weights, const Projected& in,
                            const ForwardState& state, int layer, LayerTrace* trace) {
  switch (config.attention) {
    case AttentionKind::kNsa:
      return sparse_attention(config, weights, in, state, layer, trace);
    case AttentionKind::kFull:
      return full_attention(in, state.offsets);
    case AttentionKind::kWindow:
      return sliding_window_attention(in.q, in.k_slc, in.v_slc, state.cu_seqlens, state.longest,
                                      config.nsa.window_size);
  }
  return {};
}

}  // namespace nsa::lm
