// The checkpoint that a command opens, and how its model shall differ from what was trained.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "lm/run/open.h"

namespace nsa::cli {

struct CheckpointOptions {
  std::string path;
  std::vector<std::string> changes;  // for lm::load_model
  std::string ids;                   // file for lm::load_ids

  void add(CLI::App& command) {
    command
        .add_option("checkpoint", path,
                    "Run folder, the model.safetensors in it, or a folder of transformers (Llama or Qwen3, dense or "
                    "sparse)")
        ->required();
    command
        .add_option("--set", changes,
                    "FIELD=VALUE: compute with another value of a field of config.json's model than was trained, e.g. "
                    "topk=32; may be given several times")
        ->allow_extra_args(false);
  }
  lm::OpenedCheckpoint open(at::Device device) const { return lm::open_checkpoint(path, changes, device, ids.empty()); }
  /// The texts of --ids, else of `paths`, else those that the run held out.
  lm::OpenedTexts texts(const lm::OpenedCheckpoint& opened, const std::vector<std::string>& paths) const {
    return ids.empty() ? lm::open_texts(path, paths, *opened.tokenizer) : lm::open_ids(ids, opened.model());
  }
  CLI::Option* add_ids(CLI::App& command, const char* help) { return command.add_option("--ids", ids, help); }
};

}  // namespace nsa::cli
