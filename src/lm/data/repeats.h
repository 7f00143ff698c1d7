// Which tokens could be copied: they and the tokens before them stood together earlier in the context.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lm/data/tokenizer.h"

namespace nsa::lm {

/// For each i >= 1: how many tokens before `tokens[i]` it stood last behind the same `match` tokens, or 0 where it did
/// not; tokens.size() - 1 distances.
std::vector<std::int64_t> repeat_distances(std::span<const std::int32_t> tokens, std::int64_t match);
/// The positions whose next token stood behind the same `match` tokens, last more than `distance` tokens before it.
std::vector<std::int64_t> before_far_repeats(std::span<const std::int32_t> tokens, std::int64_t match,
                                             std::int64_t distance);

/// How many tokens before one make what stands behind them a repeat: three pieces, eight bytes (or where nothing is
/// known of the tokens).
std::int64_t repeat_match(const Tokenizer* tokenizer);

}  // namespace nsa::lm
