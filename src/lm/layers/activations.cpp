#include "lm/layers/activations.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/silu.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lm/layers/elementwise.h"

namespace nsa::lm {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class FusedSwiglu : public torch::autograd::Function<FusedSwiglu> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x) {
    ctx->save_for_backward({x});
    return fused_swiglu(x);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& d_outputs) {
    return {fused_swiglu_backward(d_outputs[0], ctx->get_saved_variables()[0])};
  }
};

class FusedBiasedSilu : public torch::autograd::Function<FusedBiasedSilu> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& bias) {
    ctx->save_for_backward({x, bias});
    return fused_biased_silu(x, bias);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& d_outputs) {
    const auto saved = ctx->get_saved_variables();
    const auto [d_x, d_bias] = fused_biased_silu_backward(d_outputs[0], saved[0], saved[1]);
    return {d_x, d_bias};
  }
};

}  // namespace

at::Tensor swiglu(const at::Tensor& x) {
  if (swiglu_is_fused(x)) return FusedSwiglu::apply(x);
  const auto parts = x.chunk(2, 1);
  return at::silu(parts[0]) * parts[1];
}

at::Tensor biased_silu(const at::Tensor& x, const at::Tensor& bias) {
  return biased_silu_is_fused(x, bias) ? FusedBiasedSilu::apply(x, bias) : at::silu(x + bias);
}

}  // namespace nsa::lm
