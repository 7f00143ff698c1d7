// Training: a run folder from a configuration, or on from its last checkpoint.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "base/device.h"
#include "lm/run/config.h"
#include "lm/train/ranks.h"

namespace nsa::lm {

/// Who computes a run: what it computes does not depend on it, but for the order of sums over ranks.
struct Execution {
  Ranks ranks;                   // batches of a step: `grad_accum` of all ranks together, rank r takes r, r + size, ...
  bool shard_optimizer = false;  // see AdamW
};

struct TrainRequest {
  std::string out;      // run folder
  RunConfig config;     // fingerprint, vocab_size (without train.init) and device are filled in
  std::string options;  // the content of config.toml
  base::DeviceChoice device;
  bool overwrite = false;
  Execution execution;
};

struct TrainResult {
  std::int64_t step = 0, tokens = 0;
  int signal = 0;  // that stopped it early, after a checkpoint; 0: it finished
};

/// Starts a run. Throws Error when the folder holds one already, unless `overwrite`. Only the first rank reads and
/// writes it, prints and evaluates.
TrainResult train(TrainRequest request);

/// Resumes the run on its kind of device; with as many ranks bitwise as if never interrupted. `given` holds the options
/// to override, by the name of their field in config.json's sections; an interval is taken over,
/// another value that differs is refused by name, and so are changed data.
TrainResult resume(const std::string& out, const nlohmann::json& given, const Execution& execution);

}  // namespace nsa::lm
