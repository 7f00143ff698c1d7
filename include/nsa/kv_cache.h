// A cache that owns its memory: pages with reference counts, so that sequences can share a prefix. Host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "nsa/decode.h"

namespace nsa {

struct KVCacheOptions {
  std::int64_t batch = 1;  // sequences
  std::int64_t num_kv_heads = 1;
  std::int64_t key_dim = 128, value_dim = 128;
  DType dtype = DType::kBFloat16;
  NSAConfig cfg;
  std::int64_t capacity = 0;   // tokens that one sequence may have
  std::int64_t page_size = 0;  // a positive multiple of 16; 0: contiguous, one page per sequence
  std::int64_t num_pages = 0;  // pages for all sequences together; 0: enough for every sequence at capacity
  // Of each KV head. With them what attention reads is stored in kFloat8E4M3 (KVCacheView), without in `dtype`.
  std::vector<float> k_scale, v_scale;
};

/// Pages given out by number, each as often as it is shared.
class PagePool {
 public:
  explicit PagePool(std::int64_t num_pages = 0);

  std::int64_t available() const { return static_cast<std::int64_t>(free_.size()); }
  /// There must be one.
  std::int32_t take();
  void share(std::int32_t page) { ++uses_[static_cast<std::size_t>(page)]; }
  void give_back(std::int32_t page);
  bool shared(std::int32_t page) const { return uses_[static_cast<std::size_t>(page)] > 1; }

 private:
  std::vector<std::int32_t> free_;
  std::vector<int> uses_;
};

/// Every sequence starts empty. Before a step: reserve(); after it, or once in a while: check(). What is refused
/// changes nothing.
class KVCache {
 public:
  KVCache() = default;

  /// Invalid argument names the option.
  static Status create(const KVCacheOptions& options, KVCache& cache);

  /// What decode and prefill take. Valid as long as the cache lives and is not moved.
  KVCacheView view();

  /// Pages for sequences that will have up to these lengths, one entry per sequence.
  Status reserve(const std::vector<std::int64_t>& lengths);

  /// Out of capacity if a step since the last check found no room for a sequence; forgets it then.
  Status check();

  std::int64_t length(std::int64_t sequence) const { return seqlens_[static_cast<std::size_t>(sequence)]; }

  /// Forgets the tokens from `length` on, at most kRollback back from the longest the sequence has been.
  Status rollback(std::int64_t sequence, std::int64_t length);

  /// The empty sequence `child` continues `parent` at `length`, at most kRollback below the parent's longest. Full
  /// pages before it are shared, the rest is copied.
  Status fork(std::int64_t parent, std::int64_t child, std::int64_t length);

  /// The sequence is empty again, its pages free unless shared.
  void release(std::int64_t sequence);

  const KVCacheOptions& options() const { return options_; }

 private:
  /// Pages of one kind (tokens, or compressed tokens) and who has which.
  struct Pages {
    std::int64_t page_size = 0, num_pages = 0, max_pages = 0;
    std::vector<std::byte> keys, values;
    std::vector<std::int32_t> table;  // (B, max_pages), -1: none
    PagePool pool;

    std::int32_t& page(std::int64_t sequence, std::int64_t p) {
      return table[static_cast<std::size_t>(sequence * max_pages + p)];
    }
    std::int64_t pages_for(std::int64_t tokens) const { return (tokens + page_size - 1) / page_size; }
  };

  Pages make_pages(std::int64_t capacity, std::int64_t page_size, std::int64_t num_pages) const;
  std::int64_t missing(Pages& pages, std::int64_t sequence, std::int64_t tokens);
  void extend(Pages& pages, std::int64_t sequence, std::int64_t tokens);
  /// Shared pages that the sequence will write to when it goes on at `tokens`: how many; gives it copies.
  std::int64_t shared_from(Pages& pages, std::int64_t sequence, std::int64_t tokens);
  void unshare(Pages& pages, std::int64_t sequence, std::int64_t tokens);
  void share_full(Pages& pages, std::int64_t parent, std::int64_t child, std::int64_t tokens);
  void release(Pages& pages, std::int64_t sequence);
  Status check_going_back(const char* what, std::int64_t sequence, std::int64_t length);

  KVCacheOptions options_;
  Pages tokens_, compressed_;
  std::vector<std::byte> k_swa_, v_swa_, k_cmp_, v_cmp_;  // rings
  std::vector<std::int32_t> seqlens_;
  std::vector<std::int64_t> longest_;  // since the sequence was empty
  std::int32_t overflow_ = 0;
};

}  // namespace nsa
