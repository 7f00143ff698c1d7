#include "cli/program.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <torch/version.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <limits>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/error.h"
#include "base/files.h"
#include "cli/commands.h"
#include "lm/train/ranks.h"
#include "nsa/backend.h"

namespace nsa::cli {
namespace {

/// CLI11's check of an argument: empty when `text` is a T.
template <class T>
std::string check_number(const std::string& text) {
  const char *begin = text.data() + text.starts_with('+'), *const end = text.data() + text.size();
  T value{};
  const auto [behind, error] = std::from_chars(begin, end, value);
  const bool sound = error == std::errc() && behind == end;
  if constexpr (std::is_floating_point_v<T>) {
    return sound && std::isfinite(value) ? "" : fmt::format("{}: must be a finite number", text);
  } else {
    using Limits = std::numeric_limits<T>;
    return sound ? "" : fmt::format("{}: must be an integer {} ... {}", text, Limits::min(), Limits::max());
  }
}

std::string check_text(const std::string& text) { return text.empty() ? "must not be empty" : ""; }

/// For every option of `app` and its subcommands: integers must fit their type, other numbers must be finite. CLI11
/// takes the nearest integer there is, lets an unsigned one wrap around, and takes nan and inf. A path, a name or a
/// text must not be empty, but for --prompt (a new document) and --extension (of names without one).
void refuse_unusable_arguments(CLI::App& app) {
  for (CLI::Option* const option : app.get_options()) {
    const std::string type = option->get_type_name();  // with the names of the checks it has
    if (type.starts_with("INT")) option->check(check_number<std::int64_t>, "");
    if (type.starts_with("UINT")) option->check(check_number<std::uint64_t>, "");
    if (type.starts_with("FLOAT")) option->check(check_number<double>, "");
    const bool may_be_empty = option->check_lname("prompt") || option->check_lname("extension");
    if (type.starts_with("TEXT") && !may_be_empty) option->check(check_text, "");
  }
  for (CLI::App* const subcommand : app.get_subcommands(nullptr)) refuse_unusable_arguments(*subcommand);
}

/// Replaces a closed standard stream by one that fails, so that no file opened later gets its descriptor.
void keep_standard_streams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(fd, F_GETFD) == -1) ::open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

std::string g_rank;  // prefix of each message: "rank 1: "

void print_error(std::string_view message) { fmt::print(stderr, "nsa: {}{}\n", g_rank, base::printable(message)); }

/// torch's allocator of host memory has no exception of its own.
bool is_out_of_memory(const c10::Error& error, const std::string& message) {
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
         message.find("DefaultCPUAllocator: ") != std::string::npos;
}

int run(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    print_error(error.what());
    fmt::print(stderr, "See nsa --help and nsa SUBCOMMAND --help.\n");
    return 2;
  } catch (const Exit& exit) {
    return exit.code;
  } catch (const base::Error& error) {
    print_error(error.what());
    return 2;
  } catch (const base::Failure& failure) {
    print_error(failure.what());
    return 1;
  } catch (const std::filesystem::filesystem_error& error) {
    print_error(fmt::format("{}: {}", error.path1().string(), error.code().message()));
    return base::is_users_fault(error.code().value()) ? 2 : 1;
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "nsa: out of memory\n");
    return 1;
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    print_error((is_out_of_memory(error, message) ? "out of memory: " : "internal error: ") + message);
    return 1;
  } catch (const std::exception& error) {
    if (std::ferror(stdout) == 0) print_error(fmt::format("internal error: {}", error.what()));
    return 1;
  }
  return 0;
}

/// Returns `code`, or 1 if output was lost.
int close_output(int code) {
  const bool lost = std::ferror(stdout) != 0;
  if (std::fflush(stdout) == 0 && !lost) return code;
  print_error(lost ? "standard output: cannot write"
                   : fmt::format("standard output: cannot write: {}", std::strerror(errno)));
  return code == 0 ? 1 : code;
}

}  // namespace
}  // namespace nsa::cli

int nsa_program(int argc, char** argv, const char* group) {
  using namespace nsa::cli;
  keep_standard_streams();
  nsa::lm::Ranks ranks;
  try {
    if (group != nullptr) ranks = nsa::lm::Ranks(group);
  } catch (const nsa::base::Error& error) {
    print_error(error.what());
    return 2;
  }
  if (ranks.size() > 1) g_rank = fmt::format("rank {}: ", ranks.rank());
  CLI::App app("Native Sparse Attention: train, generate, benchmark, evaluate and inspect.", "nsa");
  app.set_version_flag("--version", std::string("nsa ") + nsa::version());
  app.require_subcommand(1);
  app.get_formatter()->column_width(40);
  app.option_defaults()->always_capture_default();
  add_train(app, ranks);
  add_generate(app);
  add_bench(app);
  add_info(app);
  add_eval(app);
  add_recall(app);
  add_needle(app);
  add_inspect(app);
  add_debug(app);
  refuse_unusable_arguments(app);
  return close_output(run(app, argc, argv));
}

const char* nsa_program_versions() {
  static const std::string versions = std::string(nsa::version()) + " " + TORCH_VERSION;
  return versions.c_str();
}
