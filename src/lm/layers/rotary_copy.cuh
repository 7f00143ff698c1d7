// The rotation of heads by a thread block, which kernels share.
#pragma once

#include "lm/layers/columns.cuh"

namespace nsa::lm::fused {

inline constexpr unsigned kRotaryThreads = 256;

/// The copies' thread blocks one after the other; first_block[i] is where copy i starts.
struct RotaryCopyGrid {
  unsigned first_block[kMaxRotaryCopies + 1];

  explicit RotaryCopyGrid(const RotaryCopyArgs& args) : first_block{} {
    for (int i = 0; i < args.count; ++i) {
      const std::int64_t threads = args.rows * args.copies[i].heads * (args.copies[i].half / kColumns);
      first_block[i + 1] = first_block[i] + static_cast<unsigned>((threads + kRotaryThreads - 1) / kRotaryThreads);
    }
  }
  unsigned blocks(const RotaryCopyArgs& args) const { return first_block[args.count]; }
};

__device__ inline void rotate_pairs(const RotaryCopyArgs& args, const RotaryCopyGrid& grid, unsigned block) {
  int which = 0;
  while (block >= grid.first_block[which + 1]) ++which;
  const RotaryCopy& copy = args.copies[which];
  const std::int64_t index = std::int64_t{block - grid.first_block[which]} * kRotaryThreads + threadIdx.x;
  const int per_head = copy.half / kColumns;
  const std::int64_t pair = index / per_head, row = pair / copy.heads;  // pair of a row and a head
  if (row >= args.rows) return;
  const std::int64_t head = pair - row * copy.heads, column = (index - pair * per_head) * kColumns;
  const std::int64_t from = row * copy.from_row + head * copy.from_head + column;
  const std::int64_t to = row * copy.to_row + head * copy.to_head + column;
  Eight low = load(copy.from, from), high = load(copy.from, from + copy.half);
  if (copy.direction != 0) {
    const Eight c = load(args.cos + row * copy.half + column), s = load(args.sin + row * copy.half + column);
    const Eight first = low;
    low = each([&](int i) { return low.at[i] * c.at[i] - high.at[i] * copy.direction * s.at[i]; });
    high = each([&](int i) { return high.at[i] * c.at[i] + first.at[i] * copy.direction * s.at[i]; });
  }
  store(copy.to, to, low);
  store(copy.to, to + copy.half, high);
}

}  // namespace nsa::lm::fused
