#include "nsa_attention.h"

namespace nsa::python {
namespace {

/// A kept tensor, or one that was not: 1-D without elements.
TensorView kept(const Tensor& tensor, const char* name) {
  return tensor.dim() == 1 && tensor.numel() == 0 ? TensorView{} : input(tensor, name);
}

}  // namespace

Tensors<10> native_sparse_attention(const Tensor& q, const Tensor& k_cmp, const Tensor& v_cmp, const Tensor& k_slc,
                                    const Tensor& v_slc, const Tensor& k_swa, const Tensor& v_swa, const Tensor& gates,
                                    const std::string& kind_k, const OptionalTensor& pe_k, const OptionalTensor& w1_k,
                                    const OptionalTensor& b1_k, const OptionalTensor& w2_k, const OptionalTensor& b2_k,
                                    const std::string& kind_v, const OptionalTensor& pe_v, const OptionalTensor& w1_v,
                                    const OptionalTensor& b1_v, const OptionalTensor& w2_v, const OptionalTensor& b2_v,
                                    const Ints& cfg, Scale softmax_scale, const OptionalTensor& rope_cos,
                                    const OptionalTensor& rope_sin, double noise, std::int64_t seed,
                                    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                                    std::int64_t max_seqlen_q, std::int64_t max_seqlen_k,
                                    const OptionalTensor& imposed_indices, bool keep, bool keep_compressed) {
  NativeSparseAttentionParams params;
  params.k_cmp = input(k_cmp, "k_cmp");
  params.v_cmp = input(v_cmp, "v_cmp");
  params.weights_k = weights_of(kind_k, pe_k, w1_k, b1_k, w2_k, b2_k);
  params.weights_v = weights_of(kind_v, pe_v, w1_v, b1_v, w2_v, b2_v);
  params.rope_cos = input(rope_cos, "rope_cos");
  params.rope_sin = input(rope_sin, "rope_sin");
  NsaAttentionParams& attention = params.attention;
  attention = attention_of(q, k_slc, v_slc, k_swa, v_swa, gates, cfg, softmax_scale,
                           packed_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k));
  attention.noise = noise;
  attention.seed = static_cast<std::uint64_t>(seed);
  attention.imposed_indices = input(imposed_indices, "imposed_indices");
  const Outputs outputs(attention, q, k_slc, v_slc, keep);
  const bool packed = attention.packed.packed();
  Tensor k_c = make(q, keep_compressed ? compressed_shape(k_cmp, attention.cfg, packed) : Shape{0});
  Tensor v_c = make(q, keep_compressed ? compressed_shape(v_cmp, attention.cfg, packed) : Shape{0});
  if (keep_compressed) {
    attention.k_c = output(k_c, "k_c");
    attention.v_c = output(v_c, "v_c");
  }
  run(nsa::native_sparse_attention, params, q);
  return {outputs.o,       outputs.indices, k_c, v_c, outputs.o_cmp, outputs.o_slc, outputs.o_swa, outputs.lse_cmp,
          outputs.lse_slc, outputs.lse_swa};
}

Tensors<18> native_sparse_attention_backward(
    const Tensor& d_o, const Tensor& q, const Tensor& k_cmp, const Tensor& v_cmp, const Tensor& k_slc,
    const Tensor& v_slc, const Tensor& k_swa, const Tensor& v_swa, const Tensor& gates, const std::string& kind_k,
    const OptionalTensor& pe_k, const OptionalTensor& w1_k, const OptionalTensor& b1_k, const OptionalTensor& w2_k,
    const OptionalTensor& b2_k, const std::string& kind_v, const OptionalTensor& pe_v, const OptionalTensor& w1_v,
    const OptionalTensor& b1_v, const OptionalTensor& w2_v, const OptionalTensor& b2_v, const Tensor& indices,
    const Tensor& k_c, const Tensor& v_c, const Tensor& o_cmp, const Tensor& o_slc, const Tensor& o_swa,
    const Tensor& lse_cmp, const Tensor& lse_slc, const Tensor& lse_swa, const Ints& cfg, Scale softmax_scale,
    const OptionalTensor& rope_cos, const OptionalTensor& rope_sin, const OptionalTensor& cu_seqlens_q,
    const OptionalTensor& cu_seqlens_k, std::int64_t max_seqlen_q, std::int64_t max_seqlen_k,
    const OptionalTensor& imposed_indices, const Bools& needs) {
  expect_needs(needs, 18);
  NativeSparseAttentionBackwardParams params;
  NativeSparseAttentionParams& forward = params.forward;
  forward.k_cmp = input(k_cmp, "k_cmp");
  forward.v_cmp = input(v_cmp, "v_cmp");
  forward.weights_k = weights_of(kind_k, pe_k, w1_k, b1_k, w2_k, b2_k);
  forward.weights_v = weights_of(kind_v, pe_v, w1_v, b1_v, w2_v, b2_v);
  forward.rope_cos = input(rope_cos, "rope_cos");
  forward.rope_sin = input(rope_sin, "rope_sin");
  forward.attention = attention_of(q, k_slc, v_slc, k_swa, v_swa, gates, cfg, softmax_scale,
                                   packed_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k));
  take_outputs(forward.attention, indices, o_cmp, o_slc, o_swa, lse_cmp, lse_slc, lse_swa);
  forward.attention.imposed_indices = input(imposed_indices, "imposed_indices");
  forward.attention.k_c = kept(k_c, "k_c");
  forward.attention.v_c = kept(v_c, "v_c");
  params.d_o = input(d_o, "d_o");
  Gradient d_q(q, needs[0]), d_k_cmp(k_cmp, needs[1]), d_v_cmp(v_cmp, needs[2]), d_k_slc(k_slc, needs[3]),
      d_v_slc(v_slc, needs[4]), d_k_swa(k_swa, needs[5]), d_v_swa(v_swa, needs[6]), d_gates(gates, needs[7]);
  params.d_q = d_q.view("d_q");
  params.d_k_cmp = d_k_cmp.view("d_k_cmp");
  params.d_v_cmp = d_v_cmp.view("d_v_cmp");
  params.d_k_slc = d_k_slc.view("d_k_slc");
  params.d_v_slc = d_v_slc.view("d_v_slc");
  params.d_k_swa = d_k_swa.view("d_k_swa");
  params.d_v_swa = d_v_swa.view("d_v_swa");
  params.d_gates = d_gates.view("d_gates");
  WeightGradients k(needs, 8, q, pe_k, w1_k, b1_k, w2_k, b2_k), v(needs, 13, q, pe_v, w1_v, b1_v, w2_v, b2_v);
  params.d_weights_k = k.views();
  params.d_weights_v = v.views();
  run(nsa::native_sparse_attention_backward, params, q);
  return {d_q.tensor,     d_k_cmp.tensor, d_v_cmp.tensor, d_k_slc.tensor, d_v_slc.tensor, d_k_swa.tensor,
          d_v_swa.tensor, d_gates.tensor, k.pe.tensor,    k.w1.tensor,    k.b1.tensor,    k.w2.tensor,
          k.b2.tensor,    v.pe.tensor,    v.w1.tensor,    v.b1.tensor,    v.w2.tensor,    v.b2.tensor};
}

}  // namespace nsa::python
