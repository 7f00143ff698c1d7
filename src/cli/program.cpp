#include "cli/program.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <torch/version.h>
#include <unistd.h>

#include <toml++/toml.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <initializer_list>
#include <limits>
#include <new>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "base/files.h"
#include "base/json.h"
#include "cli/commands.h"
#include "lm/data/tokenizer.h"
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

constexpr const char *kCommandWithFile = "train", *kFile = "--config";
/// Options of which the command line's one replaces all of the file's.
constexpr std::array kLengths = {"steps", "tokens", "minutes"};

/// The value of a TOML file as an argument. Throws Error.
std::string argument_of(const toml::node& node, const std::string& where) {
  if (const auto* const text = node.as_string()) return text->get();
  if (const auto* const number = node.as_integer()) return std::to_string(number->get());
  if (const auto* const number = node.as_floating_point()) return fmt::format("{}", number->get());
  if (const auto* const flag = node.as_boolean()) return flag->get() ? "true" : "false";
  throw base::Error(fmt::format("{}: must be a string, a number, true, false or a list of these", where));
}

/// The options of the file at `path` as arguments of `command`, but those that `is_given`.
template <class IsGiven>
std::vector<std::string> arguments_of(const std::string& path, const CLI::App& command, const IsGiven& is_given) {
  const auto text = base::read_regular_text(path, base::Links::kFollow, base::kMaxJsonBytes);
  toml::table table;
  try {
    table = toml::parse(text);
  } catch (const toml::parse_error& error) {
    throw base::Error(fmt::format("{}: line {}: {}", path, error.source().begin.line, error.description()));
  }
  std::vector<std::string> arguments;
  for (const auto& [key, node] : table) {
    const std::string name(key.str()), where = fmt::format("{}: {}", path, base::shortened(name));
    const auto* const option = command.get_option_no_throw("--" + name);
    if (option == nullptr || option->check_lname("help") || option->check_name(kFile)) {
      throw base::Error(fmt::format("{}: is no option of nsa {} in a file", where, command.get_name()));
    }
    if (is_given(*option)) continue;
    const auto add = [&](const toml::node& value) {
      const auto text = argument_of(value, where);
      arguments.push_back("--" + name + (text.empty() ? "" : "=" + text));
      if (text.empty()) arguments.push_back(text);  // behind a = CLI11 would take what follows
    };
    if (const auto* const list = node.as_array()) {
      for (const auto& value : *list) add(value);
    } else {
      add(node);
    }
  }
  return arguments;
}

/// The arguments, those of the file of --config among them.
std::vector<std::string> with_file(const CLI::App& app, std::vector<std::string> arguments) {
  if (arguments.empty() || arguments.front() != kCommandWithFile) return arguments;
  std::string path;
  for (std::size_t i = 1; i < arguments.size(); ++i) {
    if (arguments[i].starts_with(std::string(kFile) + "=")) path = arguments[i].substr(std::strlen(kFile) + 1);
    if (arguments[i] == kFile && i + 1 < arguments.size()) path = arguments[i + 1];
  }
  if (path.empty()) return arguments;
  const auto& command = *app.get_subcommand(kCommandWithFile);
  const auto is_named = [&](const CLI::Option& option) {
    return std::any_of(arguments.begin() + 1, arguments.end(), [&](const std::string& argument) {
      if (!argument.starts_with("--")) return argument.starts_with('-') && option.check_sname(argument.substr(1, 1));
      return option.check_lname(argument.substr(2, argument.find('=') - 2));
    });
  };
  const auto is_length = [](const CLI::Option& option) {
    return std::any_of(kLengths.begin(), kLengths.end(), [&](const char* name) { return option.check_lname(name); });
  };
  const bool length_named = std::any_of(kLengths.begin(), kLengths.end(), [&](const char* name) {
    return is_named(*command.get_option("--" + std::string(name)));
  });
  const auto from_file = arguments_of(path, command, [&](const CLI::Option& option) {
    return is_named(option) || (length_named && is_length(option));
  });
  arguments.insert(arguments.begin() + 1, from_file.begin(), from_file.end());
  return arguments;
}

/// Replaces a closed standard stream by one that fails, so that no file opened later gets its descriptor.
void keep_standard_streams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(fd, F_GETFD) == -1) ::open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

std::string g_rank;  // prefix of each message: "rank 1: "

void print_error(std::string_view message) {
  base::write_stderr(fmt::format("nsa: {}{}\n", g_rank, base::printable(message)));
}

/// torch's allocator of host memory has no exception of its own.
bool is_out_of_memory(const c10::Error& error, const std::string& message) {
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
         message.find("DefaultCPUAllocator: ") != std::string::npos;
}

int run(CLI::App& app, int argc, char** argv) {
  try {
    auto arguments = with_file(app, {argv + std::min(argc, 1), argv + argc});
    std::reverse(arguments.begin(), arguments.end());  // as CLI11 takes them
    app.parse(std::move(arguments));
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    print_error(error.what());
    base::write_stderr("See nsa --help and nsa SUBCOMMAND --help.\n");
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
    base::write_stderr("nsa: out of memory\n");
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

std::string toml_of(const CLI::App& command) {
  toml::table table;
  for (const CLI::Option* const option : command.get_options()) {
    if (option->count() == 0) continue;
    const std::string name = option->get_lnames().front(), type = option->get_type_name();
    const auto is_one_of = [&](std::initializer_list<const char*> names) {
      return std::find(names.begin(), names.end(), name) != names.end();
    };
    if (is_one_of({"config", "out", "overwrite", "resume"})) continue;
    const auto insert = [&](const auto& add, const std::string& value) {
      std::int64_t integer = 0;
      const char* const end = value.data() + value.size();
      const auto [behind, error] = std::from_chars(value.data(), end, integer);
      const bool is_integer = behind == end && error == std::errc();  // a seed may be larger
      if (option->get_items_expected_max() == 0) return add(value == "true");
      if ((type.starts_with("INT") || type.starts_with("UINT")) && is_integer) return add(integer);
      if (type.starts_with("FLOAT")) return add(std::stod(value));
      const bool is_path = is_one_of({"data", "ids", "init"}) || (name == "tokenizer" && value != "bytes");
      add(is_path ? std::filesystem::absolute(value).string() : value);
    };
    const auto values = option->reduced_results();
    if (option->get_items_expected_max() > 1) {
      toml::array list;
      for (const auto& value : values) insert([&](const auto& item) { list.push_back(item); }, value);
      table.insert(name, std::move(list));
    } else {
      insert([&](const auto& item) { table.insert(name, item); }, values.back());
    }
  }
  std::ostringstream text;
  text << table << "\n";
  return text.str();
}

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

void nsa_program_tokenizers(const void* functions) {
  nsa::lm::use_tokenizers(*static_cast<const nsa::lm::TokenizerFunctions*>(functions));
}

const char* nsa_program_versions() {
  static const std::string versions = std::string(nsa::version()) + " " + TORCH_VERSION;
  return versions.c_str();
}
