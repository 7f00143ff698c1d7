// Training: a run folder from a configuration, or on from its last checkpoint.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "base/device.h"
#include "lm/run/config.h"

namespace nsa::lm {

struct TrainRequest {
  std::string out;   // run folder
  RunConfig config;  // fingerprint, vocab_size (without train.init) and device are filled in
  DeviceChoice device;
  bool overwrite = false;
};

struct TrainResult {
  std::int64_t step = 0, tokens = 0;
  int signal = 0;  // that stopped it early, after a checkpoint; 0: it finished
};

/// Starts a run. Throws Error when the folder holds one already, unless `overwrite`.
TrainResult train(TrainRequest request);

/// Goes on bitwise as if never interrupted, on the kind of device that the run began on. `given` holds the options
/// given anew, by the name of their field in config.json's sections; a value that differs is refused by name, and so
/// are changed data.
TrainResult resume(const std::string& out, const nlohmann::json& given);

}  // namespace nsa::lm
