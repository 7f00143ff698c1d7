#include "lm/run_folder.h"

#include <fmt/core.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "lm/checkpoint.h"
#include "lm/error.h"

namespace nsa::lm {
namespace {

namespace fs = std::filesystem;

/// Takes the lines of later steps and the end out of a run's metrics, so that they go on from the checkpoint.
void cut_metrics(const std::string& path, std::int64_t step) {
  if (!fs::exists(path)) return;
  std::istringstream lines(read_text(path));
  std::string kept;
  for (std::string text; std::getline(lines, text);) {
    const auto line = nlohmann::json::parse(text, nullptr, false);
    if (line.is_object() && line.value("step", INT64_MAX) <= step && line.value("kind", "") != "end") {
      kept += text + "\n";
    }
  }
  write_atomically(path, kept);
}

}  // namespace

std::string RunFolder::file(const std::string& name) const { return (fs::path(path_) / name).string(); }

void RunFolder::log(const nlohmann::json& line) const {
  std::ofstream metrics(file("metrics.jsonl"), std::ios::app);
  metrics << line.dump() + "\n" << std::flush;
  if (!metrics) throw Error(fmt::format("{}: cannot write", file("metrics.jsonl")));
}

void RunFolder::save(const RunConfig& config, const TrainState& state, const NamedTensors& parameters,
                     const NamedTensors& optimizer) const {
  const std::string name_of_optimizer = fmt::format("optimizer-{}.safetensors", state.step);
  save_tensors(file(name_of_optimizer), optimizer, {{"format", "nsa-adamw"}});
  save_tensors(file("model.safetensors"), parameters,
               {{"format", kModelFormat},
                {"step", std::to_string(state.step)},
                {"config", nlohmann::json(config).dump()},
                {"state", nlohmann::json(state).dump()},
                {"optimizer", name_of_optimizer}});
  for (const auto& entry : fs::directory_iterator(path_)) {
    const std::string name = entry.path().filename().string();
    if ((name.starts_with("optimizer-") && name != name_of_optimizer) || name.ends_with(".tmp")) {
      fs::remove(entry.path());
    }
  }
}

TrainState RunFolder::load(const RunConfig& config, const NamedTensors& parameters,
                           const NamedTensors& optimizer) const {
  const std::string path = file("model.safetensors");
  if (!fs::exists(path)) {  // killed before the first checkpoint
    fs::remove(file("metrics.jsonl"));
    return {};
  }
  const auto checkpoint = SafetensorsFile::open(path);
  const auto field = [&](const char* name) {
    const auto it = checkpoint.metadata().find(name);
    if (it == checkpoint.metadata().end()) {
      throw Error(fmt::format("{}: not a checkpoint of this program: metadata '{}' is missing", path, name));
    }
    return it->second;
  };
  if (field("format") != kModelFormat) throw Error(fmt::format("{}: metadata 'format' is not {}", path, kModelFormat));
  const auto stored = nlohmann::json::parse(field("config"), nullptr, false);
  const std::string difference = first_difference(nlohmann::json(config), stored);
  if (!difference.empty()) throw Error(fmt::format("{}: config.json changed: {}", path_, difference));
  const TrainState state = parse_train_state(field("state"), path + ": state");
  load_tensors(path, checkpoint, parameters);
  const std::string moments = file(fs::path(field("optimizer")).filename().string());
  load_tensors(moments, SafetensorsFile::open(moments), optimizer);
  cut_metrics(file("metrics.jsonl"), state.step);
  return state;
}

}  // namespace nsa::lm
