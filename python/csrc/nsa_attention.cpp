#include "nsa_attention.h"

namespace nsa::python {

NsaAttentionParams attention_of(const Tensor& q, const Tensor& k_slc, const Tensor& v_slc, const Tensor& k_swa,
                                const Tensor& v_swa, const Tensor& gates, const Ints& cfg, Scale softmax_scale,
                                const Packed& packed) {
  NsaAttentionParams params;
  params.q = input(q, "q");
  params.k_slc = input(k_slc, "k_slc");
  params.v_slc = input(v_slc, "v_slc");
  params.k_swa = input(k_swa, "k_swa");
  params.v_swa = input(v_swa, "v_swa");
  params.gates = input(gates, "gates");
  params.cfg = config_of(cfg);
  params.softmax_scale = softmax_scale;
  params.packed = packed;
  check(params.cfg.validate());  // before a size is taken from it
  return params;
}

void take_outputs(NsaAttentionParams& params, const Tensor& indices, const Tensor& o_cmp, const Tensor& o_slc,
                  const Tensor& o_swa, const Tensor& lse_cmp, const Tensor& lse_slc, const Tensor& lse_swa) {
  params.indices = input(indices, "indices");
  params.o_cmp = input(o_cmp, "o_cmp");
  params.o_slc = input(o_slc, "o_slc");
  params.o_swa = input(o_swa, "o_swa");
  params.lse_cmp = input(lse_cmp, "lse_cmp");
  params.lse_slc = input(lse_slc, "lse_slc");
  params.lse_swa = input(lse_swa, "lse_swa");
}

Outputs::Outputs(NsaAttentionParams& params, const Tensor& q, const Tensor& k, const Tensor& v, bool keep)
    : o(make_o(q, v)),
      indices(make_indices(q, k, params.cfg)),
      o_cmp(keep ? make_o(q, v) : make(q, {0})),
      o_slc(keep ? make_o(q, v) : make(q, {0})),
      o_swa(keep ? make_o(q, v) : make(q, {0})),
      lse_cmp(keep ? make_lse(q) : make(q, {0}, ScalarType::Float)),
      lse_slc(keep ? make_lse(q) : make(q, {0}, ScalarType::Float)),
      lse_swa(keep ? make_lse(q) : make(q, {0}, ScalarType::Float)) {
  params.o = output(o, "o");
  params.indices = output(indices, "indices");
  if (!keep) return;
  params.o_cmp = output(o_cmp, "o_cmp");
  params.o_slc = output(o_slc, "o_slc");
  params.o_swa = output(o_swa, "o_swa");
  params.lse_cmp = output(lse_cmp, "lse_cmp");
  params.lse_slc = output(lse_slc, "lse_slc");
  params.lse_swa = output(lse_swa, "lse_swa");
}

Tensors<8> nsa_attention(const Tensor& q, const Tensor& k_c, const Tensor& v_c, const Tensor& k_slc,
                         const Tensor& v_slc, const Tensor& k_swa, const Tensor& v_swa, const Tensor& gates, Ints cfg,
                         Scale softmax_scale, double noise, std::int64_t seed, OptionalTensor cu_seqlens_q,
                         OptionalTensor cu_seqlens_k, std::int64_t max_seqlen_q, std::int64_t max_seqlen_k,
                         OptionalTensor imposed_indices, bool keep) {
  auto params = attention_of(q, k_slc, v_slc, k_swa, v_swa, gates, cfg, softmax_scale,
                             packed_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k));
  params.k_c = input(k_c, "k_c");
  params.v_c = input(v_c, "v_c");
  params.noise = noise;
  params.seed = static_cast<std::uint64_t>(seed);
  params.imposed_indices = input(imposed_indices, "imposed_indices");
  const Outputs out(params, q, k_slc, v_slc, keep);
  run(nsa::nsa_attention, params, q);
  return {out.o, out.indices, out.o_cmp, out.o_slc, out.o_swa, out.lse_cmp, out.lse_slc, out.lse_swa};
}

Tensors<8> nsa_attention_backward(const Tensor& d_o, const Tensor& q, const Tensor& k_c, const Tensor& v_c,
                                  const Tensor& k_slc, const Tensor& v_slc, const Tensor& k_swa, const Tensor& v_swa,
                                  const Tensor& gates, const Tensor& indices, const Tensor& o_cmp, const Tensor& o_slc,
                                  const Tensor& o_swa, const Tensor& lse_cmp, const Tensor& lse_slc,
                                  const Tensor& lse_swa, Ints cfg, Scale softmax_scale, OptionalTensor cu_seqlens_q,
                                  OptionalTensor cu_seqlens_k, std::int64_t max_seqlen_q, std::int64_t max_seqlen_k,
                                  OptionalTensor imposed_indices, Bools needs) {
  expect_needs(needs, 8);
  NsaAttentionBackwardParams params;
  params.forward = attention_of(q, k_slc, v_slc, k_swa, v_swa, gates, cfg, softmax_scale,
                                packed_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k));
  params.forward.k_c = input(k_c, "k_c");
  params.forward.v_c = input(v_c, "v_c");
  params.forward.imposed_indices = input(imposed_indices, "imposed_indices");
  take_outputs(params.forward, indices, o_cmp, o_slc, o_swa, lse_cmp, lse_slc, lse_swa);
  params.d_o = input(d_o, "d_o");
  Gradient d_q(q, needs[0]), d_k_c(k_c, needs[1]), d_v_c(v_c, needs[2]), d_k_slc(k_slc, needs[3]),
      d_v_slc(v_slc, needs[4]), d_k_swa(k_swa, needs[5]), d_v_swa(v_swa, needs[6]), d_gates(gates, needs[7]);
  params.d_q = d_q.view("d_q");
  params.d_k_c = d_k_c.view("d_k_c");
  params.d_v_c = d_v_c.view("d_v_c");
  params.d_k_slc = d_k_slc.view("d_k_slc");
  params.d_v_slc = d_v_slc.view("d_v_slc");
  params.d_k_swa = d_k_swa.view("d_k_swa");
  params.d_v_swa = d_v_swa.view("d_v_swa");
  params.d_gates = d_gates.view("d_gates");
  run(nsa::nsa_attention_backward, params, q);
  return {d_q.tensor,     d_k_c.tensor,   d_v_c.tensor,   d_k_slc.tensor,
          d_v_slc.tensor, d_k_swa.tensor, d_v_swa.tensor, d_gates.tensor};
}

}  // namespace nsa::python
