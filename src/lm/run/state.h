// How far a training run is.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "lm/run/config.h"

namespace nsa::lm {

/// State of a checkpoint other than weights and moments. With the configuration it determines the rest of the run: the
/// rows, the noise and the learning rate are functions of the step.
struct TrainState {
  std::int64_t step = 0;
  std::int64_t tokens = 0;         // seen
  std::int64_t planned_steps = 0;  // 0: not yet known
  double seconds = 0;              // of training
  double loss_sum = 0;             // since the last line of the log
  std::int64_t loss_tokens = 0;
  double flops = 0;           // model FLOPs but those of phi, likewise
  double logged_seconds = 0;  // at the last line of the log
};
void to_json(nlohmann::json& json, const TrainState& state);
/// The state of a run of this configuration. Throws Error naming the field that cannot be; `where` names the text in
/// it.
TrainState parse_train_state(const std::string& text, const std::string& where, const TrainConfig& config);

}  // namespace nsa::lm
