#include "lm/layers/linear.h"

#include <ATen/Context.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "bridge/call.h"
#include "lm/layers/elementwise.h"
#include "lm/layers/elementwise_kernels.h"
#include "lm/layers/skinny_gemm_kernels.h"

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

#ifdef NSA_LM_CUDA

/// Whether lanes can load eight columns at a time.
bool are_aligned(const at::Tensor& x) {
  return x.stride(1) == 1 && x.storage_offset() % fused::kColumns == 0 && x.stride(0) % fused::kColumns == 0;
}

bool is_skinny(std::int64_t rows, const at::Tensor& matrix) {
  const std::int64_t depth = matrix.size(1), group = std::min<std::int64_t>(rows, fused::kMaxRows);
  const int most = matrix.numel() <= fused::kMaxRepeated ? fused::kMaxGroupedRows : fused::kMaxRows;
  return matrix.is_cuda() && matrix.scalar_type() == at::kBFloat16 && matrix.is_contiguous() && are_aligned(matrix) &&
         !at::GradMode::is_enabled() && rows > 0 && rows <= most && group * depth <= fused::kMaxElements &&
         depth % fused::kColumns == 0;
}

/// With `copies`, if there are any, in the same kernel.
at::Tensor skinny_gemm(fused::SkinnyGemmArgs args, std::int64_t rows, const LinearWeight& weight,
                       const fused::RotaryCopyArgs& copies = {}) {
  const at::Tensor& matrix = weight.matrix;
  const auto y = at::empty({rows, matrix.size(0)}, matrix.options());
  args.matrix = matrix.const_data_ptr();
  args.rows = static_cast<int>(rows);
  args.depth = static_cast<int>(matrix.size(1));
  args.columns = static_cast<int>(matrix.size(0));
  args.y = y.mutable_data_ptr();
  args.weights_ready = weight.weights_ready;
  void* const stream = bridge::current_stream(matrix.device());
  const int error =
      copies.count > 0 ? fused::skinny_gemm_and_rotary_copy(args, copies, stream) : fused::skinny_gemm(args, stream);
  bridge::check_launch(error, "skinny_gemm");
  return y;
}

at::Tensor skinny_gemm(fused::RowInput input, const at::Tensor& x, const LinearWeight& weight) {
  return skinny_gemm({.input = input, .x = x.const_data_ptr(), .x_row = x.stride(0)}, x.size(0), weight);
}

#else

bool is_skinny(std::int64_t, const at::Tensor&) { return false; }
bool are_aligned(const at::Tensor&) { return false; }
at::Tensor skinny_gemm(const fused::SkinnyGemmArgs&, std::int64_t, const LinearWeight&) { return {}; }
at::Tensor skinny_gemm(fused::RowInput, const at::Tensor&, const LinearWeight&) { return {}; }

#endif

/// Whether oneDNN, which torch calls, multiplies 16-bit matrices by vector instructions on this processor.
bool multiplies_16_bits() {
#ifdef __x86_64__
  static const bool has_avx512 =
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return has_avx512;
#else
  return true;
#endif
}

/// The operators by which torch.compile multiplies by packed weights; ATen's headers do not declare them.
template <class Signature>
std::optional<c10::TypedOperatorHandle<Signature>> onednn(const char* name) {
  const auto found = c10::Dispatcher::singleton().findSchema({name, ""});
  return found ? std::optional(found->typed<Signature>()) : std::nullopt;
}

using Pack = at::Tensor(const at::Tensor&, std::optional<std::int64_t>);
using PackedLinear = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                                std::string_view, c10::List<std::optional<at::Scalar>>,
                                std::optional<std::string_view>);

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& matrix, const at::Tensor& bias) {
  static const auto op = onednn<PackedLinear>("mkldnn::_linear_pointwise").value();
  return op.call(x, matrix, bias.defined() ? std::optional(bias) : std::nullopt, "none",
                 c10::List<std::optional<at::Scalar>>(), "");
}

/// torch's linear layer. Without such instructions its 16-bit GEMM takes 8 times as long as float32's (Zen 3), so more
/// than a few rows go through float32 there. Few rows are bound by memory, which 16 bits halve.
at::Tensor torch_linear(const at::Tensor& x, const at::Tensor& matrix, const at::Tensor& bias = {}) {
  if (matrix.is_mkldnn()) return packed_linear(x, matrix, bias);
  constexpr std::int64_t kFewRows = 8;
  if (!x.is_cpu() || x.element_size() != 2 || x.size(0) <= kFewRows || multiplies_16_bits())
    return at::linear(x, matrix, bias);
  const auto wide = [](const at::Tensor& t) { return t.defined() ? t.to(at::kFloat) : t; };
  return at::linear(wide(x), wide(matrix), wide(bias)).to(x.scalar_type());
}

}  // namespace

at::Tensor packed(const at::Tensor& matrix) {
#ifdef __x86_64__
  static const auto pack = onednn<Pack>("mkldnn::_reorder_linear_weight");
  const bool has_kernels = matrix.is_cpu() && matrix.scalar_type() == at::kBFloat16 && multiplies_16_bits();
  if (has_kernels && pack && at::globalContext().userEnabledMkldnn()) return pack->call(matrix, std::nullopt);
#endif
  return matrix;
}

at::Tensor linear(const at::Tensor& x, const LinearWeight& weight) {
  if (is_skinny(x.size(0), weight.matrix) && are_aligned(x)) return skinny_gemm(fused::RowInput::kPlain, x, weight);
  return torch_linear(x, weight.matrix);
}

NormedLinear norm_and_linear(const Residual& in, const at::Tensor& norm_weight, double eps,
                             const LinearWeight& weight) {
  const std::int64_t rows = in.x.size(0);
  if (!is_skinny(rows, weight.matrix) || !are_aligned(in.x) || !in.x.is_contiguous()) {
    const auto normed = add_and_norm(in, norm_weight, eps, weight.matrix.scalar_type());
    return {normed.x, torch_linear(normed.y, weight.matrix)};
  }
  fused::SkinnyGemmArgs args{.input = fused::RowInput::kNorm,
                             .residual = in.x.const_data_ptr<float>(),
                             .norm = norm_weight.const_data_ptr<float>(),
                             .eps = static_cast<float>(eps)};
  if (!in.added.defined()) return {in.x, skinny_gemm(args, rows, weight)};
  const auto added = in.added.contiguous(), sum = at::empty(in.x.sizes(), in.x.options());
  args.added = added.const_data_ptr();
  args.sum = sum.mutable_data_ptr<float>();
  return {sum, skinny_gemm(args, rows, weight)};
}

at::Tensor swiglu_and_linear(const at::Tensor& x, const LinearWeight& weight) {
  if (is_skinny(x.size(0), weight.matrix) && are_aligned(x)) return skinny_gemm(fused::RowInput::kSwiglu, x, weight);
  return torch_linear(swiglu(x), weight.matrix);
}

HeadsAndGates split_heads_and_gates(const at::Tensor& x, const std::vector<HeadGroup>& groups, const Rotation& rotation,
                                    const at::Tensor& bias, const LinearWeight& weight, const at::Tensor& gate_bias) {
#ifdef NSA_LM_CUDA
  if (is_skinny(x.size(0), weight.matrix) && are_aligned(x) && bias.storage_offset() % fused::kColumns == 0) {
    auto [heads, copies] = unrotated_heads(x, groups);
    const auto last = heads.back().squeeze(1);
    if (are_aligned(last) && std::ranges::all_of(copies, is_fused)) {
      const auto cos = rotation.cos.contiguous(), sin = rotation.sin.contiguous();
      const auto gates = skinny_gemm({.input = fused::RowInput::kSilu,
                                      .x = last.const_data_ptr(),
                                      .x_row = last.stride(0),
                                      .bias = bias.const_data_ptr(),
                                      .gate_bias = gate_bias.const_data_ptr()},
                                     x.size(0), weight, rotary_copy_args(copies, cos, sin));
      return {heads, gates};
    }
  }
#endif
  auto heads = split_heads(x, groups, rotation);
  const auto gates = torch_linear(biased_silu(heads.back().squeeze(1), bias), weight.matrix, gate_bias).sigmoid();
  return {std::move(heads), gates};
}

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
