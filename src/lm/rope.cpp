#include "lm/rope.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "lm/fused.h"

namespace nsa::lm {
namespace {

/// The rotation in torch's operations.
at::Tensor rotated_by_torch(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, float direction) {
  const auto halves = x.to(at::kFloat).chunk(2, 2);
  const auto c = cos.unsqueeze(1), s = sin.unsqueeze(1) * direction;
  return at::cat({halves[0] * c - halves[1] * s, halves[1] * c + halves[0] * s}, 2).to(x.scalar_type());
}

/// direction +1 rotates, -1 rotates back, which is also the gradient.
at::Tensor rotated(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, float direction) {
  TORCH_CHECK(x.dim() == 3 && x.stride(2) == 1 && cos.size(0) == x.size(0) && 2 * cos.size(1) == x.size(2),
              "rotate: x ", x.sizes(), " with a table of ", cos.sizes());
  if (!x.is_cpu()) {
    return rotation_is_fused(x) ? fused_rotate(x, cos.contiguous(), sin.contiguous(), direction)
                                : rotated_by_torch(x, cos, sin, direction);
  }
  const auto out = at::empty(x.sizes(), x.options());
  const std::int64_t heads = x.size(1), half = cos.size(1);
  AT_DISPATCH_FLOATING_TYPES_AND(at::kBFloat16, x.scalar_type(), "rotate", [&] {
    const scalar_t* const from = x.const_data_ptr<scalar_t>();
    scalar_t* const to = out.mutable_data_ptr<scalar_t>();
    const float* const cosines = cos.const_data_ptr<float>();
    const float* const sines = sin.const_data_ptr<float>();
    at::parallel_for(0, x.size(0), 64, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        const float* const c = cosines + row * half;
        const float* const s = sines + row * half;
        for (std::int64_t h = 0; h < heads; ++h) {
          const scalar_t* const in = from + row * x.stride(0) + h * x.stride(1);
          scalar_t* const result = to + (row * heads + h) * 2 * half;
          for (std::int64_t j = 0; j < half; ++j) {
            const auto first = static_cast<float>(in[j]), second = static_cast<float>(in[j + half]);
            const float turn = direction * s[j];
            result[j] = static_cast<scalar_t>(first * c[j] - second * turn);
            result[j + half] = static_cast<scalar_t>(second * c[j] + first * turn);
          }
        }
      }
    });
  });
  return out;
}

class Rotate : public torch::autograd::Function<Rotate> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& cos,
                            const at::Tensor& sin) {
    ctx->save_for_backward({cos, sin});
    return rotated(x, cos, sin, 1);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& d_outputs) {
    const auto saved = ctx->get_saved_variables();
    return {rotated(d_outputs[0].contiguous(), saved[0], saved[1], -1), {}, {}};
  }
};

}  // namespace

Rotation Rotation::at(const at::Tensor& positions) const {
  return {cos.index_select(0, positions), sin.index_select(0, positions)};
}

Rotation rotation_table(std::int64_t max_positions, std::int64_t head_dim, double theta, at::Device device) {
  const std::int64_t half = head_dim / 2;
  Rotation table{at::empty({max_positions, half}), at::empty({max_positions, half})};  // in host memory
  float* const cos = table.cos.mutable_data_ptr<float>();
  float* const sin = table.sin.mutable_data_ptr<float>();
  for (std::int64_t j = 0; j < half; ++j) {
    const double frequency = std::pow(theta, -2.0 * static_cast<double>(j) / static_cast<double>(head_dim));
    for (std::int64_t t = 0; t < max_positions; ++t) {
      const double angle = static_cast<double>(t) * frequency;
      cos[t * half + j] = static_cast<float>(std::cos(angle));
      sin[t * half + j] = static_cast<float>(std::sin(angle));
    }
  }
  return {table.cos.to(device), table.sin.to(device)};
}

at::Tensor rotate(const at::Tensor& x, const Rotation& rotation) {
  return Rotate::apply(x, rotation.cos, rotation.sin);
}

}  // namespace nsa::lm
