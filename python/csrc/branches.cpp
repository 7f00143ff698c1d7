// The attention of one branch, and block selection.
#include <limits>

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

SelectedAttentionParams params_of(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& indices,
                                  std::int64_t block_size, Scale softmax_scale, const Packed& packed) {
  if (block_size < 0 || block_size > std::numeric_limits<int>::max())
    refuse("block_size = " + std::to_string(block_size) + ": must be a positive multiple of 16");
  SelectedAttentionParams params;
  params.q = input(q, "q");
  params.k = input(k, "k");
  params.v = input(v, "v");
  params.indices = input(indices, "indices");
  params.block_size = static_cast<int>(block_size);
  params.softmax_scale = softmax_scale;
  params.packed = packed;
  return params;
}

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

/// o and lse of the operation.
template <class Params>
Tensors<2> attend(Status (*operation)(const Params&, const Context&), Params params, const Tensor& q, const Tensor& v) {
  Tensor o = make_o(q, v);
  Tensor lse = make_lse(q);
  params.o = output(o, "o");
  params.lse = output(lse, "lse");
  run(operation, params, q);
  return {o, lse};
}

/// What a backward takes of its forward's results.
template <class Backward, class Forward>
Backward backward_of(Forward forward, const Tensor& d_o, const Tensor& o, const Tensor& lse) {
  forward.o = input(o, "o");
  forward.lse = input(lse, "lse");
  Backward params;
  params.forward = std::move(forward);
  params.d_o = input(d_o, "d_o");
  return params;
}

/// The gradients of a backward whose keys are not compressed.
template <class Params>
Tensors<3> differentiate(Status (*operation)(const Params&, const Context&), Params params, const Tensor& q,
                         const Tensor& k, const Tensor& v, const Bools& needs) {
  Gradient d_q(q, needs[0]), d_k(k, needs[1]), d_v(v, needs[2]);
  params.d_q = d_q.view("d_q");
  params.d_k = d_k.view("d_k");
  params.d_v = d_v.view("d_v");
  run(operation, params, q);
  return {d_q.tensor, d_k.tensor, d_v.tensor};
}

}  // namespace

Tensors<2> compressed_attention(const Tensor& q, const Tensor& k_c, const Tensor& v_c, const Ints& cfg,
                                Scale softmax_scale, Length seqlen_k, const PackedArguments& packed) {
  return attend(nsa::compressed_attention, params_of(q, k_c, v_c, cfg, softmax_scale, seqlen_k, packed.views()), q,
                v_c);
}

Tensors<3> compressed_attention_backward(const Tensor& d_o, const Tensor& q, const Tensor& k_c, const Tensor& v_c,
                                         const Tensor& o, const Tensor& lse, const Ints& cfg, Scale softmax_scale,
                                         Length seqlen_k, const PackedArguments& packed, const Bools& needs) {
  expect_needs(needs, 3);
  auto params = backward_of<CompressedAttentionBackwardParams>(
      params_of(q, k_c, v_c, cfg, softmax_scale, seqlen_k, packed.views()), d_o, o, lse);
  Gradient d_q(q, needs[0]), d_k_c(k_c, needs[1]), d_v_c(v_c, needs[2]);
  params.d_q = d_q.view("d_q");
  params.d_k_c = d_k_c.view("d_k_c");
  params.d_v_c = d_v_c.view("d_v_c");
  run(nsa::compressed_attention_backward, params, q);
  return {d_q.tensor, d_k_c.tensor, d_v_c.tensor};
}

Tensor select_blocks(const Tensor& q, const Tensor& k_c, const Tensor& lse, const Ints& cfg, Scale softmax_scale,
                     Length seqlen_k, double noise, std::int64_t seed, const PackedArguments& packed) {
  SelectBlocksParams params;
  params.q = input(q, "q");
  params.k_c = input(k_c, "k_c");
  params.lse = input(lse, "lse");
  params.cfg = config_of(cfg);
  params.softmax_scale = softmax_scale;
  params.seqlen_k = seqlen_k;
  params.noise = noise;
  params.seed = static_cast<std::uint64_t>(seed);
  params.packed = packed.views();
  check(params.cfg.validate());  // before a size is taken from it
  Tensor indices = make_indices(q, k_c, params.cfg);
  params.indices = output(indices, "indices");
  run(nsa::select_blocks, params, q);
  return indices;
}

Tensors<2> selected_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& indices,
                              std::int64_t block_size, Scale softmax_scale, const PackedArguments& packed) {
  return attend(nsa::selected_attention, params_of(q, k, v, indices, block_size, softmax_scale, packed.views()), q, v);
}

Tensors<3> selected_attention_backward(const Tensor& d_o, const Tensor& q, const Tensor& k, const Tensor& v,
                                       const Tensor& indices, const Tensor& o, const Tensor& lse,
                                       std::int64_t block_size, Scale softmax_scale, const PackedArguments& packed,
                                       const Bools& needs) {
  expect_needs(needs, 3);
  return differentiate(nsa::selected_attention_backward,
                       backward_of<SelectedAttentionBackwardParams>(
                           params_of(q, k, v, indices, block_size, softmax_scale, packed.views()), d_o, o, lse),
                       q, k, v, needs);
}

Tensors<2> sliding_window_attention(const Tensor& q, const Tensor& k, const Tensor& v, std::int64_t window_size,
                                    Scale softmax_scale, const PackedArguments& packed) {
  return attend(nsa::sliding_window_attention, params_of(q, k, v, window_size, softmax_scale, packed.views()), q, v);
}

Tensors<3> sliding_window_attention_backward(const Tensor& d_o, const Tensor& q, const Tensor& k, const Tensor& v,
                                             const Tensor& o, const Tensor& lse, std::int64_t window_size,
                                             Scale softmax_scale, const PackedArguments& packed, const Bools& needs) {
  expect_needs(needs, 3);
  return differentiate(nsa::sliding_window_attention_backward,
                       backward_of<SlidingWindowAttentionBackwardParams>(
                           params_of(q, k, v, window_size, softmax_scale, packed.views()), d_o, o, lse),
                       q, k, v, needs);
}

}  // namespace nsa::python
