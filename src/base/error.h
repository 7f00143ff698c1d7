// What the program throws: the program prints the message alone and ends with the exit code of its kind.
#pragma once

#include <stdexcept>

#include "nsa/status.h"

namespace nsa::base {

/// The user's input is at fault, a bad file, option or configuration. Exit code 2.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Something failed that was asked for in earnest: a disk, a computation. Exit code 1.
class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Throws unless `status` is ok: Error where a backend cannot do the call, Failure where memory or a launch failed,
/// else std::runtime_error.
void check(const Status& status);

}  // namespace nsa::base
