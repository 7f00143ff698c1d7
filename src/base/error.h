// What the program throws: the program prints the message alone and ends with the exit code of its kind. Messages are
// made printable: what() ends at a NUL, which a name from a file may hold.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include "nsa/status.h"

namespace nsa::base {

/// The user's input is at fault, a bad file, option or configuration. Exit code 2.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message);
};

/// Something failed that was asked for in earnest: a disk, a computation. Exit code 1.
class Failure : public std::runtime_error {
 public:
  explicit Failure(const std::string& message);
};

/// Throws unless `status` is ok: Error where a backend cannot do the call, Failure where memory or a launch failed,
/// else std::runtime_error.
void check(const Status& status);

/// The text as one line of a terminal, at most 2000 bytes: names of files and fields may hold any byte. Control
/// characters and what is not UTF-8 become \xNN, a longer text loses its middle.
std::string printable(std::string_view text);

/// Writes to standard error, if it can be written: a closed terminal or a full disk ends no training.
void write_stderr(std::string_view text);

}  // namespace nsa::base
