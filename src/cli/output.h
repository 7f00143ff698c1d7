// Where a subcommand's JSON goes.
#pragma once

#include <fmt/core.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "lm/error.h"

namespace nsa::cli {

/// `path`: a file, or "-" for standard output, or empty for nowhere.
inline void write_json(const std::string& path, const nlohmann::json& json) {
  if (path.empty()) return;
  if (path == "-") {
    fmt::print("{}\n", json.dump(1));
    return;
  }
  std::ofstream file(path);
  file << json.dump(1) << '\n';
  file.close();
  if (!file) throw lm::Error(fmt::format("--json {}: cannot write this file", path));
}

}  // namespace nsa::cli
