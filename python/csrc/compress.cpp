#include "operations.h"

namespace nsa::python {
namespace {

CompressParams params_of(const Tensor& k, const PhiArguments& weights, const Ints& cfg,
                         const OptionalTensor& cu_seqlens) {
  CompressParams params;
  params.k = input(k, "k");
  params.weights = weights.views();
  params.cfg = config_of(cfg);
  params.cu_seqlens = input(cu_seqlens, "cu_seqlens");
  check(params.cfg.validate());  // before a size is computed from it
  return params;
}

}  // namespace

Tensor compress(const Tensor& k, const PhiArguments& weights, const Ints& cfg, const OptionalTensor& cu_seqlens) {
  CompressParams params = params_of(k, weights, cfg, cu_seqlens);
  Tensor out = make(k, compressed_shape(k, params.cfg, cu_seqlens.has_value()));
  params.out = output(out, "out");
  run(nsa::compress, params, k);
  return out;
}

Tensors<6> compress_backward(const Tensor& d_out, const Tensor& k, const PhiArguments& weights, const Ints& cfg,
                             const OptionalTensor& cu_seqlens, const Bools& needs) {
  expect_needs(needs, 6);
  CompressBackwardParams params;
  params.forward = params_of(k, weights, cfg, cu_seqlens);
  params.d_out = input(d_out, "d_out");
  Gradient d_k(k, needs[0]);
  const WeightGradients d_weights(needs, 1, k, weights);
  params.d_k = d_k.view("d_k");
  params.d_weights = d_weights.views();
  run(nsa::compress_backward, params, k);
  return std::tuple_cat(std::tuple(d_k.tensor), d_weights.tensors());
}

Tensor compressed_cu_seqlens(const Tensor& cu_seqlens, const Ints& cfg) {
  const NSAConfig config = config_of(cfg);
  const TensorView offsets = input(cu_seqlens, "cu_seqlens");
  Tensor out = make(cu_seqlens, shape_of(cu_seqlens), ScalarType::Int);
  check(nsa::compressed_cu_seqlens(offsets, config, output(out, "out")));
  return out;
}

}  // namespace nsa::python
