// The checkpoint that a command opens, and how its model shall differ from what was trained.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace nsa::cli {

struct CheckpointOptions {
  std::string path;
  std::vector<std::string> changes;  // for lm::load_model

  void add(CLI::App& command) {
    command.add_option("checkpoint", path, "Run folder, or the model.safetensors in it")->required();
    command
        .add_option("--set", changes,
                    "FIELD=VALUE: compute with another value of a field of config.json's model than was trained, e.g. "
                    "topk=32; may be given several times")
        ->allow_extra_args(false);
  }
};

}  // namespace nsa::cli
