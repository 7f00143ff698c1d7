#include "lm/layers/rope.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "lm/layers/elementwise.h"

namespace nsa::lm {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

void rotate_by_torch(const RotaryCopy& copy, const at::Tensor& cos, const at::Tensor& sin) {
  const auto halves = copy.from.to(at::kFloat).chunk(2, 2);
  const auto c = cos.unsqueeze(1), s = sin.unsqueeze(1) * copy.direction;
  copy.to.copy_(at::cat({halves[0] * c - halves[1] * s, halves[1] * c + halves[0] * s}, 2));
}

void rotate_on_host(const RotaryCopy& copy, const at::Tensor& cos, const at::Tensor& sin) {
  const auto& [from, to, direction] = copy;
  const std::int64_t heads = from.size(1), half = cos.size(1);
  AT_DISPATCH_FLOATING_TYPES_AND(at::kBFloat16, from.scalar_type(), "rotate", [&] {
    const float* const cosines = cos.const_data_ptr<float>();
    const float* const sines = sin.const_data_ptr<float>();
    at::parallel_for(0, from.size(0), 64, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        const float* const c = cosines + row * half;
        const float* const s = sines + row * half;
        for (std::int64_t h = 0; h < heads; ++h) {
          const auto* const in = from.const_data_ptr<scalar_t>() + row * from.stride(0) + h * from.stride(1);
          auto* const out = to.mutable_data_ptr<scalar_t>() + row * to.stride(0) + h * to.stride(1);
          for (std::int64_t j = 0; j < half; ++j) {
            const auto first = static_cast<float>(in[j]), second = static_cast<float>(in[j + half]);
            const float sine = direction * s[j];
            out[j] = static_cast<scalar_t>(first * c[j] - second * sine);
            out[j + half] = static_cast<scalar_t>(second * c[j] + first * sine);
          }
        }
      }
    });
  });
}

void rotate_all(const std::vector<RotaryCopy>& copies, const at::Tensor& cos, const at::Tensor& sin) {
  std::vector<RotaryCopy> fused;
  for (const RotaryCopy& copy : copies) {
    const at::Tensor& x = copy.from;
    TORCH_CHECK(x.dim() == 3 && x.stride(2) == 1 && cos.size(0) == x.size(0) &&
                    (copy.direction == 0 || 2 * cos.size(1) == x.size(2)),
                "rotate: x ", x.sizes(), " with a table of ", cos.sizes());
    if (is_fused(copy)) {
      fused.push_back(copy);
    } else if (copy.direction == 0) {
      copy.to.copy_(x);
    } else {
      (x.is_cpu() ? rotate_on_host : rotate_by_torch)(copy, cos, sin);
    }
  }
  if (!fused.empty()) fused_rotary_copy(fused, cos.contiguous(), sin.contiguous());
}

at::Tensor with_contiguous_channels(const at::Tensor& x) { return x.stride(2) == 1 ? x : x.contiguous(); }

class Rotate : public Function<Rotate> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
    ctx->save_for_backward({cos, sin});
    const auto out = at::empty(x.sizes(), x.options());
    rotate_all({{x, out, 1}}, cos, sin);
    return out;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& d_outputs) {
    const auto saved = ctx->get_saved_variables();
    const auto d_x = at::empty(d_outputs[0].sizes(), d_outputs[0].options());
    rotate_all({{with_contiguous_channels(d_outputs[0]), d_x, -1}}, saved[0], saved[1]);
    return {d_x, {}, {}};
  }
};

/// The next heads * dim columns of x (n, width) from `column` on, which moves on, as (n, heads, dim).
at::Tensor columns_of(const at::Tensor& x, std::int64_t& column, std::int64_t heads, std::int64_t dim) {
  column += heads * dim;
  return x.narrow(1, column - heads * dim, heads * dim).view({x.size(0), heads, dim});
}

class SplitHeads : public Function<SplitHeads> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                               const std::vector<HeadGroup>& groups) {
    const auto [outputs, copies] = unrotated_heads(x.detach(), groups);
    std::vector<std::int64_t> rotated;
    for (const HeadGroup& group : groups) rotated.push_back(group.rotated ? 1 : 0);
    rotate_all(copies, cos, sin);
    ctx->save_for_backward({cos, sin});
    ctx->saved_data["rotated"] = rotated;
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& d_outputs) {
    const auto saved = ctx->get_saved_variables();
    const auto rotated = ctx->saved_data["rotated"].toIntVector();
    std::int64_t width = 0, column = 0;
    for (const at::Tensor& d : d_outputs) width += d.size(1) * d.size(2);
    const auto d_x = at::empty({d_outputs[0].size(0), width}, d_outputs[0].options());
    std::vector<RotaryCopy> copies;
    for (std::size_t i = 0; i < d_outputs.size(); ++i) {
      const auto d = with_contiguous_channels(d_outputs[i]);
      copies.push_back({d, columns_of(d_x, column, d.size(1), d.size(2)), rotated[i] != 0 ? -1.0F : 0.0F});
    }
    rotate_all(copies, saved[0], saved[1]);
    return {d_x, {}, {}, {}};
  }
};

}  // namespace

Rotation Rotation::at(const at::Tensor& positions) const {
  return {cos.index_select(0, positions), sin.index_select(0, positions)};
}

Rotation rotation_table(std::int64_t max_positions, const std::vector<double>& frequencies, at::Device device,
                        double magnitude) {
  const auto half = static_cast<std::int64_t>(frequencies.size());
  Rotation table{at::empty({max_positions, half}), at::empty({max_positions, half})};  // in host memory
  float* const cos = table.cos.mutable_data_ptr<float>();
  float* const sin = table.sin.mutable_data_ptr<float>();
  for (std::int64_t j = 0; j < half; ++j) {
    for (std::int64_t t = 0; t < max_positions; ++t) {
      const double angle = static_cast<double>(t) * frequencies[static_cast<std::size_t>(j)];
      cos[t * half + j] = static_cast<float>(magnitude * std::cos(angle));
      sin[t * half + j] = static_cast<float>(magnitude * std::sin(angle));
    }
  }
  return {table.cos.to(device), table.sin.to(device)};
}

at::Tensor rotate(const at::Tensor& x, const Rotation& rotation) {
  return Rotate::apply(x, rotation.cos, rotation.sin);
}

UnrotatedHeads unrotated_heads(const at::Tensor& x, const std::vector<HeadGroup>& groups) {
  UnrotatedHeads out;
  std::int64_t column = 0;
  for (const HeadGroup& group : groups) {
    const auto columns = columns_of(x, column, group.heads, group.dim);
    out.heads.push_back(group.rotated ? at::empty(columns.sizes(), columns.options()) : columns);
    if (group.rotated) out.copies.push_back({columns, out.heads.back(), 1});
  }
  return out;
}

std::vector<at::Tensor> split_heads(const at::Tensor& x, const std::vector<HeadGroup>& groups,
                                    const Rotation& rotation) {
  if (at::GradMode::is_enabled()) return SplitHeads::apply(x, rotation.cos, rotation.sin, groups);
  auto [heads, copies] = unrotated_heads(x, groups);
  rotate_all(copies, rotation.cos, rotation.sin);
  return heads;
}

}  // namespace nsa::lm
