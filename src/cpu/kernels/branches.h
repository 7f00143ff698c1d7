// The three branches of NSA: which keys a group of queries sees. Each packs its keys and values once per call and then
// lists segments for one group after the other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/kernels/attention.h"
#include "cpu/kernels/queries.h"
#include "cpu/kernels/segments.h"
#include "cpu/kernels/visible.h"
#include "nsa/config.h"

namespace nsa::cpu::NSA_ISA {

/// Room for the ends of a range rounded to segments.
inline constexpr std::int64_t kRangeEnds = 2 * kSegmentTokens;

inline constexpr int kMaxNeighbours = 16;

/// Queries attended together: with few heads a key block would be read for one or two rows only, so neighbouring
/// queries share it.
inline int neighbours(int heads) { return heads >= 4 ? 1 : kMaxNeighbours / heads; }

/// The raw tokens of every sequence that has queries.
template <class In>
std::vector<TokenSpan> raw_spans(const Queries<In>& queries) {
  std::vector<TokenSpan> spans;
  for (const Sequence& s : queries.sequences())
    spans.push_back({.batch = s.batch, .begin = s.k_begin, .length = s.q_len > 0 ? s.k_len : 0});
  return spans;
}

/// Lists for queries that are loaded the keys of positions ranges[0].begin ... ranges[count - 1].end: ranges of
/// neighbouring queries, both ends ascending.
template <class In>
void attend_to_ranges(const Queries<In>& queries, const PackedBranch<In>& branch, const QueryGroup& group,
                      const Range* ranges, Attention<typename Queries<In>::Slots>& attention) {
  attention.begin(0, group.count, queries.heads(), ranges);
  branch.of(group.sequence, group.kv_head).cover({ranges[0].begin, ranges[group.count - 1].end}, attention.segments());
}

/// Query t sees the compressed tokens of the blocks that end at or before t.
template <class In>
class CompressedBranch {
 public:
  template <class Tokens>
  CompressedBranch(const Queries<In>& queries, const Tokens& k_c, const Tokens& v_c, const NSAConfig& cfg,
                   const Context& context)
      : queries_(queries), cfg_(cfg), packed_(k_c, v_c, spans(queries), context) {}

  std::int64_t tokens() const { return cfg_.num_compressed(queries_.longest()) + kRangeEnds; }

  int value_dim() const { return packed_.value_dim(); }

  void list(const QueryGroup& group, Attention<typename Queries<In>::Slots>& attention) const {
    Range ranges[kMaxNeighbours];
    for (int a = 0; a < group.count; ++a) ranges[a] = visible_in_compressed(cfg_, queries_.position(group, a));
    attend_to_ranges(queries_, packed_, group, ranges, attention);
  }

 private:
  static std::vector<TokenSpan> spans(const Queries<In>& queries) {
    std::vector<TokenSpan> spans;
    for (const Sequence& s : queries.sequences())
      spans.push_back({.batch = s.batch, .begin = s.c_begin, .length = s.q_len > 0 ? s.c_len : 0});
    return spans;
  }

  const Queries<In>& queries_;
  NSAConfig cfg_;
  PackedBranch<In> packed_;
};

/// Query t sees the last window_size tokens up to and including t.
template <class In>
class WindowBranch {
 public:
  template <class Tokens>
  WindowBranch(const Queries<In>& queries, const Tokens& k, const Tokens& v, std::int64_t window_size,
               const Context& context)
      : queries_(queries), window_size_(window_size), packed_(k, v, spans(queries, window_size), context) {}

  std::int64_t tokens() const { return std::min(window_size_, queries_.longest()) + kMaxNeighbours + kRangeEnds; }

  int value_dim() const { return packed_.value_dim(); }

  void list(const QueryGroup& group, Attention<typename Queries<In>::Slots>& attention) const {
    Range ranges[kMaxNeighbours];
    for (int a = 0; a < group.count; ++a) ranges[a] = visible_in_window(window_size_, queries_.position(group, a));
    attend_to_ranges(queries_, packed_, group, ranges, attention);
  }

 private:
  static std::vector<TokenSpan> spans(const Queries<In>& queries, std::int64_t window_size) {
    std::vector<TokenSpan> spans = raw_spans(queries);
    for (std::size_t i = 0; i < spans.size(); ++i)
      spans[i].first = visible_in_window(window_size, queries.sequences()[i].position(0)).begin;
    return spans;
  }

  const Queries<In>& queries_;
  std::int64_t window_size_;
  PackedBranch<In> packed_;
};

/// Query t sees the tokens up to and including t of the blocks whose numbers it is given. Packed: PackedBranch, or one
/// that packs what is listed.
template <class In, class Packed = PackedBranch<In>>
class SelectedBranch {
 public:
  template <class Tokens>
  SelectedBranch(const Queries<In>& queries, const Tokens& k, const Tokens& v, int block_size, const Context& context)
      : queries_(queries), block_size_(block_size), packed_(k, v, raw_spans(queries), context) {}

  /// With `blocks` block numbers a query.
  std::int64_t tokens(std::int64_t blocks) const { return listed(blocks, block_size_) + kRangeEnds; }

  int value_dim() const { return packed_.value_dim(); }

  /// What a thread needs to list `blocks` block numbers a query.
  struct Scratch {
    std::vector<std::int32_t> sorted;
    typename Packed::Scratch packed;
  };
  Scratch make_scratch(std::int64_t blocks) const {
    return {std::vector<std::int32_t>(static_cast<std::size_t>(blocks)),
            packed_.make_scratch(listed(blocks, round_up(block_size_, kBlockTokens)))};
  }

  /// Of one query of the group: the numbers in any order, twice or out of range.
  void list(const QueryGroup& group, int query, const std::int32_t* blocks, std::int64_t count, Scratch& scratch,
            Attention<typename Queries<In>::Slots>& attention) const {
    const std::int64_t t = queries_.position(group, query);
    const Range visible{0, t + 1};
    attention.begin(query, 1, queries_.heads(), &visible);
    auto packed = packed_.of(group.sequence, group.kv_head, scratch.packed);
    for_visible_in_selected(blocks, count, block_size_, t, scratch.sorted.data(),
                            [&](const Range& range) { packed.cover(range, attention.segments()); });
  }

 private:
  /// Most tokens of `blocks` block numbers when each block takes `size`: none lie beyond the longest sequence.
  std::int64_t listed(std::int64_t blocks, std::int64_t size) const {
    const std::int64_t longest = queries_.longest();
    return std::min(blocks, ceil_div(longest, block_size_)) * std::min(size, round_up(longest, kBlockTokens));
  }

  const Queries<In>& queries_;
  int block_size_;
  Packed packed_;
};

/// One branch alone: o and lse of every query.
template <class In, class Branch>
void attend_to_branch(const Queries<In>& queries, const Branch& branch, const TensorView& o, const TensorView& lse,
                      const Context& context) {
  using Rows = Attention<typename Queries<In>::Slots>;
  const int count = neighbours(queries.heads());
  queries.for_groups(
      count, context,
      [&] { return Rows(count * queries.heads(), branch.tokens(), queries.key_dim(), branch.value_dim()); },
      [&](Rows& attention, const QueryGroup& group) {
        queries.load(group, attention);
        branch.list(group, attention);
        attention.attend(queries.scale());
        store_outputs(queries, group, attention, o, lse);
      });
  fill_unused(queries, o, lse);
}

}  // namespace nsa::cpu::NSA_ISA
