// What the language model throws when the user's input is at fault: a bad file, option or configuration.
#pragma once

#include <stdexcept>

namespace nsa::lm {

/// The program prints its message without a trace and exits with code 2.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace nsa::lm
