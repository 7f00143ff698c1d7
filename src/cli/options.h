// Options that several subcommands have.
#pragma once

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/device.h"
#include "base/error.h"
#include "base/files.h"
#include "lm/run/open.h"
#include "nsa/backend.h"

namespace nsa::cli {

/// --device, and options whose default depends on it. Must outlive the command, whose callbacks refer to it.
class DeviceOption {
 public:
  void add(CLI::App& command) {
    option_ = command.add_option("--device", wish_,
                                 "Device: cpu, cuda, or auto (cuda if this build and this machine support it)");
    option_->check(CLI::IsMember({"auto", "cpu", "cuda"}))->take_last();
  }

  /// Sets the default of `option` on a GPU: `value` becomes `on_cuda`.
  template <class T>
  void on_cuda(CLI::Option* option, T& value, const T& on_cuda) {
    if (value == on_cuda) return;
    option->description(fmt::format("{}; on cuda {}", option->get_description(), on_cuda));
    setters_.push_back([option, &value, on_cuda] {
      if (option->count() == 0) value = on_cuda;
    });
  }

  /// Chooses the device and sets the defaults that depend on it. Throws base::Error if the device is not available.
  base::DeviceChoice choose() const {
    auto choice = base::choose_device(wish_);
    if (choice.device.is_cuda()) {
      for (const auto& set : setters_) set();
    }
    return choice;
  }

  /// The device that was named on the command line: cpu, cuda, or nothing.
  std::string named() const { return wish_ == "auto" ? "" : wish_; }

 private:
  std::string wish_ = "auto";
  CLI::Option* option_ = nullptr;
  std::vector<std::function<void()>> setters_;
};

/// --device and --threads of a command, which this must outlive.
class MachineOptions : public DeviceOption {
 public:
  void add(CLI::App& command) {
    DeviceOption::add(command);
    command.add_option("--threads", threads_, "Number of CPU threads; 0: one per core")
        ->check(CLI::Range(0, kMaxThreads));
  }

  /// DeviceOption::choose(), and torch's number of threads.
  base::DeviceChoice choose() const {
    auto choice = DeviceOption::choose();
    base::set_threads(threads_);
    return choice;
  }

 private:
  int threads_ = 0;
};

/// --json: the file for a subcommand's results. Must outlive the command.
class JsonOption {
 public:
  void add(CLI::App& command, const std::string& what) {
    command.add_option("--json", path_, "Write " + what + " as JSON to this file; -: standard output");
  }

  /// Opens the file before the work begins. Throws base::Error or base::Failure if it cannot be written.
  void open() {
    if (path_.empty() || path_ == "-") return;
    try {
      file_.emplace(path_);
    } catch (const base::Error& error) {
      throw base::Error(fmt::format("--json {}", error.what()));
    }
  }

  /// Bytes of names that are not UTF-8, which JSON cannot hold, become U+FFFD.
  void write(const nlohmann::json& json, int indent = 1) const {
    if (path_.empty()) return;
    const auto text = json.dump(indent, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
    if (file_) return file_->write(text);
    fmt::print("{}", text);
  }

 private:
  std::string path_;
  std::optional<base::OutputFile> file_;
};

/// The checkpoint that a command opens, with overrides of its configuration.
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
    return ids.empty() ? lm::open_texts(path, paths, opened) : lm::open_ids(ids, opened.model());
  }
  CLI::Option* add_ids(CLI::App& command, const char* help) { return command.add_option("--ids", ids, help); }
};

}  // namespace nsa::cli
