#include "lm/train_state.h"

#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/core.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "lm/error.h"
#include "lm/json_fields.h"

namespace nsa::lm {
namespace {

template <class S, class Visit>
void for_each_field(S& state, Visit&& visit) {
  visit("step", state.step);
  visit("tokens", state.tokens);
  visit("planned_steps", state.planned_steps);
  visit("seconds", state.seconds);
  visit("loss_sum", state.loss_sum);
  visit("loss_tokens", state.loss_tokens);
  visit("flops", state.flops);
  visit("logged_seconds", state.logged_seconds);
}

}  // namespace

void to_json(nlohmann::json& json, const TrainState& state) {
  json = nlohmann::json::object();
  for_each_field(state, [&](const char* name, const auto& value) { json[name] = value; });
}

TrainState parse_train_state(const std::string& text, const std::string& where) {
  TrainState state;
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  FieldReader reader(json, where);
  for_each_field(state, reader);
  reader.finish();
  if (state.step < 0 || state.planned_steps < 0) throw Error(fmt::format("{}: negative number of steps", where));
  return state;
}

StepTally::StepTally(at::Device device)
    : loss_sum_(at::zeros({}, at::TensorOptions(device).dtype(at::kDouble))),
      largest_norm_(at::zeros_like(loss_sum_)) {}

void StepTally::add_norm(const at::Tensor& norm) {
  largest_norm_ = at::maximum(largest_norm_, norm);  // NaN if one is
}

double StepTally::settle(std::int64_t step) {
  if (!std::isfinite(largest_norm_.item<double>())) {
    throw std::runtime_error(fmt::format("{}: the gradients are not finite; a lower --lr may help",
                                         settled_ == step - 1
                                             ? fmt::format("step {}", settled_)
                                             : fmt::format("one of the steps {} to {}", settled_, step - 1)));
  }
  largest_norm_.zero_();
  settled_ = step;
  return loss_sum_.item<double>();
}

void StepTally::restart(std::int64_t step, double loss_sum) {
  settled_ = step;
  loss_sum_.fill_(loss_sum);
}

}  // namespace nsa::lm
