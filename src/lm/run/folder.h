// The folder of a training run: its configuration, its checkpoint and its metrics.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "lm/model/model.h"
#include "lm/run/config.h"
#include "lm/run/folder_lock.h"
#include "lm/run/state.h"

namespace nsa::lm {

/// While it lives no other process trains in the folder. Of what lies there it replaces and removes only config.json,
/// config.toml, metrics.jsonl and model.safetensors of a run, regular files of the names optimizer-STEP.safetensors,
/// and its own temporary files. It follows no link in the folder. What fails on the disk is thrown as by throw_errno().
class RunFolder {
 public:
  /// The folder of a new run; created if missing. Throws Error when it holds a run, unless `overwrite`, or when
  /// it holds anything else.
  static RunFolder for_new_run(const std::string& path, bool overwrite);
  /// The folder of a run to resume. Throws Error when there is none.
  static RunFolder of_run(const std::string& path);

  const std::string& path() const { return path_; }
  RunConfig config() const;

  /// Makes it the folder of this run. The old run stays complete until the new configuration is written, then it is
  /// removed. `options`: the content of config.toml; "": it stays.
  void begin(const RunConfig& config, const std::string& options) const;

  /// Replaces the configuration of its run by one with other intervals.
  void update(const RunConfig& config) const;

  /// Adds a line to metrics.jsonl.
  void log(const nlohmann::json& line) const;

  /// A checkpoint in place of the one before. There is a valid one at every moment, also on the disk: model.safetensors
  /// names the file of the optimizer's tensors, takes its name when that lies there, and the file before goes
  /// thereafter. Throws Failure, and leaves the one before, when a value is not finite.
  void save(const RunConfig& config, const TrainState& state, const NamedTensors& parameters,
            const NamedTensors& optimizer) const;

  /// Copies the checkpoint into the tensors, and cuts metrics.jsonl to what it knows of. Nothing for a run that ended
  /// before its first checkpoint. Throws Error when it is no checkpoint of this configuration, whatever its
  /// intervals, or is lost.
  std::optional<TrainState> load(const RunConfig& config, const NamedTensors& parameters,
                                 const NamedTensors& optimizer) const;

 private:
  explicit RunFolder(const std::string& path) : path_(path), lock_(path) {}

  std::string file(const std::string& name) const;
  std::vector<std::string> names() const;
  bool is_regular(const std::string& name) const;
  void refuse_irregular() const;
  void refuse_foreign(bool overwrite) const;
  void remove_leftovers(const std::string& name_of_optimizer) const;

  std::string path_;
  FolderLock lock_;
};

}  // namespace nsa::lm
