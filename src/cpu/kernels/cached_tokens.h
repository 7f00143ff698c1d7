// Keys and values that lie in the pages and rings of a cache, in the type of the queries or in e4m3.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/half.h"
#include "core/token_rows.h"
#include "cpu/kernels/pack.h"
#include "cpu/kernels/segments.h"

namespace nsa::cpu::NSA_ISA {

/// One kind of keys or values of several sequences; a span is a sequence.
struct CachedTokens {
  std::vector<TokenRows> spans;
  std::int64_t heads = 0, dim = 0;

  std::int64_t size(int d) const { return d == -1 ? dim : heads; }
  bool defined() const { return dim > 0; }
};

/// e4m3 as it is stored, without its scale: every number of it is one of In's.
template <class In>
void load_stored(const std::byte* row, std::int64_t dim, In* to) {
  for (std::int64_t d = 0; d < dim; ++d) {
    const float x = nsa::to_float(Float8E4M3{std::to_integer<std::uint8_t>(row[d])});
    if constexpr (sizeof(In) == 4) {
      to[d] = x;
    } else {
      to[d].bits = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16);
    }
  }
}

/// Brings tokens that run_of will be asked for into the second cache. Rows of one head are short and lie apart: too
/// little in a row for the hardware to see where it goes on.
inline void prefetch_run(const CachedTokens& tokens, const std::vector<TokenSpan>& spans, std::size_t s,
                         std::int64_t head, std::int64_t token, std::int64_t count) {
  const TokenRows& rows = tokens.spans[s];
  const std::int64_t bytes = tokens.dim * static_cast<std::int64_t>(size_of(rows.dtype)), end = token + count;
  for (std::int64_t t = std::max(token, spans[s].first); t < end;) {
    const std::int64_t next = std::min(end, t + rows.run(t));
    const std::byte* row = rows.at(t, head);
    for (; t < next; ++t, row += rows.row_stride)
      for (std::int64_t d = 0; d < bytes; d += 64) __builtin_prefetch(row + d, 0, 2);
  }
}

/// Tokens before the span's first are not in a ring any more: zeros. e4m3 comes without its scale.
template <class In>
TokenRun<In> run_of(const CachedTokens& tokens, const std::vector<TokenSpan>& spans, std::size_t s, std::int64_t head,
                    std::int64_t token, int count, In* scratch) {
  const TokenRows& rows = tokens.spans[s];
  const bool float8 = rows.dtype == DType::kFloat8E4M3;
  const std::int64_t end = token + count, begin = std::min(std::max(token, spans[s].first), end);
  if (!float8 && begin == token && rows.run(token) >= count)
    return {reinterpret_cast<const In*>(rows.at(token, head)), rows.row_stride / std::int64_t{sizeof(In)}};
  std::fill_n(scratch, (begin - token) * tokens.dim, In{});
  for (std::int64_t t = begin; t < end;) {
    const std::int64_t next = std::min(end, t + rows.run(t));
    const std::byte* row = rows.at(t, head);
    for (; t < next; ++t, row += rows.row_stride) {
      In* const to = scratch + (t - token) * tokens.dim;
      if (float8) {
        load_stored(row, tokens.dim, to);
      } else {
        std::copy_n(reinterpret_cast<const In*>(row), tokens.dim, to);
      }
    }
  }
  return {scratch, tokens.dim};
}

/// A branch of which a query sees little: its keys and values are packed when they are listed.
template <class In>
class PackedOnDemand {
 public:
  using Slots = typename SlotsOf<In>::type;

  PackedOnDemand(const CachedTokens& k, const CachedTokens& v, const std::vector<TokenSpan>& spans, const Context&)
      : k_(k),
        v_(v),
        spans_(spans),
        value_columns_(round_up(v.dim, kWidth)),
        key_slots_(k.dim / Slots::kElements * kBlockTokens),
        value_slots_(value_columns_ * kBlockTokens / Slots::kElements) {}

  int value_dim() const { return static_cast<int>(v_.dim); }

  /// Blocks packed for the query at hand, and a block's tokens in a row.
  struct Scratch {
    Buffer<Slot> keys, values;
    Buffer<In> tokens;
    std::int64_t blocks = 0;
  };
  /// For queries that list up to `tokens` tokens, counted in whole blocks.
  Scratch make_scratch(std::int64_t tokens) const {
    const std::int64_t blocks = tokens / kBlockTokens;
    return {.keys = Buffer<Slot>(static_cast<std::size_t>(blocks * key_slots_)),
            .values = Buffer<Slot>(static_cast<std::size_t>(blocks * value_slots_)),
            .tokens = Buffer<In>(static_cast<std::size_t>(kBlockTokens * std::max(k_.dim, v_.dim)))};
  }

  class Lister {
   public:
    Lister(const PackedOnDemand& branch, std::size_t span, std::int64_t head, Scratch& scratch)
        : branch_(branch), span_(span), head_(head), scratch_(scratch) {}

    /// As KeyValueBlocks::cover, for a range that begins at a multiple of kSegmentTokens.
    void cover(Range range, std::vector<Segment>& segments) const {
      for (std::int64_t token = range.begin; token < range.end; token += kBlockTokens)
        segments.push_back(branch_.pack(span_, head_, token, range.end, scratch_));
    }

   private:
    const PackedOnDemand& branch_;
    std::size_t span_;
    std::int64_t head_;
    Scratch& scratch_;
  };

  Lister of(std::size_t span, std::int64_t head, Scratch& scratch) const {
    scratch.blocks = 0;
    return {*this, span, head, scratch};
  }

 private:
  Segment pack(std::size_t span, std::int64_t head, std::int64_t token, std::int64_t end, Scratch& scratch) const {
    Slot* keys = scratch.keys.data() + scratch.blocks * key_slots_;
    Slot* values = scratch.values.data() + scratch.blocks * value_slots_;
    ++scratch.blocks;
    const int count = static_cast<int>(std::min<std::int64_t>(end - token, kBlockTokens));
    const auto run = [&](const CachedTokens& tokens) {
      return run_of<In>(tokens, spans_, span, head, token, count, scratch.tokens.data());
    };
    prefetch_run(v_, spans_, span, head, token, count);
    const TokenRun<In> k = run(k_);
    pack_columns<Slots, In>(k.data, k.stride, count, static_cast<int>(k_.dim), keys);
    prefetch_run(k_, spans_, span, head, token + count, std::min<std::int64_t>(end - token - count, kBlockTokens));
    const TokenRun<In> v = run(v_);
    pack_rows<Slots, In>(v.data, v.stride, count, static_cast<int>(v_.dim), values);
    return {.keys = keys,
            .values = values,
            .position = token,
            .count = static_cast<int>(round_up(count, kSegmentTokens)),
            .nonfinite = any_nonfinite<Slots>(values, value_slots_)};
  }

  CachedTokens k_, v_;
  std::vector<TokenSpan> spans_;
  std::int64_t value_columns_, key_slots_, value_slots_;
};

}  // namespace nsa::cpu::NSA_ISA
