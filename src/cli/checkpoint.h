// The checkpoint that a command opens, with overrides of its configuration.
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
                    "Run folder, its model.safetensors, or a transformers folder (Llama or Qwen3, dense or sparse)")
        ->required();
    command
        .add_option("--set", changes,
                    "Override FIELD=VALUE of the section model of config.json, e.g. topk=32; repeatable")
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
