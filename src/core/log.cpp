#include "core/log.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace nsa {
namespace {

bool wanted() {
  const char* wish = std::getenv("NSA_LOG");
  return wish && *wish && std::strcmp(wish, "0") != 0;
}

void print(std::string line) {
  line += "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);  // one write: lines of several threads stay whole
}

thread_local bool in_logged_call = false;

}  // namespace

void log_call(const char* operation, Backend backend, const char* variant, const Call& call) {
  if (!wanted()) return;
  std::string line = std::string("nsa: ") + operation + " backend=" + name_of(backend) + " variant=" + variant +
                     (call.packed ? " packed" : " batched");
  for (const Argument& argument : call.tensors)
    if (argument.access != Access::kOutput) line += " " + argument.name + "=" + argument.view.describe();
  print(line);
}

LoggedCall::LoggedCall() : before_(in_logged_call) { in_logged_call = wanted(); }
LoggedCall::~LoggedCall() { in_logged_call = before_; }

bool logs_details() { return in_logged_call; }
void log_detail(const std::string& text) {
  if (in_logged_call) print("nsa:   " + text);
}

}  // namespace nsa
