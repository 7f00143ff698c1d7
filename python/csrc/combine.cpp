#include "operations.h"

namespace nsa::python {
namespace {

CombineParams params_of(const Tensor& o_cmp, const Tensor& o_slc, const Tensor& o_swa, const Tensor& gates) {
  CombineParams params;
  params.o_cmp = input(o_cmp, "o_cmp");
  params.o_slc = input(o_slc, "o_slc");
  params.o_swa = input(o_swa, "o_swa");
  params.gates = input(gates, "gates");
  return params;
}

}  // namespace

Tensor combine(const Tensor& o_cmp, const Tensor& o_slc, const Tensor& o_swa, const Tensor& gates) {
  CombineParams params = params_of(o_cmp, o_slc, o_swa, gates);
  Tensor o = make(o_cmp, shape_of(o_cmp));
  params.o = output(o, "o");
  run(nsa::combine, params, o_cmp);
  return o;
}

Tensors<4> combine_backward(const Tensor& d_o, const Tensor& o_cmp, const Tensor& o_slc, const Tensor& o_swa,
                            const Tensor& gates, const Bools& needs) {
  expect_needs(needs, 4);
  CombineBackwardParams params;
  params.forward = params_of(o_cmp, o_slc, o_swa, gates);
  params.d_o = input(d_o, "d_o");
  Gradient d_o_cmp(o_cmp, needs[0]), d_o_slc(o_slc, needs[1]), d_o_swa(o_swa, needs[2]), d_gates(gates, needs[3]);
  params.d_o_cmp = d_o_cmp.view("d_o_cmp");
  params.d_o_slc = d_o_slc.view("d_o_slc");
  params.d_o_swa = d_o_swa.view("d_o_swa");
  params.d_gates = d_gates.view("d_gates");
  run(nsa::combine_backward, params, o_cmp);
  return {d_o_cmp.tensor, d_o_slc.tensor, d_o_swa.tensor, d_gates.tensor};
}

}  // namespace nsa::python
