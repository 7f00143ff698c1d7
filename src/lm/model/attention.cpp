#include "lm/model/attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>

#include <array>

#include "base/random.h"
#include "bridge/attention.h"

namespace nsa::lm {
namespace {

at::Tensor full_attention(const AttentionInputs& in, const ForwardState& state) {
  const auto& offsets = state.offsets;
  const SequenceAttention attend = state.options.attention ? state.options.attention : bridge::causal_attention;
  std::vector<at::Tensor> outputs;
  for (std::size_t b = 0; b + 1 < offsets.size(); ++b) {
    const auto sequence = [&](const at::Tensor& t) { return t.slice(0, offsets[b], offsets[b + 1]); };
    if (offsets[b] == offsets[b + 1]) continue;
    outputs.push_back(attend(sequence(in.q), sequence(in.k_slc), sequence(in.v_slc)));
  }
  return outputs.size() == 1 ? outputs[0] : at::cat(outputs, 0);
}

at::Tensor sparse_attention(const ModelConfig& config, const bridge::CompressionTensors& phi_k,
                            const bridge::CompressionTensors& phi_v, const AttentionInputs& in,
                            const ForwardState& state, int layer, LayerTrace* trace) {
  auto gates = in.gates;
  if (state.options.gate_scale != std::array<double, 3>{1, 1, 1}) {
    gates = gates * at::tensor(c10::ArrayRef<double>(state.options.gate_scale), at::kFloat).to(gates.options());
  }
  bridge::NsaInputs inputs{
      .q = in.q,
      .k_cmp = in.k_cmp,
      .v_cmp = in.v_cmp,
      .k_slc = in.k_slc,
      .v_slc = in.v_slc,
      .k_swa = in.k_swa,
      .v_swa = in.v_swa,
      .gates = gates,
      .phi_k = phi_k,
      .phi_v = phi_v,
      .rope_cos = state.table.cos,
      .rope_sin = state.table.sin,
      .cu_seqlens = state.cu_seqlens,
      .longest = state.longest,
      .noise = state.options.noise,
      .seed = base::derive_seed({state.options.seed, static_cast<std::uint64_t>(layer)}),
  };
  const auto outputs = bridge::native_sparse_attention(inputs, config.nsa);
  if (trace) *trace = {gates, outputs.indices};
  if (trace && state.options.trace_keys) trace->q = in.q, trace->k_cmp = in.k_cmp, trace->k_slc = in.k_slc;
  if (trace && state.sample) {
    const auto sequence = [&](const at::Tensor& t) { return t.slice(0, state.sample->begin, state.sample->end); };
    trace->q = sequence(in.q.detach()).index_select(0, state.sample->positions);
    // Shared keys and queries define the loss's target, so they get no gradient: it would move the target.
    trace->k_cmp = sequence(config.share_kv ? in.k_cmp.detach() : in.k_cmp);
    trace->k_slc = sequence(in.k_slc.detach());
  }
  return outputs.o;
}

}  // namespace

at::Tensor packed_attention(const ModelConfig& config, const bridge::CompressionTensors& phi_k,
                            const bridge::CompressionTensors& phi_v, const AttentionInputs& in,
                            const ForwardState& state, int layer, LayerTrace* trace) {
  switch (config.attention) {
    case AttentionKind::kNsa:
      return sparse_attention(config, phi_k, phi_v, in, state, layer, trace);
    case AttentionKind::kFull:
      return full_attention(in, state);
    case AttentionKind::kWindow:
      return bridge::sliding_window_attention(in.q, in.k_slc, in.v_slc, state.cu_seqlens, state.longest,
                                              config.nsa.window_size);
  }
  return {};
}

}  // namespace nsa::lm
