// The work of a chunk of queries in the backward pass of attention: which query meets which key block, in both orders.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "cpu/kernels/segments.h"

namespace nsa::cpu::NSA_ISA {

inline constexpr int kMaxBranches = 3;

/// One query with all heads of one KV head.
struct Item {
  std::size_t sequence;
  std::int64_t kv_head, row;
  std::int64_t entries[kMaxBranches + 1];  // entries[b] ... entries[b + 1]: those in branch b
};

/// A query meets a block of kBlockTokens keys: it sees the tokens [begin, end) of it.
struct Entry {
  std::int64_t item;   // within the chunk
  std::int64_t block;  // number among the blocks of its sequence and KV head
  std::int64_t key;    // number among all blocks of the call, all branches
  int begin, end;

  /// Tokens [first, last) are computed: whole segments.
  int first() const { return begin / kSegmentTokens * kSegmentTokens; }
  int last() const { return static_cast<int>(round_up(end, kSegmentTokens)); }
  bool partly() const { return begin > first() || end < last(); }
};

class Chunk {
 public:
  explicit Chunk(std::int64_t keys) : count_(static_cast<std::size_t>(keys)) {}

  const std::vector<Item>& items() const { return items_; }
  const std::vector<Entry>& entries() const { return entries_; }

  void clear() {
    items_.clear();
    entries_.clear();
  }

  void add_item(std::size_t sequence, std::int64_t kv_head, std::int64_t row) {
    const std::int64_t n = size();
    items_.push_back({.sequence = sequence, .kv_head = kv_head, .row = row, .entries = {n, n, n, n}});
  }

  /// Adds the entries of the last item in `branch`, one for each block that the range touches. Branches come in
  /// ascending order. Block 0 of the sequence has number `first_key` in the call.
  void add_range(int branch, Range range, std::int64_t first_key) {
    Item& item = items_.back();
    for (std::int64_t at = range.begin; at < range.end;) {
      const std::int64_t block = at / kBlockTokens, next = std::min((block + 1) * kBlockTokens, range.end);
      entries_.push_back({.item = static_cast<std::int64_t>(items_.size()) - 1,
                          .block = block,
                          .key = first_key + block,
                          .begin = static_cast<int>(at - block * kBlockTokens),
                          .end = static_cast<int>(next - block * kBlockTokens)});
      at = next;
    }
    std::fill(item.entries + branch + 1, item.entries + kMaxBranches + 1, size());
  }

  /// Numbers of the entries of one key block, queries ascending.
  struct KeyList {
    std::int64_t key;
    const std::int64_t *begin, *end;
  };

  /// The entries sorted by key block, the longest lists first.
  std::vector<KeyList> by_key() {
    std::vector<std::int64_t> touched;
    for (const Entry& entry : entries_)
      if (count_[static_cast<std::size_t>(entry.key)]++ == 0) touched.push_back(entry.key);
    std::stable_sort(touched.begin(), touched.end(), [&](std::int64_t a, std::int64_t b) {
      return count_[static_cast<std::size_t>(a)] > count_[static_cast<std::size_t>(b)];
    });
    order_.resize(entries_.size());
    std::vector<KeyList> lists;
    std::int64_t at = 0;
    for (std::int64_t key : touched) {
      std::int64_t& count = count_[static_cast<std::size_t>(key)];
      lists.push_back({key, order_.data() + at, order_.data() + at + count});
      at += std::exchange(count, at);  // from here on: where the next entry of the key goes
    }
    for (std::int64_t i = 0; i < size(); ++i)
      order_[static_cast<std::size_t>(count_[static_cast<std::size_t>(entries_[static_cast<std::size_t>(i)].key)]++)] =
          i;
    for (std::int64_t key : touched) count_[static_cast<std::size_t>(key)] = 0;
    return lists;
  }

 private:
  std::int64_t size() const { return static_cast<std::int64_t>(entries_.size()); }

  std::vector<Item> items_;
  std::vector<Entry> entries_;
  std::vector<std::int64_t> count_;  // per key block of the call; zero between calls of by_key()
  std::vector<std::int64_t> order_;
};

}  // namespace nsa::cpu::NSA_ISA
