// The folder of a training run: its checkpoint and its metrics.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>

#include "lm/model.h"
#include "lm/run_config.h"
#include "lm/train_state.h"

namespace nsa::lm {

class RunFolder {
 public:
  explicit RunFolder(std::string path) : path_(std::move(path)) {}

  /// Adds a line to metrics.jsonl.
  void log(const nlohmann::json& line) const;

  /// A checkpoint in place of the one before. There is a valid one at every moment: model.safetensors names the file of
  /// the optimizer's tensors, and is renamed to its name when that lies there.
  void save(const RunConfig& config, const TrainState& state, const NamedTensors& parameters,
            const NamedTensors& optimizer) const;

  /// Copies the checkpoint into the tensors, and cuts metrics.jsonl to what it knows of. Of a run that was killed
  /// before its first checkpoint nothing is left. Throws Error when it is no checkpoint of this configuration.
  TrainState load(const RunConfig& config, const NamedTensors& parameters, const NamedTensors& optimizer) const;

 private:
  std::string file(const std::string& name) const;

  std::string path_;
};

}  // namespace nsa::lm
