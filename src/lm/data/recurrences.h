// Recurring tokens: those that end an n-gram which occurred earlier in the context.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace nsa::lm {

/// For each i >= 1: the distance from the n-gram of `match` tokens and `tokens[i]` to its previous occurrence, or 0
/// without one; tokens.size() - 1 distances.
std::vector<std::int64_t> recurrence_distances(std::span<const std::int32_t> tokens, std::int64_t match);

}  // namespace nsa::lm
