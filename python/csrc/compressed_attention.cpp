#include "operations.h"

namespace nsa::python {
namespace {

CompressedAttentionParams params_of(const Tensor& q, const Tensor& k_c, const Tensor& v_c, const Ints& cfg,
                                    Scale softmax_scale, Length seqlen_k, const Packed& packed) {
  CompressedAttentionParams params;
  params.q = input(q, "q");
  params.k_c = input(k_c, "k_c");
  params.v_c = input(v_c, "v_c");
  params.cfg = config_of(cfg);
  params.softmax_scale = softmax_scale;
  params.seqlen_k = seqlen_k;
  params.packed = packed;
  return params;
}

}  // namespace

Tensors<2> compressed_attention(const Tensor& q, const Tensor& k_c, const Tensor& v_c, const Ints& cfg,
                                Scale softmax_scale, Length seqlen_k, const PackedArguments& packed) {
  auto params = params_of(q, k_c, v_c, cfg, softmax_scale, seqlen_k, packed.views());
  Tensor o = make_o(q, v_c);
  Tensor lse = make_lse(q);
  params.o = output(o, "o");
  params.lse = output(lse, "lse");
  run(nsa::compressed_attention, params, q);
  return {o, lse};
}

Tensors<3> compressed_attention_backward(const Tensor& d_o, const Tensor& q, const Tensor& k_c, const Tensor& v_c,
                                         const Tensor& o, const Tensor& lse, const Ints& cfg, Scale softmax_scale,
                                         Length seqlen_k, const PackedArguments& packed, const Bools& needs) {
  expect_needs(needs, 3);
  CompressedAttentionBackwardParams params;
  params.forward = params_of(q, k_c, v_c, cfg, softmax_scale, seqlen_k, packed.views());
  params.forward.o = input(o, "o");
  params.forward.lse = input(lse, "lse");
  params.d_o = input(d_o, "d_o");
  Gradient d_q(q, needs[0]), d_k_c(k_c, needs[1]), d_v_c(v_c, needs[2]);
  params.d_q = d_q.view("d_q");
  params.d_k_c = d_k_c.view("d_k_c");
  params.d_v_c = d_v_c.view("d_v_c");
  run(nsa::compressed_attention_backward, params, q);
  return {d_q.tensor, d_k_c.tensor, d_v_c.tensor};
}

}  // namespace nsa::python
