// Which key positions a query sees in each branch, as ascending disjoint ranges.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/kernels/segments.h"
#include "nsa/config.h"

namespace nsa::cpu::NSA_ISA {

/// The compressed tokens of the blocks that end at or before t.
inline Range visible_in_compressed(const NSAConfig& cfg, std::int64_t t) { return {0, cfg.num_compressed(t + 1)}; }

/// The last `window` tokens up to and including t.
inline Range visible_in_window(std::int64_t window, std::int64_t t) {
  return {std::max<std::int64_t>(0, t + 1 - window), t + 1};
}

/// f(range) for the tokens up to and including t of the given blocks, neighbouring blocks as one range. The numbers may
/// be in any order, twice, negative or in the future; `sorted` has as many elements.
template <class F>
void for_visible_in_selected(const std::int32_t* blocks, std::int64_t count, std::int64_t block_size, std::int64_t t,
                             std::int32_t* sorted, const F& f) {
  std::int32_t* end =
      std::copy_if(blocks, blocks + count, sorted, [&](std::int32_t b) { return b >= 0 && b * block_size <= t; });
  if (!std::is_sorted(sorted, end)) std::sort(sorted, end);
  end = std::unique(sorted, end);
  while (sorted != end) {
    const std::int64_t first = *sorted;
    std::int64_t next = first;
    while (sorted != end && *sorted == next) ++sorted, ++next;
    f(Range{first * block_size, std::min(next * block_size, t + 1)});
  }
}

}  // namespace nsa::cpu::NSA_ISA
