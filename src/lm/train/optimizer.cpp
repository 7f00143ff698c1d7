#include "lm/train/optimizer.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <numeric>

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

namespace {

/// A rank for each parameter, so that each has about as many values: the largest first, to the one that has least.
std::vector<int> balanced_owners(const NamedTensors& parameters, int ranks) {
  std::vector<std::size_t> by_size(parameters.size());
  std::iota(by_size.begin(), by_size.end(), std::size_t{0});
  std::stable_sort(by_size.begin(), by_size.end(), [&](std::size_t a, std::size_t b) {
    return parameters[a].second.numel() > parameters[b].second.numel();
  });
  std::vector<int> owners(parameters.size());
  std::vector<std::int64_t> values(static_cast<std::size_t>(ranks));
  for (const std::size_t i : by_size) {
    const auto least = std::min_element(values.begin(), values.end());
    *least += parameters[i].second.numel();
    owners[i] = static_cast<int>(least - values.begin());
  }
  return owners;
}

}  // namespace

AdamW::AdamW(const NamedTensors& parameters, const AdamWConfig& config, const Ranks& ranks, bool shard)
    : config_(config),
      ranks_(ranks),
      shard_(shard && ranks.size() > 1),
      options_(parameters.front().second.options().requires_grad(false)) {
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
  const auto owners = balanced_owners(parameters, ranks.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, parameter] = parameters[i];
    const bool decayed = name.ends_with(".weight") && parameter.dim() == 2;
    Group& group = group_of(decayed ? config.weight_decay : 0, scales[i]);
    group.parameters.push_back(parameter);
    group.owners.push_back(owners[i]);
    const bool kept = !shard_ || owners[i] == ranks_.rank();
    const auto keep = [&](const std::string& kind, at::IntArrayRef sizes) {
      const at::Tensor tensor = kept ? at::zeros(sizes, options_) : at::Tensor();
      state_.push_back({.name = kind + name, .sizes = sizes.vec(), .owner = owners[i], .tensor = tensor});
      return tensor;
    };
    group.moments.push_back(keep("moment.", parameter.sizes()));
    group.squares.push_back(keep("square.", parameter.sizes()));
    group.steps.push_back(keep("steps.", {1}));
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
  std::vector<at::Tensor> updated;  // by any rank
  std::vector<int> owners;
  for (const Group& group : groups_) {
    std::vector<at::Tensor> parameters, gradients, moments, squares, steps;
    for (std::size_t i = 0; i < group.parameters.size(); ++i) {
      const at::Tensor gradient = group.parameters[i].grad();
      if (!gradient.defined()) continue;
      group.parameters[i].mutable_grad().reset();
      updated.push_back(group.parameters[i]);
      owners.push_back(group.owners[i]);
      if (!group.moments[i].defined()) continue;
      parameters.push_back(group.parameters[i]);
      gradients.push_back(gradient);
      moments.push_back(group.moments[i]);
      squares.push_back(group.squares[i]);
      steps.push_back(group.steps[i]);
    }
    if (parameters.empty()) continue;
    at::_foreach_add_(steps, 1);
    at::_fused_adamw_(parameters, gradients, moments, squares, {}, steps, learning_rate * group.learning_rate_scale,
                      config_.beta1, config_.beta2, group.weight_decay, config_.eps, /*amsgrad=*/false,
                      /*maximize=*/false, clipped.divisor, clipped.not_finite);
  }
  if (shard_) exchange(updated, owners);
  return clipped.norm;
}

/// Each tensor from its owner to the other ranks.
void AdamW::exchange(const std::vector<at::Tensor>& updated, const std::vector<int>& owners) const {
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    std::vector<at::Tensor> own, flat;
    for (std::size_t i = 0; i < updated.size(); ++i) {
      if (owners[i] != rank) continue;
      own.push_back(updated[i]);
      flat.push_back(updated[i].reshape({-1}));
    }
    if (own.empty()) continue;
    const auto sent = at::cat(flat);
    ranks_.broadcast(sent, rank);
    if (rank == ranks_.rank()) continue;
    std::int64_t begin = 0;
    for (at::Tensor& tensor : own) {
      tensor.copy_(sent.narrow(0, begin, tensor.numel()).view_as(tensor));
      begin += tensor.numel();
    }
  }
}

NamedTensors AdamW::gather_state() const {
  NamedTensors all;
  for (const auto& [name, sizes, owner, tensor] : state_) {
    if (!shard_) {
      if (ranks_.first()) all.emplace_back(name, tensor);
      continue;
    }
    const auto sent = tensor.defined() ? tensor : at::empty(sizes, options_);
    ranks_.broadcast(sent, owner);
    if (ranks_.first()) all.emplace_back(name, sent.to(at::kCPU, at::kFloat, /*non_blocking=*/false, /*copy=*/true));
  }
  // A rank that ends before its device has sent everything would leave the first one waiting.
  if (shard_) ranks_.barrier();
  return all;
}

void AdamW::scatter_state(const NamedTensors& state) {
  for (std::size_t i = 0; i < state_.size(); ++i) {
    auto& [name, sizes, owner, tensor] = state_[i];
    auto sent = tensor.defined() ? tensor : at::empty(sizes, options_);
    if (ranks_.first()) sent.copy_(state[i].second);
    ranks_.broadcast(sent, 0);
  }
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
