#include "cli/arguments.h"

#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

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

}  // namespace

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

}  // namespace nsa::cli
