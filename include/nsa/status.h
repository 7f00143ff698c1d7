// The result of every call of the C++ API: no exceptions cross it.
#pragma once

#include <string>
#include <utility>

namespace nsa {

enum class StatusCode {
  kOk = 0,
  kInvalidArgument,  // the caller's fault: a value, shape, dtype, stride or device that is not allowed
  kUnsupported,      // valid by the specification, but the chosen backend cannot do it
  kOutOfCapacity,    // a cache has no free pages
  kInternal,         // a backend failed (out of memory, a failed launch)
};

/// Success, or a code and a message that names the argument, what came and what is allowed.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status invalid_argument(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }
  static Status unsupported(std::string message) { return {StatusCode::kUnsupported, std::move(message)}; }
  static Status out_of_capacity(std::string message) { return {StatusCode::kOutOfCapacity, std::move(message)}; }
  static Status internal(std::string message) { return {StatusCode::kInternal, std::move(message)}; }

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

}  // namespace nsa
