#include "lm/layers/products.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>

#include <algorithm>
#include <utility>

#include "bridge/call.h"
#include "lm/layers/activations.h"
#include "lm/layers/elementwise.h"
#include "lm/layers/elementwise_kernels.h"
#include "lm/layers/few_rows_kernels.h"

namespace nsa::lm {
namespace {

#ifdef NSA_LM_CUDA

/// Whether lanes can load eight columns at a time.
bool are_aligned(const at::Tensor& x) {
  return x.stride(1) == 1 && x.storage_offset() % fused::kColumns == 0 && x.stride(0) % fused::kColumns == 0;
}

bool are_few(std::int64_t rows, const at::Tensor& matrix) {
  const std::int64_t depth = matrix.size(1), group = std::min<std::int64_t>(rows, fused::kMaxRows);
  const int most = matrix.numel() <= fused::kMaxRepeated ? fused::kMaxGroupedRows : fused::kMaxRows;
  return matrix.is_cuda() && matrix.scalar_type() == at::kBFloat16 && matrix.is_contiguous() && are_aligned(matrix) &&
         !at::GradMode::is_enabled() && rows > 0 && rows <= most && group * depth <= fused::kMaxElements &&
         depth % fused::kColumns == 0;
}

/// With `copies`, if there are any, in the same kernel.
at::Tensor few_rows(fused::FewRowsArgs args, std::int64_t rows, const Factor& factor,
                    const fused::RotaryCopyArgs& copies = {}) {
  const at::Tensor& matrix = factor.matrix;
  const auto y = at::empty({rows, matrix.size(0)}, matrix.options());
  args.matrix = matrix.const_data_ptr();
  args.rows = static_cast<int>(rows);
  args.depth = static_cast<int>(matrix.size(1));
  args.columns = static_cast<int>(matrix.size(0));
  args.y = y.mutable_data_ptr();
  args.settled = factor.settled;
  void* const stream = bridge::current_stream(matrix.device());
  const int error =
      copies.count > 0 ? fused::few_rows_and_rotary_copy(args, copies, stream) : fused::few_rows(args, stream);
  bridge::check_launch(error, "few_rows");
  return y;
}

at::Tensor few_rows(fused::RowInput input, const at::Tensor& x, const Factor& factor) {
  return few_rows({.input = input, .x = x.const_data_ptr(), .x_row = x.stride(0)}, x.size(0), factor);
}

#else

bool are_few(std::int64_t, const at::Tensor&) { return false; }
bool are_aligned(const at::Tensor&) { return false; }
at::Tensor few_rows(const fused::FewRowsArgs&, std::int64_t, const Factor&) { return {}; }
at::Tensor few_rows(fused::RowInput, const at::Tensor&, const Factor&) { return {}; }

#endif

}  // namespace

at::Tensor product(const at::Tensor& x, const Factor& factor) {
  if (are_few(x.size(0), factor.matrix) && are_aligned(x)) return few_rows(fused::RowInput::kPlain, x, factor);
  return at::linear(x, factor.matrix);
}

NormedProduct norm_and_product(const Residual& in, const at::Tensor& weight, double eps, const Factor& factor) {
  const std::int64_t rows = in.x.size(0);
  if (!are_few(rows, factor.matrix) || !are_aligned(in.x) || !in.x.is_contiguous()) {
    const auto normed = add_and_norm(in, weight, eps, factor.matrix.scalar_type());
    return {normed.x, at::linear(normed.y, factor.matrix)};
  }
  fused::FewRowsArgs args{.input = fused::RowInput::kNorm,
                          .residual = in.x.const_data_ptr<float>(),
                          .norm = weight.const_data_ptr<float>(),
                          .eps = static_cast<float>(eps)};
  if (!in.added.defined()) return {in.x, few_rows(args, rows, factor)};
  const auto added = in.added.contiguous(), sum = at::empty(in.x.sizes(), in.x.options());
  args.added = added.const_data_ptr();
  args.sum = sum.mutable_data_ptr<float>();
  return {sum, few_rows(args, rows, factor)};
}

at::Tensor swiglu_and_product(const at::Tensor& x, const Factor& factor) {
  if (are_few(x.size(0), factor.matrix) && are_aligned(x)) return few_rows(fused::RowInput::kSwiglu, x, factor);
  return at::linear(swiglu(x), factor.matrix);
}

HeadsAndGates split_heads_and_gates(const at::Tensor& x, const std::vector<HeadGroup>& groups, const Rotation& rotation,
                                    const at::Tensor& bias, const Factor& factor, const at::Tensor& gate_bias) {
#ifdef NSA_LM_CUDA
  if (are_few(x.size(0), factor.matrix) && are_aligned(x) && bias.storage_offset() % fused::kColumns == 0) {
    auto [heads, copies] = unturned_heads(x, groups);
    const auto last = heads.back().squeeze(1);
    if (are_aligned(last) && std::ranges::all_of(copies, is_fused)) {
      const auto cos = rotation.cos.contiguous(), sin = rotation.sin.contiguous();
      const auto gates = few_rows({.input = fused::RowInput::kSilu,
                                   .x = last.const_data_ptr(),
                                   .x_row = last.stride(0),
                                   .bias = bias.const_data_ptr(),
                                   .gate_bias = gate_bias.const_data_ptr()},
                                  x.size(0), factor, rotary_copy_args(copies, cos, sin));
      return {heads, gates};
    }
  }
#endif
  auto heads = split_heads(x, groups, rotation);
  const auto gates = at::linear(biased_silu(heads.back().squeeze(1), bias), factor.matrix, gate_bias).sigmoid();
  return {std::move(heads), gates};
}

}  // namespace nsa::lm
