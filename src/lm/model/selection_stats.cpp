#include "lm/model/selection_stats.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace nsa::lm {
namespace {

double entropy_of(const std::vector<std::int64_t>& counts, std::int64_t total) {
  double entropy = 0;
  for (const std::int64_t count : counts) {
    if (count == 0) continue;
    const double p = static_cast<double>(count) / static_cast<double>(total);
    entropy -= p * std::log(p);
  }
  return entropy;
}

}  // namespace

SelectionStats selection_stats(std::span<const std::int32_t> indices, std::span<const std::int32_t> offsets,
                               const NSAConfig& cfg, int num_kv_heads, int kv_head) {
  std::int64_t picks = 0, unforced = 0, chosen = 0, shared = 0;
  SelectionStats stats;
  const auto topk = static_cast<std::size_t>(cfg.topk);
  for (std::size_t b = 0; b + 1 < offsets.size(); ++b) {
    const std::int64_t length = offsets[b + 1] - offsets[b];
    std::vector<std::int64_t> counts(static_cast<std::size_t>(length / cfg.block_size + 1)), last(counts.size(), -1);
    std::int64_t unforced_here = 0;
    for (std::int64_t t = 0; t < length; ++t) {
      const auto row = static_cast<std::size_t>((offsets[b] + t) * num_kv_heads + kv_head);
      const bool choice = t / cfg.block_size + 1 > cfg.topk;
      for (const std::int32_t block : indices.subspan(row * topk, topk)) {
        if (block < 0) continue;
        const auto at = static_cast<std::size_t>(block);
        ++picks;
        if (!is_forced(block, t, cfg)) {
          ++unforced_here;
          ++counts[at];
        }
        const std::int64_t chosen_last = std::exchange(last[at], t);
        if (!choice || t == 0) continue;
        ++chosen;
        shared += chosen_last == t - 1;
      }
    }
    if (unforced_here == 0) continue;
    unforced += unforced_here;
    const auto weight = static_cast<double>(unforced_here);
    const std::int64_t eligible = (length - 1) / cfg.block_size + 1 - cfg.init_blocks - cfg.local_blocks;
    stats.entropy += weight * entropy_of(counts, unforced_here);
    stats.entropy_max += weight * std::log(static_cast<double>(std::max<std::int64_t>(1, eligible)));
  }
  if (picks > 0) stats.unforced_share = static_cast<double>(unforced) / static_cast<double>(picks);
  if (unforced > 0) {
    stats.entropy /= static_cast<double>(unforced);
    stats.entropy_max /= static_cast<double>(unforced);
  }
  if (chosen > 0) stats.neighbour_overlap = static_cast<double>(shared) / static_cast<double>(chosen);
  return stats;
}

}  // namespace nsa::lm
