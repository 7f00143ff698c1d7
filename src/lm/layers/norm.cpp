#include "lm/layers/norm.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "lm/layers/elementwise.h"

namespace nsa::lm {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The weight's gradient is summed over fixed runs of rows and then over the runs, so that threads do not change it.
constexpr std::int64_t kRun = 128;

/// Of x + added, which is written to `sum`; of x where `added` is null.
template <class T>
void forward_rows(const float* x, const T* added, const float* weight, float* sum, T* y, float* scale,
                  std::int64_t rows, std::int64_t width, float eps) {
  at::parallel_for(0, rows, kRun, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const float* in = x + row * width;
      if (added) {
        float* const out = sum + row * width;
        for (std::int64_t c = 0; c < width; ++c) out[c] = in[c] + static_cast<float>(added[row * width + c]);
        in = out;
      }
      float squares = 0;
#pragma omp simd reduction(+ : squares)
      for (std::int64_t c = 0; c < width; ++c) squares += in[c] * in[c];
      const float inverse = 1 / std::sqrt(squares / static_cast<float>(width) + eps);
      scale[row] = inverse;
      T* const out = y + row * width;
      for (std::int64_t c = 0; c < width; ++c) out[c] = static_cast<T>(in[c] * inverse * weight[c]);
    }
  });
}

/// dx = s (w dy) - x s^3 mean(x w dy), dw = sum over rows of dy x s, with s the row's scale.
template <class T>
void backward_rows(const float* x, const float* weight, const T* d_y, const float* scale, float* d_x, float* d_weights,
                   std::int64_t rows, std::int64_t width) {
  at::parallel_for(0, (rows + kRun - 1) / kRun, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t run = begin; run < end; ++run) {
      float* const d_weight = d_weights + run * width;
      for (std::int64_t row = run * kRun; row < std::min(rows, (run + 1) * kRun); ++row) {
        const float* const in = x + row * width;
        const T* const d_out = d_y + row * width;
        float dot = 0;
#pragma omp simd reduction(+ : dot)
        for (std::int64_t c = 0; c < width; ++c) dot += in[c] * weight[c] * static_cast<float>(d_out[c]);
        const float s = scale[row];
        const float pull = dot * s * s * s / static_cast<float>(width);
        float* const d_in = d_x + row * width;
        for (std::int64_t c = 0; c < width; ++c) {
          const auto d = static_cast<float>(d_out[c]);
          d_in[c] = s * weight[c] * d - in[c] * pull;
          d_weight[c] += d * in[c] * s;
        }
      }
    }
  });
}

/// As fused_norm, on the CPU. `added` is of type `dtype`.
FusedNorm norm_on_host(const at::Tensor& x, const at::Tensor& added, const at::Tensor& weight, double eps,
                       at::ScalarType dtype) {
  const FusedNorm out{added.defined() ? at::empty(x.sizes(), x.options()) : x,
                      at::empty(x.sizes(), x.options().dtype(dtype)), at::empty({x.size(0)}, x.options())};
  AT_DISPATCH_FLOATING_TYPES_AND(at::kBFloat16, dtype, "rms_norm", [&] {
    forward_rows(x.const_data_ptr<float>(), added.defined() ? added.const_data_ptr<scalar_t>() : nullptr,
                 weight.const_data_ptr<float>(), added.defined() ? out.sum.mutable_data_ptr<float>() : nullptr,
                 out.y.mutable_data_ptr<scalar_t>(), out.scale.mutable_data_ptr<float>(), x.size(0), x.size(1),
                 static_cast<float>(eps));
  });
  return out;
}

/// By loops of our own on the CPU, where torch has no fused form of it, and by kernels of our own on a GPU, where
/// torch's gives float32 alone.
class RmsNorm : public torch::autograd::Function<RmsNorm> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight, double eps,
                            at::ScalarType dtype) {
    TORCH_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous() && x.dim() == 2 && weight.numel() == x.size(1),
                "rms_norm: x ", x.sizes(), " with weight ", weight.sizes());
    const auto fused =
        norm_is_fused(x, dtype) ? fused_norm(x, {}, weight, eps) : norm_on_host(x, {}, weight, eps, dtype);
    ctx->save_for_backward({x, weight, fused.scale});
    return fused.y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& d_outputs) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &scale = saved[2];
    if (!x.is_cpu()) {
      const auto gradients = fused_norm_backward(d_outputs[0], {}, x, weight, scale, /*wants_d_added=*/false);
      return {gradients.d_x, gradients.d_weight, {}, {}};
    }
    const auto d_y = d_outputs[0].contiguous();
    const auto d_x = at::empty(x.sizes(), x.options());
    const auto d_weights = at::zeros({(x.size(0) + kRun - 1) / kRun, x.size(1)}, x.options());
    AT_DISPATCH_FLOATING_TYPES_AND(at::kBFloat16, d_y.scalar_type(), "rms_norm_backward", [&] {
      backward_rows(x.const_data_ptr<float>(), weight.const_data_ptr<float>(), d_y.const_data_ptr<scalar_t>(),
                    scale.const_data_ptr<float>(), d_x.mutable_data_ptr<float>(), d_weights.mutable_data_ptr<float>(),
                    x.size(0), x.size(1));
    });
    return {d_x, d_weights.sum(0), {}, {}};
  }
};

/// On a GPU. The backward joins the two gradients of the sum, and hands out d_added in its dtype.
class AddAndNorm : public torch::autograd::Function<AddAndNorm> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& added,
                               const at::Tensor& weight, double eps) {
    const auto fused = fused_norm(x, added.contiguous(), weight, eps);
    ctx->set_materialize_grads(false);  // the last sum is not read
    ctx->save_for_backward({fused.sum, weight, fused.scale});
    return {fused.sum, fused.y};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& d_outputs) {
    const auto saved = ctx->get_saved_variables();
    const auto gradients =
        fused_norm_backward(d_outputs[1], d_outputs[0], saved[0], saved[1], saved[2], /*wants_d_added=*/true);
    return {gradients.d_x, gradients.d_added, gradients.d_weight, {}};
  }
};

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, at::ScalarType dtype) {
  if (!x.is_cpu() && !norm_is_fused(x, dtype)) return at::rms_norm(x, {x.size(1)}, weight, eps).to(dtype);
  return RmsNorm::apply(x, weight, eps, dtype);
}

Normed add_and_norm(const Residual& in, const at::Tensor& weight, double eps, at::ScalarType dtype) {
  if (!in.added.defined()) return {in.x, rms_norm(in.x, weight, eps, dtype)};
  if (norm_is_fused(in.x, dtype)) {
    const auto outputs = AddAndNorm::apply(in.x, in.added, weight, eps);
    return {outputs[0], outputs[1]};
  }
  if (in.x.is_cpu() && in.added.scalar_type() == dtype && !at::GradMode::is_enabled()) {
    const auto fused = norm_on_host(in.x.contiguous(), in.added.contiguous(), weight, eps, dtype);
    return {fused.sum, fused.y};
  }
  const auto x = in.x + in.added;
  return {x, rms_norm(x, weight, eps, dtype)};
}

}  // namespace nsa::lm
