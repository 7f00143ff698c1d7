#include "lm/model/model.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <fmt/core.h>

#include <algorithm>

#include "base/device.h"
#include "base/error.h"
#include "base/random.h"
#include "bridge/call.h"
#include "lm/layers/linear.h"
#include "lm/layers/recompute.h"
#include "lm/model/attention.h"
#include "lm/model/block.h"
#include "lm/model/model_impl.h"

namespace nsa::lm {
namespace {

/// Position of each token in its sequence, int64 (total).
at::Tensor token_positions(const std::vector<std::int64_t>& offsets) {
  const auto positions = at::empty({offsets.back()}, at::kLong);
  auto* const out = positions.mutable_data_ptr<std::int64_t>();
  for (std::size_t b = 0; b + 1 < offsets.size(); ++b) {
    for (std::int64_t i = offsets[b]; i < offsets[b + 1]; ++i) out[i] = i - offsets[b];
  }
  return positions;
}

}  // namespace

at::Tensor selector_loss(const std::vector<LayerTrace>& trace) {
  std::vector<at::Tensor> losses;
  for (const LayerTrace& layer : trace) {
    if (layer.selector_loss.defined()) losses.push_back(layer.selector_loss);
  }
  return losses.empty() ? at::zeros({}) : at::stack(losses).sum();
}

std::int64_t default_selector_queries(std::int64_t tokens, std::int64_t context) {
  constexpr std::int64_t kPairs = kSelectorQueries * 8192;  // of a query and a key
  return std::clamp<std::int64_t>(std::min(tokens / 256, kPairs / context), 16, kSelectorQueries);
}

Batch single(const std::vector<std::int64_t>& tokens) { return packed({tokens}); }

Batch packed(const std::vector<std::vector<std::int64_t>>& sequences) {
  std::vector<std::int64_t> tokens;
  std::vector<std::int32_t> offsets = {0};
  for (const auto& sequence : sequences) {
    tokens.insert(tokens.end(), sequence.begin(), sequence.end());
    offsets.push_back(static_cast<std::int32_t>(tokens.size()));
  }
  return {at::tensor(c10::ArrayRef<std::int64_t>(tokens), at::kLong),
          at::tensor(c10::ArrayRef<std::int32_t>(offsets), at::kInt)};
}

Model::Model(const ModelConfig& config, std::optional<std::uint64_t> seed, at::ScalarType matrices)
    : impl_(std::make_unique<Impl>()) {
  config.validate();
  impl_->config = config;
  ParameterStore store(impl_->parameters, seed);
  // The residual stream starts with it in float32.
  impl_->embedding = store.matrix("embedding.weight", config.vocab_size, config.hidden_size);
  store.set_matrix_dtype(matrices);
  for (int i = 0; i < config.num_layers; ++i) {
    impl_->blocks.emplace_back(store, fmt::format("layers.{}.", i), config.of_layer(i));
  }
  impl_->norm = store.constant("norm.weight", {config.hidden_size}, 1);
  impl_->head =
      config.tied_head ? impl_->embedding : store.matrix("head.weight", config.vocab_size, config.hidden_size);
}

Model::~Model() = default;
Model::Model(Model&&) noexcept = default;
Model& Model::operator=(Model&&) noexcept = default;

const ModelConfig& Model::config() const { return impl_->config; }
const NamedTensors& Model::parameters() const { return impl_->parameters; }
at::Device Model::device() const { return impl_->device; }
at::ScalarType Model::compute_dtype() const { return impl_->dtype; }

void Model::place(at::Device device, at::ScalarType dtype) {
  const auto& config = impl_->config;
  Problem problem{.dtype = bridge::view_of(at::empty({0}, dtype)).dtype};
  if (device.is_cuda()) problem.device = {DeviceType::kCUDA, device.index()};
  problem.key_dim = config.attention == AttentionKind::kFull ? 0 : config.head_dim;  // 0: torch attends
  problem.value_dim = config.v_head_dim;
  Backend backend;
  if (const Status status = choose_backend(problem, {}, backend); !status.ok()) throw base::Error(status.message());
  for (const auto& [name, parameter] : impl_->parameters) parameter.set_data(parameter.detach().to(device));
  impl_->device = device;
  impl_->dtype = dtype;
  impl_->table = {};
}

void Model::fuse() {
  const at::NoGradGuard no_grad;
  impl_->parameters.clear();
  for (Block& block : impl_->blocks) block.fuse(impl_->dtype);
  impl_->fused_head = packed(impl_->head_weights());
  impl_->head.reset();
}

at::Tensor Model::forward(const Batch& batch, const ForwardOptions& options) const {
  const auto* const cu_seqlens = batch.cu_seqlens.const_data_ptr<int>();
  const auto on_device = [&](const at::Tensor& host) { return base::upload(host, impl_->device); };
  ForwardState state;
  state.cu_seqlens = on_device(batch.cu_seqlens);
  state.offsets.assign(cu_seqlens, cu_seqlens + batch.cu_seqlens.numel());
  for (std::size_t b = 0; b + 1 < state.offsets.size(); ++b) {
    state.longest = std::max(state.longest, state.offsets[b + 1] - state.offsets[b]);
  }
  state.table = impl_->rotation(state.longest);
  state.rotation = state.table.at(on_device(token_positions(state.offsets)));
  state.options = options;
  if (options.trace) options.trace->assign(impl_->blocks.size(), {});
  if (options.trace && options.selector_queries > 0) {
    state.sample = draw_queries(state.offsets, impl_->config.nsa, options.selector_queries,
                                base::derive_seed({options.seed, impl_->blocks.size()}), impl_->device);
  }

  Residual x{at::embedding(impl_->embedding, on_device(batch.tokens)), {}};
  for (std::size_t i = 0; i < impl_->blocks.size(); ++i) {
    const Layer layer = [impl = impl_.get(), state, i](at::TensorList in) -> std::vector<at::Tensor> {
      LayerTrace trace;
      const bool traced = state.options.trace != nullptr;
      const Block& block = impl->blocks[i];
      const auto weights = block.weights(impl->dtype);
      const auto attend = [&](const AttentionInputs& projected) {
        return packed_attention(block.config(), weights.phi_k, weights.phi_v, projected, state, static_cast<int>(i),
                                traced ? &trace : nullptr);
      };
      const auto out =
          block_forward(block.config(), weights, {in[0], in.size() > 1 ? in[1] : at::Tensor()}, state.rotation, attend);
      if (!traced || !trace.gates.defined()) return {out.x, out.added};
      if (!trace.q.defined()) return {out.x, out.added, trace.gates, trace.indices};
      return {out.x, out.added, trace.gates, trace.indices, trace.q, trace.k_cmp, trace.k_slc};
    };
    const auto in = x.added.defined() ? std::vector<at::Tensor>{x.x, x.added} : std::vector<at::Tensor>{x.x};
    const auto outputs = options.recompute && at::GradMode::is_enabled() ? recomputed(layer, in) : layer(in);
    x = {outputs[0], outputs[1]};
    if (outputs.size() > 2) (*options.trace)[i] = {outputs[2], outputs[3]};
    if (outputs.size() > 4) {
      LayerTrace& trace = (*options.trace)[i];
      trace.q = outputs[4], trace.k_cmp = outputs[5], trace.k_slc = outputs[6];
    }
  }
  if (state.sample) impl_->ask_selectors(*options.trace, *state.sample, state.table);
  if (options.logit_rows.defined()) {
    const auto rows = on_device(options.logit_rows);
    x = {x.x.index_select(0, rows), x.added.defined() ? x.added.index_select(0, rows) : x.added};
  }
  return impl_->logits(x, {impl_->head_weights()}).to(at::kFloat);
}

at::Tensor Model::compressed_keys(std::size_t layer, const at::Tensor& k_cmp) const {
  const auto phi = impl_->blocks[layer].weights(impl_->dtype).phi_k;
  return lm::compressed_keys(k_cmp, phi, impl_->rotation(k_cmp.size(0)), impl_->config.nsa);
}

void Model::Impl::ask_selectors(std::vector<LayerTrace>& trace, const SelectorSample& sample,
                                const Rotation& rotations) const {
  std::vector<SelectorInputs> asked;
  for (std::size_t i = 0; i < trace.size(); ++i) {
    if (trace[i].q.defined()) asked.push_back({trace[i].q, trace[i].k_cmp, trace[i].k_slc, blocks[i].phi_k()});
  }
  if (asked.empty()) return;
  const auto losses = selector_losses(asked, sample.positions, rotations, config.nsa).unbind();
  auto loss = losses.begin();
  for (LayerTrace& layer : trace) {
    if (layer.q.defined()) layer = {.gates = layer.gates, .indices = layer.indices, .selector_loss = *loss++};
  }
}

at::Tensor Model::Impl::head_weights() const {
  if (fused_head.defined()) return fused_head;
  // cuBLAS has kernels of Hopper for rows of whole 16 bytes alone, and bytes make a vocabulary of 257.
  const std::int64_t whole = device.is_cuda() ? (config.vocab_size + 7) / 8 * 8 : config.vocab_size;
  const auto weights = head.to(dtype);
  return whole == config.vocab_size ? weights : at::constant_pad_nd(weights, {0, 0, 0, whole - config.vocab_size});
}

at::Tensor Model::Impl::logits(const Residual& x, const LinearWeight& head) const {
  return norm_and_linear(x, norm, config.norm_eps, head).y.narrow(1, 0, config.vocab_size);
}

const Rotation& Model::Impl::rotation(std::int64_t positions) {
  if (!table.cos.defined() || table.cos.size(0) < positions) {
    const at::NoGradGuard no_grad;
    table = rotation_table(std::max<std::int64_t>(2 * positions, 1024),
                           rope_frequencies(config.head_dim, config.rope_theta, config.rope), device,
                           config.rope.attention_factor);
  }
  return table;
}

}  // namespace nsa::lm
