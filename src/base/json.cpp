#include "base/json.h"

#include <fmt/core.h>

#include <set>
#include <vector>

#include "base/error.h"

namespace nsa::base {
namespace {

constexpr int kMaxLevels = 64;

}  // namespace

nlohmann::json parse_json(std::string_view text, const std::string& where) {
  using Event = nlohmann::json::parse_event_t;
  std::vector<std::set<std::string>> fields;  // of the objects that are open
  const auto check = [&](int depth, Event event, const nlohmann::json& parsed) {
    if (depth >= kMaxLevels && (event == Event::object_start || event == Event::array_start)) {
      throw Error(fmt::format("{}: not sound JSON: nested deeper than {} levels", where, kMaxLevels));
    }
    if (event == Event::object_start) fields.emplace_back();
    if (event == Event::object_end) fields.pop_back();
    if (event == Event::key && !fields.back().insert(parsed.get<std::string>()).second) {
      throw Error(fmt::format("{}: not sound JSON: field '{}' is given twice", where,
                              parsed.get_ref<const std::string&>().substr(0, 80)));
    }
    return true;
  };
  auto json = nlohmann::json::parse(text, check, /*allow_exceptions=*/false);
  if (json.is_discarded()) throw Error(fmt::format("{}: not JSON", where));
  return json;
}

nlohmann::json parse_json_or_null(std::string_view text) {
  try {
    return parse_json(text, {});
  } catch (const Error&) {
    return {};
  }
}

std::string shortened(const std::string& text) { return text.size() <= 60 ? text : text.substr(0, 57) + "..."; }

std::string shown(const nlohmann::json& value) {
  return shortened(value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

}  // namespace nsa::base
