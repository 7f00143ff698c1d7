#include "bridge/attention.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/csrc/autograd/custom_function.h>

#include "bridge/call.h"

namespace nsa::bridge {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// A tensor for the gradient of `like`, or an undefined one if it is not needed.
at::Tensor gradient_of(const at::Tensor& like, bool wanted = true) {
  return like.defined() && wanted ? at::empty(like.sizes(), like.options()) : at::Tensor();
}

/// torch's Function takes no undefined inputs where gradients are recorded: an absent weight travels as an empty
/// tensor.
at::Tensor packed_up(const at::Tensor& optional) { return optional.defined() ? optional : at::empty({0}); }
at::Tensor unpacked(const at::Tensor& tensor) { return tensor.numel() > 0 ? tensor : at::Tensor(); }

Packed packed_by(const at::Tensor& cu_seqlens, std::int64_t longest) {
  return {.cu_seqlens_q = view_of(cu_seqlens), .max_seqlen_q = longest, .max_seqlen_k = longest};
}

std::vector<std::int64_t> pack(const NSAConfig& cfg) {
  return {cfg.kernel_size, cfg.kernel_stride, cfg.block_size, cfg.topk,
          cfg.init_blocks, cfg.local_blocks,  cfg.window_size};
}
NSAConfig unpack(const c10::IValue& value) {
  const auto list = value.toIntVector();
  const auto at = [&](std::size_t i) { return static_cast<int>(list[i]); };
  return {.kernel_size = at(0),
          .kernel_stride = at(1),
          .block_size = at(2),
          .topk = at(3),
          .init_blocks = at(4),
          .local_blocks = at(5),
          .window_size = at(6)};
}

/// What native_sparse_attention reads and writes, in the order in which it is saved for the backward.
enum Saved {
  kQ,
  kKCmp,
  kVCmp,
  kKSlc,
  kVSlc,
  kKSwa,
  kVSwa,
  kGates,
  kPhiK,              // pe, w1, b1, w2, b2
  kPhiV = kPhiK + 5,  // likewise
  kCos = kPhiV + 5,
  kSin,
  kCuSeqlens,
  kKC,
  kVC,
  kIndices,
  kOCmp,
  kOSlc,
  kOSwa,
  kLseCmp,
  kLseSlc,
  kLseSwa
};
constexpr std::size_t kNumDifferentiable = kCos, kNumInputs = kKC;

class NativeSparseAttention : public Function<NativeSparseAttention> {
 public:
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs, std::int64_t longest, NSAConfig cfg,
                               CompressionKind kind_k, CompressionKind kind_v, double noise, std::uint64_t seed) {
    const auto &q = inputs[kQ], &k = inputs[kKCmp], &v = inputs[kVCmp];
    const auto total = q.size(0), heads = q.size(1);
    const auto like_o = [&] { return at::empty({total, heads, v.size(2)}, q.options()); };
    const auto like_lse = [&] { return at::empty({heads, total}, q.options().dtype(at::kFloat)); };
    const auto compressed = [&](const at::Tensor& raw) {
      return at::empty({raw.size(0) / cfg.kernel_stride, raw.size(1), raw.size(2)}, raw.options());
    };
    const auto indices = at::empty({total, k.size(1), cfg.topk}, q.options().dtype(at::kInt));
    variable_list saved = inputs.vec();
    for (const at::Tensor& output :
         {compressed(k), compressed(v), indices, like_o(), like_o(), like_o(), like_lse(), like_lse(), like_lse()})
      saved.push_back(output);
    const auto o = like_o();
    auto params = params_of(saved, longest, cfg, kind_k, kind_v);
    params.attention.noise = noise;
    params.attention.seed = seed;
    params.attention.o = view_of(o);
    call(nsa::native_sparse_attention, params, q.device());
    ctx->save_for_backward(saved);
    ctx->saved_data["longest"] = longest;
    ctx->saved_data["cfg"] = pack(cfg);
    ctx->saved_data["kind_k"] = static_cast<std::int64_t>(kind_k);
    ctx->saved_data["kind_v"] = static_cast<std::int64_t>(kind_v);
    ctx->mark_non_differentiable({indices});
    return {o, indices};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& d_outputs) {
    const auto saved = ctx->get_saved_variables();
    const auto kind = [&](const char* name) { return static_cast<CompressionKind>(ctx->saved_data[name].toInt()); };
    NativeSparseAttentionBackwardParams params;
    params.forward = params_of(saved, ctx->saved_data["longest"].toInt(), unpack(ctx->saved_data["cfg"]),
                               kind("kind_k"), kind("kind_v"));
    params.d_o = view_of(d_outputs[0]);
    variable_list gradients(kNumInputs + 6);
    for (std::size_t i = 0; i < kNumDifferentiable; ++i) gradients[i] = gradient_of(unpacked(saved[i]));
    params.d_q = view_of(gradients[kQ]);
    params.d_k_cmp = view_of(gradients[kKCmp]);
    params.d_v_cmp = view_of(gradients[kVCmp]);
    params.d_k_slc = view_of(gradients[kKSlc]);
    params.d_v_slc = view_of(gradients[kVSlc]);
    params.d_k_swa = view_of(gradients[kKSwa]);
    params.d_v_swa = view_of(gradients[kVSwa]);
    params.d_gates = view_of(gradients[kGates]);
    params.d_weights_k = weights_of(gradients, kPhiK, {});
    params.d_weights_v = weights_of(gradients, kPhiV, {});
    call(nsa::native_sparse_attention_backward, params, saved[kQ].device());
    return gradients;
  }

 private:
  static CompressionWeights weights_of(const variable_list& tensors, std::size_t first, CompressionKind kind) {
    const auto at = [&](std::size_t i) { return view_of(unpacked(tensors[first + i])); };
    return {.kind = kind, .pe = at(0), .w1 = at(1), .b1 = at(2), .w2 = at(3), .b2 = at(4)};
  }

  static NativeSparseAttentionParams params_of(const variable_list& saved, std::int64_t longest, const NSAConfig& cfg,
                                               CompressionKind kind_k, CompressionKind kind_v) {
    NativeSparseAttentionParams params;
    params.k_cmp = view_of(saved[kKCmp]);
    params.v_cmp = view_of(saved[kVCmp]);
    params.weights_k = weights_of(saved, kPhiK, kind_k);
    params.weights_v = weights_of(saved, kPhiV, kind_v);
    params.rope_cos = view_of(saved[kCos]);
    params.rope_sin = view_of(saved[kSin]);
    NsaAttentionParams& attention = params.attention;
    attention.q = view_of(saved[kQ]);
    attention.k_c = view_of(saved[kKC]);
    attention.v_c = view_of(saved[kVC]);
    attention.k_slc = view_of(saved[kKSlc]);
    attention.v_slc = view_of(saved[kVSlc]);
    attention.k_swa = view_of(saved[kKSwa]);
    attention.v_swa = view_of(saved[kVSwa]);
    attention.gates = view_of(saved[kGates]);
    attention.cfg = cfg;
    attention.packed = packed_by(saved[kCuSeqlens], longest);
    attention.indices = view_of(saved[kIndices]);
    attention.o_cmp = view_of(saved[kOCmp]);
    attention.o_slc = view_of(saved[kOSlc]);
    attention.o_swa = view_of(saved[kOSwa]);
    attention.lse_cmp = view_of(saved[kLseCmp]);
    attention.lse_slc = view_of(saved[kLseSlc]);
    attention.lse_swa = view_of(saved[kLseSwa]);
    return params;
  }
};

class WindowAttention : public Function<WindowAttention> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& cu_seqlens, std::int64_t longest, std::int64_t window_size) {
    const auto o = at::empty({q.size(0), q.size(1), v.size(2)}, q.options());
    const auto lse = at::empty({q.size(1), q.size(0)}, q.options().dtype(at::kFloat));
    const variable_list saved = {q, k, v, cu_seqlens, o, lse};
    call(nsa::sliding_window_attention, params_of(saved, longest, window_size), q.device());
    ctx->save_for_backward(saved);
    ctx->saved_data["longest"] = longest;
    ctx->saved_data["window_size"] = window_size;
    return o;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& d_outputs) {
    const auto saved = ctx->get_saved_variables();
    variable_list gradients(6);
    for (std::size_t i = 0; i < 3; ++i) gradients[i] = gradient_of(saved[i]);
    const SlidingWindowAttentionBackwardParams params{
        .forward = params_of(saved, ctx->saved_data["longest"].toInt(), ctx->saved_data["window_size"].toInt()),
        .d_o = view_of(d_outputs[0]),
        .d_q = view_of(gradients[0]),
        .d_k = view_of(gradients[1]),
        .d_v = view_of(gradients[2])};
    call(nsa::sliding_window_attention_backward, params, saved[0].device());
    return gradients;
  }

 private:
  static SlidingWindowAttentionParams params_of(const variable_list& saved, std::int64_t longest,
                                                std::int64_t window_size) {
    SlidingWindowAttentionParams params;
    params.q = view_of(saved[0]);
    params.k = view_of(saved[1]);
    params.v = view_of(saved[2]);
    params.packed = packed_by(saved[3], longest);
    params.o = view_of(saved[4]);
    params.lse = view_of(saved[5]);
    params.window_size = window_size;
    return params;
  }
};

}  // namespace

NsaOutputs native_sparse_attention(const NsaInputs& in, const NSAConfig& cfg) {
  variable_list inputs{in.q, in.k_cmp, in.v_cmp, in.k_slc, in.v_slc, in.k_swa, in.v_swa, in.gates};
  for (const CompressionTensors* phi : {&in.phi_k, &in.phi_v})
    for (const at::Tensor& weight : {phi->pe, phi->w1, phi->b1, phi->w2, phi->b2}) inputs.push_back(packed_up(weight));
  for (const at::Tensor& tensor : {in.rope_cos, in.rope_sin, in.cu_seqlens}) inputs.push_back(tensor);
  const auto outputs = NativeSparseAttention::apply(at::TensorList(inputs), in.longest, cfg, in.phi_k.kind,
                                                    in.phi_v.kind, in.noise, in.seed);
  return {outputs[0], outputs[1]};
}

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  // On CUDA torch gives grouped heads to FlashAttention-2, which wants 16-bit numbers and one head dim, or else to
  // products of S x S. With as many key heads as query heads its memory-efficient kernels take the rest.
  const bool grouped = q.is_cpu() || (q.scalar_type() != at::kFloat && q.size(2) == v.size(2));
  const auto heads_first = [](const at::Tensor& t) { return t.transpose(0, 1).unsqueeze(0); };
  const auto keys = [&](const at::Tensor& t) {
    if (grouped) return heads_first(t);
    const std::int64_t group = q.size(1) / t.size(1);
    return heads_first(t.unsqueeze(2).expand({t.size(0), t.size(1), group, t.size(2)}).flatten(1, 2));
  };
  return at::scaled_dot_product_attention(heads_first(q), keys(k), keys(v), {}, 0.0, /*is_causal=*/true, {},
                                          /*enable_gqa=*/grouped)
      .squeeze(0)
      .transpose(0, 1);
}

at::Tensor sliding_window_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const at::Tensor& cu_seqlens, std::int64_t longest, std::int64_t window_size) {
  return WindowAttention::apply(q, k, v, cu_seqlens, longest, window_size);
}

}  // namespace nsa::bridge
