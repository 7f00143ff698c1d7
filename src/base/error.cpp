#include "base/error.h"

#include <fmt/core.h>

#include <cstddef>
#include <cstdio>

namespace nsa::base {
namespace {

/// The first character of a text in UTF-8 and how many bytes it has, 0 where they are not UTF-8.
std::size_t decode(std::string_view text, char32_t& character) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  const std::size_t size = lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
  if (size == 0 || size > text.size()) return 0;
  character = size == 1 ? lead : lead & (0x7f >> size);
  for (std::size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    character = character << 6 | (byte(i) & 0x3f);
  }
  return size;
}

/// Of ASCII, of Latin-1 and those that turn the direction of writing.
bool is_control(char32_t c) {
  return c < 0x20 || (c >= 0x7f && c < 0xa0) || (c >= 0x2028 && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069);
}

}  // namespace

Error::Error(const std::string& message) : std::runtime_error(printable(message)) {}

Failure::Failure(const std::string& message) : std::runtime_error(printable(message)) {}

void check(const Status& status) {
  if (status.code() == StatusCode::kUnsupported) throw Error(status.message());
  if (status.code() == StatusCode::kInternal) throw Failure(status.message());
  if (!status.ok()) throw std::runtime_error(status.message());
}

std::string printable(std::string_view text) {
  constexpr std::size_t kBeginning = 1400, kEnd = 597;
  std::string line;
  while (!text.empty()) {
    char32_t character = 0;
    const std::size_t size = decode(text, character);
    if (size > 0 && !is_control(character)) {
      line += text.substr(0, size);
    } else {
      for (const char c : text.substr(0, size > 0 ? size : 1)) {
        line += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
      }
    }
    text.remove_prefix(size > 0 ? size : 1);
  }
  if (line.size() <= kBeginning + 3 + kEnd) return line;
  const auto boundary = [&](std::size_t at) {  // of a character
    while ((static_cast<unsigned char>(line[at]) & 0xc0) == 0x80) ++at;
    return at;
  };
  return line.substr(0, boundary(kBeginning)) + "..." + line.substr(boundary(line.size() - kEnd));
}

void write_stderr(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

}  // namespace nsa::base
