// Finding and reading text files.
#pragma once

#include <string>
#include <vector>

#include "lm/data/config.h"

namespace nsa::lm {

struct Text {
  std::string name, text;
};

/// The texts that `config` asks for, in a fixed order, concatenated where it says so. Throws Error.
std::vector<Text> read_texts(const DataConfig& config);

}  // namespace nsa::lm
