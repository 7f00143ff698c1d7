// --json: the file for a subcommand's results.
#pragma once

#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "base/error.h"
#include "base/files.h"

namespace nsa::cli {

/// Must outlive the command.
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

}  // namespace nsa::cli
