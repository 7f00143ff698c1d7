// Which tokens could be copied: they and the tokens before them stood together earlier in the context.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace nsa::lm {

/// For each i >= 1: how many tokens before `tokens[i]` it stood last behind the same `match` tokens, or 0 where it did
/// not; tokens.size() - 1 distances.
std::vector<std::int64_t> repeat_distances(std::span<const std::int32_t> tokens, std::int64_t match);

}  // namespace nsa::lm
