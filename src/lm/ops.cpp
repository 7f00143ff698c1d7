#include "lm/ops.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/csrc/autograd/custom_function.h>

#include <stdexcept>

#include "lm/error.h"

namespace nsa::lm {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    case at::kDouble:
      return DType::kFloat64;
    case at::kInt:
      return DType::kInt32;
    default:
      throw std::runtime_error(std::string("libnsa has no dtype ") + c10::toString(tensor.scalar_type()));
  }
}

/// A tensor for the gradient of `like`, or an undefined one where nobody asks for it.
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

class Compress : public Function<Compress> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& k, const at::Tensor& pe, const at::Tensor& w1,
                            const at::Tensor& b1, const at::Tensor& w2, const at::Tensor& b2,
                            const at::Tensor& cu_seqlens, std::int64_t kind, NSAConfig cfg) {
    const auto out = at::empty({k.size(0) / cfg.kernel_stride, k.size(1), k.size(2)}, k.options());
    auto params = params_of({k, pe, w1, b1, w2, b2, cu_seqlens}, kind, cfg);
    params.out = view_of(out);
    call(nsa::compress, params, k.device());
    ctx->save_for_backward({k, pe, w1, b1, w2, b2, cu_seqlens});
    ctx->saved_data["kind"] = kind;
    ctx->saved_data["cfg"] = pack(cfg);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& d_outputs) {
    const auto saved = ctx->get_saved_variables();
    CompressBackwardParams params;
    params.forward = params_of(saved, ctx->saved_data["kind"].toInt(), unpack(ctx->saved_data["cfg"]));
    params.d_out = view_of(d_outputs[0]);
    variable_list gradients(9);
    gradients[0] = gradient_of(saved[0]);
    for (std::size_t i = 1; i < 6; ++i) gradients[i] = gradient_of(unpacked(saved[i]));
    params.d_k = view_of(gradients[0]);
    params.d_weights.pe = view_of(gradients[1]);
    params.d_weights.w1 = view_of(gradients[2]);
    params.d_weights.b1 = view_of(gradients[3]);
    params.d_weights.w2 = view_of(gradients[4]);
    params.d_weights.b2 = view_of(gradients[5]);
    call(nsa::compress_backward, params, saved[0].device());
    return gradients;
  }

  static std::vector<std::int64_t> pack(const NSAConfig& cfg) {
    return {cfg.kernel_size, cfg.kernel_stride, cfg.block_size, cfg.topk,
            cfg.init_blocks, cfg.local_blocks,  cfg.window_size};
  }
  static NSAConfig unpack(const c10::IValue& value) {
    const auto list = value.toIntVector();
    const auto at = [&](std::size_t i) { return static_cast<int>(list[i]); };
    return {at(0), at(1), at(2), at(3), at(4), at(5), at(6)};
  }

 private:
  static CompressParams params_of(const variable_list& saved, std::int64_t kind, const NSAConfig& cfg) {
    CompressParams params;
    params.k = view_of(saved[0]);
    params.weights = {static_cast<CompressionKind>(kind), view_of(unpacked(saved[1])), view_of(unpacked(saved[2])),
                      view_of(unpacked(saved[3])),        view_of(unpacked(saved[4])), view_of(unpacked(saved[5]))};
    params.cu_seqlens = view_of(saved[6]);
    params.cfg = cfg;
    return params;
  }
};

/// What nsa_attention reads and writes, in the order in which it is saved for the backward.
enum Saved {
  kQ,
  kKC,
  kVC,
  kKSlc,
  kVSlc,
  kKSwa,
  kVSwa,
  kGates,
  kCuSeqlens,
  kIndices,
  kOCmp,
  kOSlc,
  kOSwa,
  kLseCmp,
  kLseSlc,
  kLseSwa,
  kNumSaved
};
constexpr std::size_t kNumDifferentiable = 8;

class NsaAttention : public Function<NsaAttention> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k_c, const at::Tensor& v_c,
                               const at::Tensor& k_slc, const at::Tensor& v_slc, const at::Tensor& k_swa,
                               const at::Tensor& v_swa, const at::Tensor& gates, const at::Tensor& cu_seqlens,
                               std::int64_t longest, NSAConfig cfg, double noise, std::uint64_t seed) {
    const auto total = q.size(0), heads = q.size(1), v_dim = v_c.size(2);
    const auto like_o = [&] { return at::empty({total, heads, v_dim}, q.options()); };
    const auto like_lse = [&] { return at::empty({heads, total}, q.options().dtype(at::kFloat)); };
    const auto indices = at::empty({total, k_c.size(1), cfg.topk}, q.options().dtype(at::kInt));
    const variable_list saved = {q,          k_c,     v_c,      k_slc,    v_slc,    k_swa,      v_swa,      gates,
                                 cu_seqlens, indices, like_o(), like_o(), like_o(), like_lse(), like_lse(), like_lse()};
    const auto o = like_o();
    auto params = params_of(saved, longest, cfg);
    params.noise = noise;
    params.seed = seed;
    params.o = view_of(o);
    call(nsa::nsa_attention, params, q.device());
    ctx->save_for_backward(saved);
    ctx->saved_data["longest"] = longest;
    ctx->saved_data["cfg"] = Compress::pack(cfg);
    ctx->mark_non_differentiable({indices});
    return {o, indices};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& d_outputs) {
    const auto saved = ctx->get_saved_variables();
    NsaAttentionBackwardParams params;
    params.forward = params_of(saved, ctx->saved_data["longest"].toInt(), Compress::unpack(ctx->saved_data["cfg"]));
    params.d_o = view_of(d_outputs[0]);
    variable_list gradients(13);
    for (std::size_t i = 0; i < kNumDifferentiable; ++i) gradients[i] = gradient_of(saved[i]);
    params.d_q = view_of(gradients[kQ]);
    params.d_k_c = view_of(gradients[kKC]);
    params.d_v_c = view_of(gradients[kVC]);
    params.d_k_slc = view_of(gradients[kKSlc]);
    params.d_v_slc = view_of(gradients[kVSlc]);
    params.d_k_swa = view_of(gradients[kKSwa]);
    params.d_v_swa = view_of(gradients[kVSwa]);
    params.d_gates = view_of(gradients[kGates]);
    call(nsa::nsa_attention_backward, params, saved[kQ].device());
    return gradients;
  }

 private:
  static NsaAttentionParams params_of(const variable_list& saved, std::int64_t longest, const NSAConfig& cfg) {
    NsaAttentionParams params;
    params.q = view_of(saved[kQ]);
    params.k_c = view_of(saved[kKC]);
    params.v_c = view_of(saved[kVC]);
    params.k_slc = view_of(saved[kKSlc]);
    params.v_slc = view_of(saved[kVSlc]);
    params.k_swa = view_of(saved[kKSwa]);
    params.v_swa = view_of(saved[kVSwa]);
    params.gates = view_of(saved[kGates]);
    params.cfg = cfg;
    params.packed = packed_by(saved[kCuSeqlens], longest);
    params.indices = view_of(saved[kIndices]);
    params.o_cmp = view_of(saved[kOCmp]);
    params.o_slc = view_of(saved[kOSlc]);
    params.o_swa = view_of(saved[kOSwa]);
    params.lse_cmp = view_of(saved[kLseCmp]);
    params.lse_slc = view_of(saved[kLseSlc]);
    params.lse_swa = view_of(saved[kLseSwa]);
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

TensorView view_of(const at::Tensor& tensor) {
  TensorView view;
  if (!tensor.defined()) return view;
  view.data = tensor.data_ptr();
  view.dtype = dtype_of(tensor);
  if (tensor.is_cuda()) view.device = {DeviceType::kCUDA, tensor.get_device()};
  view.rank = static_cast<int>(tensor.dim());
  for (int i = 0; i < view.rank; ++i) {
    view.shape[static_cast<std::size_t>(i)] = tensor.size(i);
    view.stride[static_cast<std::size_t>(i)] = tensor.stride(i);
  }
  return view;
}

void check(const Status& status) {
  if (status.code() == StatusCode::kUnsupported) throw Error(status.message());
  if (!status.ok()) throw std::runtime_error(status.message());
}

Context with_workspace(Context context, at::Device device, std::size_t bytes, at::Tensor& memory) {
  memory = at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions(device).dtype(at::kByte));
  context.stream = nullptr;
  context.workspace = memory.mutable_data_ptr();
  context.workspace_size = bytes;
  return context;
}

CompressionTensors CompressionTensors::to(const at::TensorOptions& options) const {
  const auto cast = [&](const at::Tensor& t) { return t.defined() ? t.to(options) : t; };
  return {kind, cast(pe), cast(w1), cast(b1), cast(w2), cast(b2)};
}

CompressionWeights CompressionTensors::views() const {
  return {kind, view_of(pe), view_of(w1), view_of(b1), view_of(w2), view_of(b2)};
}

at::Tensor compress(const at::Tensor& k, const CompressionTensors& weights, const NSAConfig& cfg,
                    const at::Tensor& cu_seqlens) {
  return Compress::apply(k, packed_up(weights.pe), packed_up(weights.w1), packed_up(weights.b1), packed_up(weights.w2),
                         packed_up(weights.b2), cu_seqlens, static_cast<std::int64_t>(weights.kind), cfg);
}

NsaOutputs nsa_attention(const NsaInputs& in, const NSAConfig& cfg) {
  const auto outputs = NsaAttention::apply(in.q, in.k_c, in.v_c, in.k_slc, in.v_slc, in.k_swa, in.v_swa, in.gates,
                                           in.cu_seqlens, in.longest, cfg, in.noise, in.seed);
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

}  // namespace nsa::lm
