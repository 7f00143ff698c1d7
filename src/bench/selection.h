// Blocks for a benchmark to attend to, where its selection is not to depend on what random data happens to choose.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nsa/config.h"

namespace nsa::bench {

enum class Selection : std::int8_t {
  kOwn,        // what the queries choose themselves
  kRandom,     // forced blocks and random others, drawn for every query
  kClustered,  // random, each redrawn every third query with a random phase: neighbours share 3/4
};

const char* name_of(Selection selection);
/// Throws std::invalid_argument for a name that is none.
Selection parse_selection(const std::string& name);

/// (length, kv_heads, topk): ascending blocks of each query, then -1; empty for kOwn. The same on every machine.
std::vector<std::int32_t> chosen_blocks(Selection selection, const NSAConfig& cfg, std::int64_t length,
                                        std::int64_t kv_heads);

}  // namespace nsa::bench
