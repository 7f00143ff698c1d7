#include "lm/run/folder.h"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <sstream>

#include "base/error.h"
#include "base/files.h"
#include "base/json.h"
#include "lm/run/checkpoint.h"

namespace nsa::lm {
namespace {

namespace fs = std::filesystem;

constexpr const char *kConfig = "config.json", *kModel = "model.safetensors", *kMetrics = "metrics.jsonl",
                     *kOptions = "config.toml";

// The first line of config.toml. A process that ended before it wrote config.json leaves such a file alone.
const std::string kOptionsMark = "# nsa train --config FILE --out FOLDER\n";

std::string optimizer_name(std::int64_t step) { return fmt::format("optimizer-{}.safetensors", step); }

bool is_optimizer(const std::string& name) {
  const auto digits = name.find('-') + 1;
  std::int64_t step = -1;
  std::from_chars(name.data() + digits, name.data() + name.size(), step);
  return step >= 0 && name == optimizer_name(step);
}

/// Removes the lines of later steps and of the end from a run's metrics, so that they continue from the checkpoint.
/// Writes a new file in any case: the old one may have hard links, through which another folder's would change.
void cut_metrics(const std::string& path, std::int64_t step) {
  std::istringstream lines(base::read_regular_text(path, base::Links::kRefuse, base::kNoLimit));
  std::string kept;
  for (std::string text; std::getline(lines, text);) {
    const auto line = base::parse_json_or_null(text);
    if (!line.is_object() || !line.contains("step") || !line["step"].is_number_integer()) continue;
    if (line["step"] <= step && (!line.contains("kind") || line["kind"] != "end")) kept += text + "\n";
  }
  base::replace_file(path, kept);
}

}  // namespace

RunFolder RunFolder::for_new_run(const std::string& path, bool overwrite) {
  RunFolder folder(path);
  folder.refuse_foreign(overwrite);
  return folder;
}

RunFolder RunFolder::of_run(const std::string& path) {
  read_run_config((fs::path(path) / kConfig).string());  // nothing is locked or made where there is no run
  RunFolder folder(path);
  folder.refuse_irregular();
  return folder;
}

std::string RunFolder::file(const std::string& name) const { return (fs::path(path_) / name).string(); }

std::vector<std::string> RunFolder::names() const {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(path_, error), end; !error && it != end; it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  if (error) {
    errno = error.value();
    base::throw_errno(path_, "cannot be read");
  }
  return names;
}

bool RunFolder::is_regular(const std::string& name) const {
  std::error_code error;
  return fs::symlink_status(file(name), error).type() == fs::file_type::regular;
}

void RunFolder::refuse_irregular() const {
  std::error_code error;
  for (const auto* const name : {kConfig, kModel, kMetrics, kOptions}) {
    const auto type = fs::symlink_status(file(name), error).type();
    if (type == fs::file_type::regular || type == fs::file_type::not_found) continue;
    throw base::Error(
        fmt::format("{}: not a regular file{}", file(name), type == fs::file_type::symlink ? ", but a link" : ""));
  }
}

void RunFolder::refuse_foreign(bool overwrite) const {
  if (is_regular(kConfig) && is_run_config(base::read_regular_text(file(kConfig), base::Links::kRefuse))) {
    if (!overwrite) {
      throw base::Error(
          fmt::format("{}: holds a run already; --resume continues it, --overwrite deletes it first", path_));
    }
    refuse_irregular();
    if (is_regular(kModel)) {
      metadata_of(file(kModel), base::SafetensorsFile::open(file(kModel), base::Links::kRefuse), "step");
    }
    return;
  }
  for (const auto& name : names()) {
    if (name == kLockName || base::is_temporary(name)) continue;
    if (name == kOptions && is_regular(name) &&
        base::read_prefix(file(name), base::Links::kRefuse, kOptionsMark.size()) == kOptionsMark) {
      continue;
    }
    throw base::Error(
        fmt::format("{}: holds no run of this program, but '{}'; a new run needs a folder of its own", path_, name));
  }
}

RunConfig RunFolder::config() const { return read_run_config(file(kConfig)); }

void RunFolder::update(const RunConfig& config) const { base::replace_file(file(kConfig), text_of(config)); }

void RunFolder::begin(const RunConfig& config, const std::string& options) const {
  if (!options.empty()) base::replace_file(file(kOptions), kOptionsMark + options);  // a resumed run has no more of it
  update(config);
  base::remove_file(file(kMetrics));
  remove_leftovers("");
  base::remove_file(file(kModel));
}

void RunFolder::log(const nlohmann::json& line) const {
  // The file is this run's since its start; a backup by hard links (`cp -al`) may name it meanwhile.
  base::append_text(file(kMetrics), line.dump() + "\n", base::Names::kAny);
}

void RunFolder::save(const RunConfig& config, const TrainState& state, const NamedTensors& parameters,
                     const NamedTensors& optimizer) const {
  const std::string where = fmt::format("{}: not saved at step {}", path_, state.step);
  for (const auto* const tensors : {&parameters, &optimizer}) {
    if (const auto message = nonfinite_message(where, *tensors)) throw base::Failure(*message);
  }
  const std::string name = optimizer_name(state.step);
  const std::string checksum = save_tensors(file(name), optimizer, {{"format", "nsa-adamw"}});
  if (is_regular(kMetrics)) base::flush_file(file(kMetrics));
  save_tensors(file(kModel), parameters,
               {{"format", kModelFormat},
                {"step", std::to_string(state.step)},
                {"config", nlohmann::json(config).dump()},
                {"state", nlohmann::json(state).dump()},
                {"optimizer", name},
                {"optimizer_checksum", checksum}});
  remove_leftovers(name);
}

/// What saves that did not come to their end left, and the optimizer's files but this one.
void RunFolder::remove_leftovers(const std::string& name_of_optimizer) const {
  for (const auto& name : names()) {
    const bool left = base::is_temporary(name) || (is_optimizer(name) && name != name_of_optimizer);
    if (left && is_regular(name)) base::remove_file(file(name));
  }
}

std::optional<TrainState> RunFolder::load(const RunConfig& config, const NamedTensors& parameters,
                                          const NamedTensors& optimizer) const {
  const std::string path = file(kModel);
  const auto present = names();
  if (std::find(present.begin(), present.end(), kModel) == present.end()) {
    // Metrics and the optimizer of a later step come after the first checkpoint, which is that of step 0.
    for (const auto& name : present) {
      if (name == kMetrics || (is_optimizer(name) && name != optimizer_name(0))) {
        throw base::Error(fmt::format("{}: missing, but {} exists; restore it, or pass --overwrite", path, name));
      }
    }
    return {};
  }
  const auto checkpoint = base::SafetensorsFile::open(path, base::Links::kRefuse);
  const nlohmann::json now = config;
  nlohmann::json trained = trained_config(path, checkpoint);
  for (const auto& [name, value] : now["train"].items()) {
    if (is_interval(name)) trained["train"][name] = value;
  }
  const std::string difference = first_difference(now, trained);
  if (!difference.empty()) throw base::Error(fmt::format("{}: config.json changed: {}", path_, difference));
  const auto state = parse_train_state(metadata_of(path, checkpoint, "state"), path + ": state", config.train);
  const std::string name = metadata_of(path, checkpoint, "optimizer");
  if (name != optimizer_name(state.step)) {
    throw base::Error(fmt::format("{}: metadata 'optimizer' must be {}", path, optimizer_name(state.step)));
  }
  load_tensors(path, checkpoint, parameters);
  const auto moments = base::SafetensorsFile::open(file(name), base::Links::kRefuse);
  const auto saved_with = checkpoint.metadata().find("optimizer_checksum");  // not there in older checkpoints
  if (saved_with != checkpoint.metadata().end() && saved_with->second != moments.checksum()) {
    throw base::Error(fmt::format("{}: not what {} was saved with", file(name), path));
  }
  load_tensors(file(name), moments, optimizer);
  if (is_regular(kMetrics)) cut_metrics(file(kMetrics), state.step);
  remove_leftovers(name);
  return state;
}

}  // namespace nsa::lm
