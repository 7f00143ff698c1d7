// Blocks for a benchmark to attend to, where its selection is not to depend on what random data happens to choose.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "nsa/config.h"

namespace nsa::bench {

/// Every generated pattern has the forced blocks, as select_blocks has them, and others.
enum class Selection : std::int8_t {
  kOwn,        // what the queries choose themselves
  kRandom,     // drawn for every query
  kClustered,  // each redrawn every third query with a random phase: neighbours share 3/4
  kModelLike,  // each kept from the previous query with one probability, else drawn: neighbours share what is asked for
  kRecorded,   // those of a file
};

/// What neighbouring queries of trained models share, about: 0.66 to 0.83 in a model of 26 million parameters, 0.87 in
/// MiniMax-M3, 0.87 to 0.94 in Qwen3.8.
constexpr double kModelOverlap = 0.8;

const char* name_of(Selection selection);
/// Throws std::invalid_argument for a name that is none.
Selection parse_selection(const std::string& name);

/// (length - first, kv_heads, topk): ascending blocks of the queries from `first` on, then -1; empty for kOwn and
/// kRecorded. The same on every machine. kModelLike: `neighbour_overlap` below is `overlap`, or as near as these shapes
/// allow. Random blocks share some, too: 16 of 64 blocks more than half.
std::vector<std::int32_t> chosen_blocks(Selection selection, const NSAConfig& cfg, std::int64_t length,
                                        std::int64_t kv_heads, double overlap = kModelOverlap, std::int64_t first = 0);

/// Share of a query's blocks, forced ones included, that the previous query has too: the mean over the KV heads and the
/// queries that have more visible blocks than they take. Empty without such a query. `blocks`: of one sequence, as
/// above. lm/model/selection_stats.h measures the same of a model.
std::optional<double> neighbour_overlap(std::span<const std::int32_t> blocks, const NSAConfig& cfg,
                                        std::int64_t kv_heads, std::int64_t first = 0);

}  // namespace nsa::bench
