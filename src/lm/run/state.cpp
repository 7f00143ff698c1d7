#include "lm/run/state.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "base/json.h"
#include "base/json_fields.h"

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

TrainState parse_train_state(const std::string& text, const std::string& where, const TrainConfig& config) {
  TrainState state;
  const auto json = base::parse_json(text, where);
  base::FieldReader reader(json, where);
  for_each_field(state, reader);
  reader.finish();
  const auto in_range = [&](const char* name, auto value, auto low, auto high) {
    if (!(value >= low && value <= high)) {
      throw base::Error(fmt::format("{}: field '{}' = {}: must be {} ... {}", where, name, value, low, high));
    }
  };
  constexpr double kLargest = std::numeric_limits<double>::max();
  const std::int64_t most = (std::int64_t{1} << 62) / config.tokens_per_step();
  const std::int64_t known = config.minutes > 0 ? 0 : config.planned_steps();
  in_range("planned_steps", state.planned_steps, known, known > 0 ? known : most);
  in_range("step", state.step, std::int64_t{0}, state.planned_steps > 0 ? state.planned_steps : most);
  in_range("tokens", state.tokens, std::int64_t{0}, state.step * config.tokens_per_step());
  in_range("seconds", state.seconds, 0.0, kLargest);
  in_range("loss_sum", state.loss_sum, -kLargest, kLargest);
  in_range("loss_tokens", state.loss_tokens, std::int64_t{0}, state.tokens);
  in_range("flops", state.flops, 0.0, kLargest);
  in_range("logged_seconds", state.logged_seconds, 0.0, state.seconds);
  return state;
}

}  // namespace nsa::lm
