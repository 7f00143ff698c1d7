#include "lm/layers/recompute.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

namespace nsa::lm {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Kept : torch::CustomClassHolder {
  explicit Kept(Layer layer) : layer(std::move(layer)) {}
  Layer layer;
};

class Recomputed : public torch::autograd::Function<Recomputed> {
 public:
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs, Layer layer) {  // records no gradients
    const auto outputs = layer(inputs);
    for (const at::Tensor& output : outputs) {
      if (!output.is_floating_point()) ctx->mark_non_differentiable({output});
    }
    ctx->save_for_backward(inputs.vec());
    ctx->saved_data["layer"] = c10::IValue::make_capsule(c10::make_intrusive<Kept>(std::move(layer)));
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& d_outputs) {
    const auto kept = c10::static_intrusive_pointer_cast<Kept>(ctx->saved_data["layer"].toCapsule());
    variable_list inputs;
    for (const at::Tensor& input : ctx->get_saved_variables()) inputs.push_back(input.detach().requires_grad_());
    variable_list outputs, gradients;
    {
      const at::AutoGradMode record(true);
      const auto all = kept->layer(inputs);
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (!d_outputs[i].defined() || !all[i].requires_grad()) continue;
        outputs.push_back(all[i]);
        gradients.push_back(d_outputs[i]);
      }
    }
    torch::autograd::backward(outputs, gradients);
    variable_list d_inputs;
    for (const at::Tensor& input : inputs) d_inputs.push_back(input.grad());
    d_inputs.emplace_back();  // of the layer
    return d_inputs;
  }
};

}  // namespace

std::vector<at::Tensor> recomputed(Layer layer, at::TensorList inputs) {
  return Recomputed::apply(inputs, std::move(layer));
}

}  // namespace nsa::lm
