// NSA_LOG=1: one line per call on stderr.
#pragma once

#include <string>

#include "core/call.h"
#include "nsa/backend.h"

namespace nsa {

/// "nsa: compressed_attention backend=cpu variant=avx512 batched q=bfloat16 (2, 512, 16, 128) ...". Nothing unless
/// NSA_LOG is set to something other than 0.
void log_call(const char* operation, Backend backend, const char* variant, const Call& call);

/// While it lives, this thread executes a call that is logged: log_detail() prints. Measuring a workspace is no call.
class LoggedCall {
 public:
  LoggedCall();
  ~LoggedCall();
  LoggedCall(const LoggedCall&) = delete;
  LoggedCall& operator=(const LoggedCall&) = delete;

 private:
  bool before_;
};
/// Whether log_detail() would print.
bool logs_details();
/// A line below that of the call, e.g. the kernel that serves it: "nsa:   ...".
void log_detail(const std::string& text);

}  // namespace nsa
