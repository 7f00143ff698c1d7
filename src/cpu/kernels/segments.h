// What a query attends to: a list of key runs in packed blocks, and the range of positions it sees of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/kernels/pack.h"

namespace nsa::cpu::NSA_ISA {

/// Ends of segments lie at multiples of this: one vector for the widest instruction set, the same for all.
inline constexpr int kSegmentTokens = 16;

/// Tokens position ... position + count - 1, inside one packed block.
struct Segment {
  const Slot* keys;    // Layout::kColumns, at the first token; null where only values are used
  const Slot* values;  // Layout::kRows, at the first token; null where only keys are used
  std::int64_t position;
  int count;       // a multiple of kSegmentTokens, at most kBlockTokens
  bool nonfinite;  // values hold a NaN or an infinity, which would pass through a probability of zero
};

/// Positions [begin, end).
struct Range {
  std::int64_t begin = 0, end = 0;

  bool contains(const Segment& s) const { return begin <= s.position && s.position + s.count <= end; }
};

/// Packed keys and values of one sequence and head.
struct KeyValueBlocks {
  TokenBlocks keys, values;  // either may be empty
  int slot_elements = 1;

  /// Appends segments covering the tokens [begin, end), rounded to kSegmentTokens on both sides.
  void cover(Range range, std::vector<Segment>& segments) const {
    std::int64_t token = range.begin / kSegmentTokens * kSegmentTokens;
    while (token < range.end) {
      const std::int64_t b = token / kBlockTokens, next = std::min((b + 1) * kBlockTokens, range.end);
      const int offset = static_cast<int>(token - b * kBlockTokens);
      const int count = static_cast<int>(round_up(next - token, kSegmentTokens));
      segments.push_back(
          {.keys = keys.data ? keys.block(b) + offset : nullptr,
           .values = values.data ? values.block(b) + offset / slot_elements * values.step_stride : nullptr,
           .position = token,
           .count = count,
           .nonfinite = values.nonfinite && values.nonfinite[b] != 0});
      token += count;
    }
  }
};

/// Keys and values of all sequences and heads of one branch, packed.
template <class In>
class PackedBranch {
 public:
  /// Nothing but all blocks packed beforehand: no scratch to list them.
  struct Scratch {};
  Scratch make_scratch(std::int64_t) const { return {}; }

  /// An undefined `v`: keys only.
  template <class Tokens>
  PackedBranch(const Tokens& k, const Tokens& v, const std::vector<TokenSpan>& spans, const Context& context)
      : keys_(k, Layout::kColumns, spans, context) {
    if (v.defined()) values_ = PackedTokens<In>(v, Layout::kRows, spans, context);
  }

  int key_dim() const { return keys_.dim(); }
  int value_dim() const { return values_.dim(); }

  KeyValueBlocks of(std::size_t span, std::int64_t head) const {
    return {keys_.of(span, head), values_.defined() ? values_.of(span, head) : TokenBlocks{},
            SlotsOf<In>::type::kElements};
  }
  KeyValueBlocks of(std::size_t span, std::int64_t head, Scratch&) const { return of(span, head); }

 private:
  PackedTokens<In> keys_, values_;
};

}  // namespace nsa::cpu::NSA_ISA
