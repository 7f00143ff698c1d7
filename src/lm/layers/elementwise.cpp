#include "lm/layers/elementwise.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/silu.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <initializer_list>

#include "bridge/call.h"
#include "lm/layers/elementwise_kernels.h"

namespace nsa::lm {

#ifdef NSA_LM_CUDA

namespace {

using fused::kColumns;

bool are_multiples(std::initializer_list<std::int64_t> sizes) {
  return std::all_of(sizes.begin(), sizes.end(), [](std::int64_t size) { return size % kColumns == 0; });
}

void* stream_of(const at::Tensor& x) { return bridge::current_stream(x.device()); }

}  // namespace

bool is_fused(const RotaryCopy& copy) {
  const auto fits = [](const at::Tensor& x) {
    return x.is_cuda() && x.scalar_type() == at::kBFloat16 && x.stride(2) == 1 &&
           are_multiples({x.storage_offset(), x.stride(0), x.stride(1)});
  };
  return fits(copy.from) && fits(copy.to) && copy.from.size(2) % (2 * kColumns) == 0;
}

fused::RotaryCopyArgs rotary_copy_args(const std::vector<RotaryCopy>& copies, const at::Tensor& cos,
                                       const at::Tensor& sin) {
  TORCH_CHECK(copies.size() <= fused::kMaxRotaryCopies, "fused_rotary_copy: ", copies.size(), " copies");
  fused::RotaryCopyArgs args{.count = static_cast<int>(copies.size()),
                             .cos = cos.const_data_ptr<float>(),
                             .sin = sin.const_data_ptr<float>(),
                             .rows = cos.size(0)};
  for (std::size_t i = 0; i < copies.size(); ++i) {
    const auto& [from, to, direction] = copies[i];
    args.copies[i] = {from.const_data_ptr(),
                      to.mutable_data_ptr(),
                      from.stride(0),
                      from.stride(1),
                      to.stride(0),
                      to.stride(1),
                      static_cast<int>(from.size(1)),
                      static_cast<int>(from.size(2) / 2),
                      direction};
  }
  return args;
}

void fused_rotary_copy(const std::vector<RotaryCopy>& copies, const at::Tensor& cos, const at::Tensor& sin) {
  bridge::check_launch(fused::rotary_copy(rotary_copy_args(copies, cos, sin), stream_of(copies[0].to)), "rotary_copy");
}

bool swiglu_is_fused(const at::Tensor& x) {
  return x.is_cuda() && x.scalar_type() == at::kBFloat16 && x.is_contiguous() &&
         are_multiples({x.storage_offset(), x.size(1) / 2});
}

at::Tensor fused_swiglu(const at::Tensor& x) {
  const std::int64_t width = x.size(1) / 2;
  const auto y = at::empty({x.size(0), width}, x.options());
  bridge::check_launch(
      fused::swiglu({x.const_data_ptr(), nullptr, y.mutable_data_ptr(), x.size(0), width}, stream_of(x)), "swiglu");
  return y;
}

at::Tensor fused_swiglu_backward(const at::Tensor& d_y, const at::Tensor& x) {
  const auto d_x = at::empty(x.sizes(), x.options());
  bridge::check_launch(fused::swiglu({x.const_data_ptr(), d_y.contiguous().const_data_ptr(), d_x.mutable_data_ptr(),
                                      x.size(0), x.size(1) / 2},
                                     stream_of(x)),
                       "swiglu_backward");
  return d_x;
}

bool biased_silu_is_fused(const at::Tensor& x, const at::Tensor& bias) {
  return x.is_cuda() && x.scalar_type() == at::kBFloat16 && bias.scalar_type() == at::kBFloat16 && x.stride(1) == 1 &&
         are_multiples({x.storage_offset(), x.stride(0), x.size(1), bias.storage_offset()}) &&
         x.size(1) <= fused::kWidest;
}

at::Tensor fused_biased_silu(const at::Tensor& x, const at::Tensor& bias) {
  const auto y = at::empty(x.sizes(), x.options());
  bridge::check_launch(fused::biased_silu({.x = x.const_data_ptr(),
                                           .row = x.stride(0),
                                           .bias = bias.const_data_ptr(),
                                           .rows = x.size(0),
                                           .width = x.size(1),
                                           .y = y.mutable_data_ptr()},
                                          stream_of(x)),
                       "biased_silu");
  return y;
}

std::pair<at::Tensor, at::Tensor> fused_biased_silu_backward(const at::Tensor& d_y, const at::Tensor& x,
                                                             const at::Tensor& bias) {
  const auto d_rows = d_y.contiguous(), d_x = at::empty(x.sizes(), x.options());
  const auto d_biases =
      at::empty({fused::num_partials(x.size(0), x.size(1)), x.size(1)}, x.options().dtype(at::kFloat));
  bridge::check_launch(fused::biased_silu({.x = x.const_data_ptr(),
                                           .row = x.stride(0),
                                           .bias = bias.const_data_ptr(),
                                           .rows = x.size(0),
                                           .width = x.size(1),
                                           .d_y = d_rows.const_data_ptr(),
                                           .d_x = d_x.mutable_data_ptr(),
                                           .d_biases = d_biases.mutable_data_ptr<float>()},
                                          stream_of(x)),
                       "biased_silu_backward");
  return {d_x, d_biases.sum(0).to(bias.scalar_type())};
}

bool norm_is_fused(const at::Tensor& x, at::ScalarType dtype) {
  return x.is_cuda() && dtype == at::kBFloat16 && x.scalar_type() == at::kFloat && x.is_contiguous() &&
         are_multiples({x.storage_offset(), x.size(1)}) && x.size(1) <= fused::kWidest;
}

FusedNorm fused_norm(const at::Tensor& x, const at::Tensor& added, const at::Tensor& weight, double eps) {
  const FusedNorm out{added.defined() ? at::empty(x.sizes(), x.options()) : x,
                      at::empty(x.sizes(), x.options().dtype(at::kBFloat16)), at::empty({x.size(0)}, x.options())};
  fused::NormArgs args{.x = x.const_data_ptr<float>(),
                       .weight = weight.const_data_ptr<float>(),
                       .eps = static_cast<float>(eps),
                       .rows = x.size(0),
                       .width = x.size(1),
                       .scale = out.scale.mutable_data_ptr<float>(),
                       .y = out.y.mutable_data_ptr()};
  if (added.defined()) {
    args.added = added.const_data_ptr();
    args.sum = out.sum.mutable_data_ptr<float>();
  }
  bridge::check_launch(fused::norm(args, stream_of(x)), "norm");
  return out;
}

FusedNormGradients fused_norm_backward(const at::Tensor& d_y, const at::Tensor& d_sum, const at::Tensor& sum,
                                       const at::Tensor& weight, const at::Tensor& scale, bool wants_d_added) {
  const FusedNormGradients out{
      at::empty(sum.sizes(), sum.options()),
      wants_d_added ? at::empty(sum.sizes(), d_y.options()) : at::Tensor(),
      at::empty({fused::num_partials(sum.size(0), sum.size(1)), sum.size(1)}, sum.options()),
  };
  const auto d_rows = d_y.contiguous(), d_sum_rows = d_sum.defined() ? d_sum.contiguous() : d_sum;
  fused::NormArgs args{.x = sum.const_data_ptr<float>(),
                       .weight = weight.const_data_ptr<float>(),
                       .rows = sum.size(0),
                       .width = sum.size(1),
                       .scale = scale.mutable_data_ptr<float>(),
                       .d_y = d_rows.const_data_ptr(),
                       .d_x = out.d_x.mutable_data_ptr<float>(),
                       .d_weights = out.d_weight.mutable_data_ptr<float>()};
  if (d_sum.defined()) args.d_sum = d_sum_rows.const_data_ptr<float>();
  if (wants_d_added) args.d_added = out.d_added.mutable_data_ptr();
  bridge::check_launch(fused::norm(args, stream_of(sum)), "norm_backward");
  return {out.d_x, out.d_added, out.d_weight.sum(0)};
}

#else

bool is_fused(const RotaryCopy&) { return false; }
void fused_rotary_copy(const std::vector<RotaryCopy>&, const at::Tensor&, const at::Tensor&) {}
bool swiglu_is_fused(const at::Tensor&) { return false; }
at::Tensor fused_swiglu(const at::Tensor&) { return {}; }
at::Tensor fused_swiglu_backward(const at::Tensor&, const at::Tensor&) { return {}; }
bool biased_silu_is_fused(const at::Tensor&, const at::Tensor&) { return false; }
at::Tensor fused_biased_silu(const at::Tensor&, const at::Tensor&) { return {}; }
std::pair<at::Tensor, at::Tensor> fused_biased_silu_backward(const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  return {};
}
bool norm_is_fused(const at::Tensor&, at::ScalarType) { return false; }
FusedNorm fused_norm(const at::Tensor&, const at::Tensor&, const at::Tensor&, double) { return {}; }
FusedNormGradients fused_norm_backward(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                       const at::Tensor&, bool) {
  return {};
}

#endif

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
