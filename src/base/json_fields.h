// Strict reading of JSON objects: every field must be there, of its type and in its range, and no other.
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/json.h"

namespace nsa::base {

class FieldReader {
 public:
  /// `where` names the object in messages.
  FieldReader(const nlohmann::json& json, std::string where) : json_(json), where_(std::move(where)) {
    if (!json.is_object()) throw Error(fmt::format("{}: must be a JSON object", where_));
  }

  template <class T>
  void operator()(const char* name, T& value) {
    seen_.insert(name);
    const auto it = json_.find(name);
    if (it == json_.end()) throw Error(fmt::format("{}: field '{}' is missing", where_, name));
    if (!read(*it, value)) {
      throw Error(fmt::format("{}: field '{}' = {}: must be {}", where_, name, shown(*it), allowed<T>()));
    }
  }

  /// A field that is itself an object, to be read by another reader.
  void object(const char* name, nlohmann::json& value) {
    seen_.insert(name);
    const auto it = json_.find(name);
    if (it == json_.end()) throw Error(fmt::format("{}: field '{}' is missing", where_, name));
    if (!it->is_object()) throw Error(fmt::format("{}: field '{}' must be an object", where_, name));
    value = *it;
  }

  /// Refuses fields that were not read.
  void finish() const {
    for (const auto& item : json_.items()) {
      if (!seen_.count(item.key())) {
        throw Error(fmt::format("{}: field '{}' is not known", where_, shortened(item.key())));
      }
    }
  }

 private:
  template <class T>
  static bool read(const nlohmann::json& json, T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      if (!json.is_boolean()) return false;
    } else if constexpr (std::is_integral_v<T>) {
      if (json.is_number_unsigned()) {
        const auto number = json.get<std::uint64_t>();
        if (number > static_cast<std::uint64_t>(std::numeric_limits<T>::max())) return false;
      } else if (json.is_number_integer()) {
        if (std::is_unsigned_v<T>) return false;
        if (json.get<std::int64_t>() < static_cast<std::int64_t>(std::numeric_limits<T>::min())) return false;
      } else {
        return false;
      }
    } else if constexpr (std::is_floating_point_v<T>) {
      if (!json.is_number()) return false;
    } else if constexpr (std::is_same_v<T, std::string>) {
      if (!json.is_string()) return false;
    } else if (!json.is_array()) {
      return false;
    } else {
      value.clear();
      for (const auto& item : json) {
        if (typename T::value_type element; read(item, element))
          value.push_back(std::move(element));
        else
          return false;
      }
      return true;
    }
    value = json.get<T>();
    return true;
  }

  template <class T>
  static std::string allowed() {
    if constexpr (std::is_same_v<T, bool>) return "true or false";
    if constexpr (std::is_integral_v<T>) {
      return fmt::format("an integer {} ... {}", std::numeric_limits<T>::min(), std::numeric_limits<T>::max());
    }
    if constexpr (std::is_floating_point_v<T>) return "a number";
    if constexpr (std::is_same_v<T, std::string>) return "a string";
    if constexpr (std::is_same_v<T, std::vector<int>>) return "a list of integers";
    return "a list of strings";
  }

  const nlohmann::json& json_;
  std::string where_;
  std::set<std::string> seen_;
};

}  // namespace nsa::base
