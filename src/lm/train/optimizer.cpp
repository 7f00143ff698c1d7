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

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>

namespace nsa::lm {

std::vector<double> learning_rate_scales(const NamedTensors& parameters, double scale) {
  // "layers.0.attention.phi_k." and "w1", say
  const auto split = [](const std::string& name) {
    const std::size_t end = name.rfind('.') + 1;
    return std::pair(name.substr(0, end), name.substr(end));
  };
  std::map<std::string, double> of_matrix;
  for (const auto& [name, parameter] : parameters) {
    const auto [owner, last] = split(name);
    if (last == "w1" || last == "w2")
      of_matrix[name] = std::min(1.0, kPhiFanIn / static_cast<double>(parameter.size(1)));
  }
  std::vector<double> scales;
  for (const auto& [name, parameter] : parameters) {
    const auto [owner, last] = split(name);
    const bool phi = owner.ends_with(".phi_k.") || owner.ends_with(".phi_v.");
    scales.push_back(!phi ? 1 : scale > 0 ? scale : of_matrix.at(owner + (last.ends_with("2") ? "w2" : "w1")));
  }
  return scales;
}

AdamW::AdamW(const NamedTensors& parameters, const AdamWConfig& config) : config_(config) {
  const auto scales = learning_rate_scales(parameters, config.phi_lr_scale);
  const auto group_of = [&](double weight_decay, double scale) -> Group& {
    const auto same = [&](const Group& g) { return g.weight_decay == weight_decay && g.learning_rate_scale == scale; };
    const auto found = std::find_if(groups_.begin(), groups_.end(), same);
    if (found != groups_.end()) return *found;
    groups_.emplace_back();
    groups_.back().weight_decay = weight_decay;
    groups_.back().learning_rate_scale = scale;
    return groups_.back();
  };
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, parameter] = parameters[i];
    const bool decayed = name.ends_with(".weight") && parameter.dim() == 2;
    Group& group = group_of(decayed ? config.weight_decay : 0, scales[i]);
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
  for (const Group& group : groups_) {
    for (const at::Tensor& parameter : group.parameters) {
      if (parameter.grad().defined()) all.push_back(parameter.grad());
    }
  }
  TORCH_CHECK(!all.empty(), "AdamW: no parameter has a gradient");
  const bool on_host = all.front().is_cpu();
  const auto clipped = on_host ? clip_on_host(all) : clip_on_device(all);
  for (const Group& group : groups_) {
    std::vector<at::Tensor> parameters, gradients, moments, squares, steps;
    for (std::size_t i = 0; i < group.parameters.size(); ++i) {
      const at::Tensor gradient = group.parameters[i].grad();
      if (!gradient.defined()) continue;
      parameters.push_back(group.parameters[i]);
      gradients.push_back(gradient);
      moments.push_back(group.moments[i]);
      squares.push_back(group.squares[i]);
      steps.push_back(group.steps[i]);
      group.parameters[i].mutable_grad().reset();
    }
    if (parameters.empty()) continue;
    at::_foreach_add_(steps, 1);
    at::_fused_adamw_(parameters, gradients, moments, squares, {}, steps, learning_rate * group.learning_rate_scale,
                      config_.beta1, config_.beta2, group.weight_decay, config_.eps, /*amsgrad=*/false,
                      /*maximize=*/false, clipped.divisor, clipped.not_finite);
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
