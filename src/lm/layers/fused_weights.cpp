#include "lm/layers/fused_weights.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

namespace nsa::lm {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class ConcatCast : public torch::autograd::Function<ConcatCast> {
 public:
  /// `sizes`: tensors in each group.
  static variable_list forward(AutogradContext* ctx, at::TensorList tensors, const std::vector<std::int64_t>& sizes,
                               at::ScalarType dtype) {
    variable_list outputs, rows;
    std::size_t first = 0;
    for (const std::int64_t size : sizes) {
      const auto group = tensors.slice(first, static_cast<std::size_t>(size));
      first += group.size();
      auto shape = group[0].sizes().vec();
      shape[0] = 0;
      for (const at::Tensor& tensor : group) shape[0] += tensor.size(0);
      outputs.push_back(at::empty(shape, group[0].options().dtype(dtype)));
      add_rows(outputs.back(), group, rows);
    }
    at::_foreach_copy_(rows, tensors);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward(tensors.vec());  // their shapes
    ctx->saved_data["sizes"] = sizes;
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& d_outputs) {
    const auto tensors = ctx->get_saved_variables();
    const auto sizes = ctx->saved_data["sizes"].toIntVector();
    variable_list gradients(tensors.size() + 2), copies, rows;
    std::size_t first = 0;
    for (std::size_t i = 0; i < d_outputs.size(); ++i) {
      const auto group = at::TensorList(tensors).slice(first, static_cast<std::size_t>(sizes[i]));
      if (d_outputs[i].defined()) {
        add_rows(d_outputs[i].contiguous(), group, rows);
        for (std::size_t j = 0; j < group.size(); ++j)
          copies.push_back(gradients[first + j] = at::empty_like(group[j]));
      }
      first += group.size();
    }
    at::_foreach_copy_(copies, rows);
    return gradients;
  }

 private:
  /// The rows of `whole` that belong to each tensor of the group.
  static void add_rows(const at::Tensor& whole, at::TensorList group, variable_list& rows) {
    std::int64_t row = 0;
    for (const at::Tensor& tensor : group) {
      rows.push_back(whole.narrow(0, row, tensor.size(0)));
      row += tensor.size(0);
    }
  }
};

}  // namespace

std::vector<at::Tensor> concat_cast(const std::vector<std::vector<at::Tensor>>& groups, at::ScalarType dtype) {
  variable_list tensors;
  std::vector<std::int64_t> sizes;
  for (const auto& group : groups) {
    if (!group[0].defined()) continue;
    tensors.insert(tensors.end(), group.begin(), group.end());
    sizes.push_back(static_cast<std::int64_t>(group.size()));
  }
  const auto outputs = ConcatCast::apply(at::TensorList(tensors), sizes, dtype);
  std::vector<at::Tensor> result;
  std::size_t next = 0;
  for (const auto& group : groups) result.push_back(group[0].defined() ? outputs[next++] : at::Tensor());
  return result;
}

}  // namespace nsa::lm
