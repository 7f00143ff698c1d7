#include "lm/train/optimizer.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <numbers>

namespace nsa::lm {

AdamW::AdamW(const NamedTensors& parameters, const AdamWConfig& config) : config_(config) {
  decayed_.weight_decay = config.weight_decay;
  for (const auto& [name, parameter] : parameters) {
    Group& group = name.ends_with(".weight") && parameter.dim() == 2 ? decayed_ : plain_;
    group.parameters.push_back(parameter);
    group.moments.push_back(at::zeros_like(parameter.detach()));
    group.squares.push_back(at::zeros_like(parameter.detach()));
    group.steps.push_back(at::zeros({1}, parameter.options().requires_grad(false)));
    state_.emplace_back("moment." + name, group.moments.back());
    state_.emplace_back("square." + name, group.squares.back());
    state_.emplace_back("steps." + name, group.steps.back());
  }
}

at::Tensor AdamW::step(double learning_rate) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> all;
  for (const Group* group : {&decayed_, &plain_}) {
    for (const at::Tensor& parameter : group->parameters) {
      if (parameter.grad().defined()) all.push_back(parameter.grad());
    }
  }
  TORCH_CHECK(!all.empty(), "AdamW: no parameter has a gradient");
  const bool on_host = all.front().is_cpu();
  const auto clipped = on_host ? clip_on_host(all) : clip_on_device(all);
  for (Group* group : {&decayed_, &plain_}) {
    std::vector<at::Tensor> parameters, gradients, moments, squares, steps;
    for (std::size_t i = 0; i < group->parameters.size(); ++i) {
      const at::Tensor gradient = group->parameters[i].grad();
      if (!gradient.defined()) continue;
      parameters.push_back(group->parameters[i]);
      gradients.push_back(gradient);
      moments.push_back(group->moments[i]);
      squares.push_back(group->squares[i]);
      steps.push_back(group->steps[i]);
      group->parameters[i].mutable_grad().reset();
    }
    if (parameters.empty()) continue;
    at::_foreach_add_(steps, 1);
    at::_fused_adamw_(parameters, gradients, moments, squares, {}, steps, learning_rate, config_.beta1, config_.beta2,
                      group->weight_decay, config_.eps, /*amsgrad=*/false, /*maximize=*/false, clipped.divisor,
                      clipped.not_finite);
  }
  return clipped.norm;
}

AdamW::Clipped AdamW::clip_on_host(const std::vector<at::Tensor>& gradients) const {
  double sum = 0;
  for (const at::Tensor& gradient : gradients) {
    const double norm = gradient.norm().item<float>();
    sum += norm * norm;
  }
  const double norm = std::sqrt(sum);
  if (config_.clip > 0 && norm > config_.clip) {
    for (const at::Tensor& gradient : gradients) gradient.mul_(config_.clip / norm);
  }
  return {at::scalar_tensor(norm, at::kDouble), {}, {}};
}

AdamW::Clipped AdamW::clip_on_device(const std::vector<at::Tensor>& gradients) const {
  const auto norm = at::stack(at::_foreach_norm(gradients)).to(at::kDouble).norm();
  Clipped clipped{norm, {}, norm.isfinite().logical_not().to(at::kFloat)};
  if (config_.clip > 0) clipped.divisor = (norm / config_.clip).clamp_min(1).to(at::kFloat);
  return clipped;
}

double learning_rate(std::int64_t step, std::int64_t steps, std::int64_t warmup, double peak, double floor) {
  if (step < warmup) return peak * static_cast<double>(step + 1) / static_cast<double>(warmup);
  const double done = steps > warmup ? static_cast<double>(step - warmup) / static_cast<double>(steps - warmup) : 1;
  return peak * (floor + (1 - floor) * 0.5 * (1 + std::cos(std::numbers::pi * std::min(1.0, done))));
}

}  // namespace nsa::lm
