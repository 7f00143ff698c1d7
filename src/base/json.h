// Reading JSON that anybody may have written.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace nsa::base {

/// Throws Error, which begins with `where`, unless `text` is JSON whose objects and arrays nest at most 64 deep and
/// whose objects have no field twice. The depth is bounded because destroying, copying and printing a json recurse.
nlohmann::json parse_json(std::string_view text, const std::string& where);

/// Returns null where parse_json() would throw.
nlohmann::json parse_json_or_null(std::string_view text);

/// The text as a message shows it, in at most 60 characters.
std::string shortened(const std::string& text);
/// The value as a message shows it, whatever bytes it has.
std::string shown(const nlohmann::json& value);

}  // namespace nsa::base
