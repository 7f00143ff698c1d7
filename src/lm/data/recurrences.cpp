#include "lm/data/recurrences.h"

#include <algorithm>
#include <bit>

namespace nsa::lm {

std::vector<std::int64_t> recurrence_distances(std::span<const std::int32_t> tokens, std::int64_t match) {
  const auto count = static_cast<std::int64_t>(tokens.size());
  std::vector<std::int64_t> distances(static_cast<std::size_t>(std::max<std::int64_t>(0, count - 1)));
  // Where match + 1 tokens ended last, by their hash or, if others are there, in a place behind.
  constexpr std::int64_t kNone = -1;
  std::vector<std::int64_t> last(std::bit_ceil(2 * tokens.size() + 1), kNone);
  constexpr std::uint64_t kBase = 0x9e3779b97f4a7c15;
  std::uint64_t hash = 0, oldest = 1;  // kBase^match
  for (std::int64_t i = 0; i < match; ++i) oldest *= kBase;
  const auto value = [&](std::int64_t i) {
    return static_cast<std::uint64_t>(tokens[static_cast<std::size_t>(i)]) + 1;
  };
  const auto same = [&](std::int64_t i, std::int64_t j) {
    const auto first = tokens.begin() + (i - match);
    return std::equal(first, first + match + 1, tokens.begin() + (j - match));
  };
  for (std::int64_t i = 0; i < count; ++i) {
    if (i > match) hash -= value(i - match - 1) * oldest;
    hash = hash * kBase + value(i);
    if (i < match) continue;
    std::size_t at = (hash ^ hash >> 32) & (last.size() - 1);
    while (last[at] != kNone && !same(last[at], i)) at = (at + 1) & (last.size() - 1);
    if (last[at] != kNone) distances[static_cast<std::size_t>(i - 1)] = i - last[at];
    last[at] = i;
  }
  return distances;
}

}  // namespace nsa::lm
