#include "bridge/compression.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/eye.h>

#include <cmath>

#include "bridge/call.h"

namespace nsa::bridge {

CompressionTensors CompressionTensors::to(const at::TensorOptions& options) const {
  const auto cast = [&](const at::Tensor& t) { return t.defined() ? t.to(options) : t; };
  return {.kind = kind, .pe = cast(pe), .w1 = cast(w1), .b1 = cast(b1), .w2 = cast(w2), .b2 = cast(b2)};
}

CompressionWeights CompressionTensors::views() const {
  return {.kind = kind, .pe = view_of(pe), .w1 = view_of(w1), .b1 = view_of(b1), .w2 = view_of(w2), .b2 = view_of(b2)};
}

at::Tensor mean_weight(std::int64_t sets, std::int64_t tokens, std::int64_t dim) {
  return (at::eye(dim) / static_cast<double>(tokens)).repeat({sets, tokens, 1});
}

void initialise_mlp(const at::Tensor& w1, const at::Tensor& w2, std::int64_t tokens) {
  const at::NoGradGuard no_grad;
  const std::int64_t sets = w1.size(0), inputs = w1.size(1), hidden = w1.size(2), dim = w2.size(2);
  if (!starts_as_mean(hidden, dim)) {
    w1.mul_(std::sqrt(2.0 / static_cast<double>(inputs + hidden)));
    w2.mul_(std::sqrt(2.0 / static_cast<double>(hidden + dim)));
    return;
  }
  const auto mean = mean_weight(sets, tokens, dim);
  w1.mul_(1.0 / std::sqrt(static_cast<double>(inputs)));
  w1.slice(2, 0, dim).copy_(mean);
  w1.slice(2, dim, 2 * dim).copy_(-mean);
  w2.zero_();
  w2.slice(1, 0, dim).copy_(at::eye(dim));
  w2.slice(1, dim, 2 * dim).copy_(-at::eye(dim));
}

}  // namespace nsa::bridge
