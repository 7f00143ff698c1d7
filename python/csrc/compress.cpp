#include "operations.h"

namespace nsa::python {
namespace {

CompressParams params_of(const Tensor& k, const std::string& kind, const OptionalTensor& pe, const OptionalTensor& w1,
                         const OptionalTensor& b1, const OptionalTensor& w2, const OptionalTensor& b2, const Ints& cfg,
                         const OptionalTensor& cu_seqlens) {
  CompressParams params;
  params.k = input(k, "k");
  params.weights = weights_of(kind, pe, w1, b1, w2, b2);
  params.cfg = config_of(cfg);
  params.cu_seqlens = input(cu_seqlens, "cu_seqlens");
  check(params.cfg.validate());  // before a size is computed from it
  return params;
}

}  // namespace

Tensor compress(const Tensor& k, std::string kind, OptionalTensor pe, OptionalTensor w1, OptionalTensor b1,
                OptionalTensor w2, OptionalTensor b2, Ints cfg, OptionalTensor cu_seqlens) {
  CompressParams params = params_of(k, kind, pe, w1, b1, w2, b2, cfg, cu_seqlens);
  Tensor out = make(k, compressed_shape(k, params.cfg, cu_seqlens.has_value()));
  params.out = output(out, "out");
  run(nsa::compress, params, k);
  return out;
}

Tensors<6> compress_backward(const Tensor& d_out, const Tensor& k, std::string kind, OptionalTensor pe,
                             OptionalTensor w1, OptionalTensor b1, OptionalTensor w2, OptionalTensor b2, Ints cfg,
                             OptionalTensor cu_seqlens, Bools needs) {
  expect_needs(needs, 6);
  CompressBackwardParams params;
  params.forward = params_of(k, kind, pe, w1, b1, w2, b2, cfg, cu_seqlens);
  params.d_out = input(d_out, "d_out");
  Gradient d_k(k, needs[0]);
  const WeightGradients weights(needs, 1, k, pe, w1, b1, w2, b2);
  params.d_k = d_k.view("d_k");
  params.d_weights = weights.views();
  run(nsa::compress_backward, params, k);
  return {d_k.tensor, weights.pe.tensor, weights.w1.tensor, weights.b1.tensor, weights.w2.tensor, weights.b2.tensor};
}

Tensor compressed_cu_seqlens(const Tensor& cu_seqlens, Ints cfg) {
  const NSAConfig config = config_of(cfg);
  const TensorView offsets = input(cu_seqlens, "cu_seqlens");
  Tensor out = make(cu_seqlens, shape_of(cu_seqlens), ScalarType::Int);
  check(nsa::compressed_cu_seqlens(offsets, config, output(out, "out")));
  return out;
}

}  // namespace nsa::python
