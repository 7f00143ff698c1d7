// Text for messages and files, without iostreams: these follow the process's locale, and formatting numbers with them
// crashes where another library in the process brings parts of a C++ standard library of its own (torch's wheels do).
#pragma once

#include <charconv>
#include <string>
#include <string_view>
#include <type_traits>

namespace nsa {

/// Numbers in decimal, floating-point ones with as many digits as it takes to read them back; what can describe itself
/// by that.
template <class T>
void append(std::string& text, const T& x) {
  if constexpr (std::is_same_v<T, char>) {
    text += x;
  } else if constexpr (std::is_arithmetic_v<T>) {
    char digits[40];
    text.append(digits, std::to_chars(digits, digits + sizeof digits, x).ptr);
  } else if constexpr (requires { x.describe(); }) {
    text += x.describe();
  } else {
    text += std::string_view(x);
  }
}

/// The parts one after the other.
template <class... Parts>
std::string text_of(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  return text;
}

}  // namespace nsa
