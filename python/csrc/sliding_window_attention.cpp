#include "operations.h"

namespace nsa::python {
namespace {

SlidingWindowAttentionParams params_of(const Tensor& q, const Tensor& k, const Tensor& v, std::int64_t window_size,
                                       Scale softmax_scale, const Packed& packed) {
  SlidingWindowAttentionParams params;
  params.q = input(q, "q");
  params.k = input(k, "k");
  params.v = input(v, "v");
  params.window_size = window_size;
  params.softmax_scale = softmax_scale;
  params.packed = packed;
  return params;
}

}  // namespace

Tensors<2> sliding_window_attention(const Tensor& q, const Tensor& k, const Tensor& v, std::int64_t window_size,
                                    Scale softmax_scale, const PackedArguments& packed) {
  auto params = params_of(q, k, v, window_size, softmax_scale, packed.views());
  Tensor o = make_o(q, v);
  Tensor lse = make_lse(q);
  params.o = output(o, "o");
  params.lse = output(lse, "lse");
  run(nsa::sliding_window_attention, params, q);
  return {o, lse};
}

Tensors<3> sliding_window_attention_backward(const Tensor& d_o, const Tensor& q, const Tensor& k, const Tensor& v,
                                             const Tensor& o, const Tensor& lse, std::int64_t window_size,
                                             Scale softmax_scale, const PackedArguments& packed, const Bools& needs) {
  expect_needs(needs, 3);
  SlidingWindowAttentionBackwardParams params;
  params.forward = params_of(q, k, v, window_size, softmax_scale, packed.views());
  params.forward.o = input(o, "o");
  params.forward.lse = input(lse, "lse");
  params.d_o = input(d_o, "d_o");
  Gradient d_q(q, needs[0]), d_k(k, needs[1]), d_v(v, needs[2]);
  params.d_q = d_q.view("d_q");
  params.d_k = d_k.view("d_k");
  params.d_v = d_v.view("d_v");
  run(nsa::sliding_window_attention_backward, params, q);
  return {d_q.tensor, d_k.tensor, d_v.tensor};
}

}  // namespace nsa::python
