#include "nsa_attention.h"

namespace nsa::python {
namespace {

/// A kept tensor, or one that was not: 1-D without elements.
TensorView kept(const Tensor& tensor, const char* name) {
  return tensor.dim() == 1 && tensor.numel() == 0 ? TensorView{} : input(tensor, name);
}

NativeSparseAttentionParams params_of(const BranchArguments& branches, const PhiArguments& weights_k,
                                      const PhiArguments& weights_v, const Ints& cfg, Scale softmax_scale,
                                      const RotationArguments& rotation, const PackedArguments& packed,
                                      const OptionalTensor& block_indices) {
  NativeSparseAttentionParams params;
  params.k_cmp = input(branches.k_cmp, "k_cmp");
  params.v_cmp = input(branches.v_cmp, "v_cmp");
  params.weights_k = weights_k.views();
  params.weights_v = weights_v.views();
  params.rope_cos = input(rotation.cos, "rope_cos");
  params.rope_sin = input(rotation.sin, "rope_sin");
  params.attention = attention_of(branches, cfg, softmax_scale, packed, block_indices);
  return params;
}

}  // namespace

Tensors<10> native_sparse_attention(const BranchArguments& branches, const PhiArguments& weights_k,
                                    const PhiArguments& weights_v, const Ints& cfg, Scale softmax_scale,
                                    const RotationArguments& rotation, double noise, std::int64_t seed,
                                    const PackedArguments& packed, const OptionalTensor& block_indices, bool keep,
                                    bool keep_compressed) {
  auto params = params_of(branches, weights_k, weights_v, cfg, softmax_scale, rotation, packed, block_indices);
  NsaAttentionParams& attention = params.attention;
  attention.noise = noise;
  attention.seed = static_cast<std::uint64_t>(seed);
  const Outputs out(attention, branches, keep);
  const SavedArguments& saved = out.saved;
  const auto compressed = [&](const Tensor& raw) {
    return make(branches.q,
                keep_compressed ? compressed_shape(raw, attention.cfg, attention.packed.packed()) : Shape{0});
  };
  const Tensor k_c = compressed(branches.k_cmp), v_c = compressed(branches.v_cmp);
  if (keep_compressed) {
    attention.k_c = output(k_c, "k_c");
    attention.v_c = output(v_c, "v_c");
  }
  run(nsa::native_sparse_attention, params, branches.q);
  return {out.o,       out.indices, k_c,           v_c,           saved.o_cmp,
          saved.o_slc, saved.o_swa, saved.lse_cmp, saved.lse_slc, saved.lse_swa};
}

Tensors<18> native_sparse_attention_backward(const Tensor& d_o, const BranchArguments& branches,
                                             const PhiArguments& weights_k, const PhiArguments& weights_v,
                                             const Tensor& indices, const Tensor& k_c, const Tensor& v_c,
                                             const SavedArguments& saved, const Ints& cfg, Scale softmax_scale,
                                             const RotationArguments& rotation, const PackedArguments& packed,
                                             const OptionalTensor& block_indices, const Bools& needs) {
  expect_needs(needs, 18);
  NativeSparseAttentionBackwardParams params;
  params.forward = params_of(branches, weights_k, weights_v, cfg, softmax_scale, rotation, packed, block_indices);
  take_outputs(params.forward.attention, indices, saved);
  params.forward.attention.k_c = kept(k_c, "k_c");
  params.forward.attention.v_c = kept(v_c, "v_c");
  params.d_o = input(d_o, "d_o");
  const BranchGradients d(branches, needs);
  d.bind(params);
  params.d_k_cmp = d.k_cmp.view("d_k_cmp");
  params.d_v_cmp = d.v_cmp.view("d_v_cmp");
  const WeightGradients k(needs, 8, branches.q, weights_k), v(needs, 13, branches.q, weights_v);
  params.d_weights_k = k.views();
  params.d_weights_v = v.views();
  run(nsa::native_sparse_attention_backward, params, branches.q);
  return std::tuple_cat(d.tensors(), k.tensors(), v.tensors());
}

}  // namespace nsa::python
