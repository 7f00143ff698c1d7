// Which sequence has which pages, and a cache that owns its memory beside it. Host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
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
  std::int64_t num_prefixes = 0;  // prefixes to keep at a time, each with rings of its own; goes with page_size
};

/// Pages whose contents belong into other ones, before anybody writes to these.
struct PageCopies {
  struct Copy {
    std::int32_t from, to;
  };
  std::vector<Copy> tokens, compressed;
};

/// Which pages each sequence has, and which the kept prefixes. It knows numbers alone: whoever has the memory copies
/// pages and rings, and uploads tables(). A page that several have is full, and nobody writes to it. When pages are
/// short, kept prefixes give way, the least recently used first. What is refused changes nothing.
class PageAllocator {
 public:
  struct PoolSizes {
    std::int64_t page_size = 16, num_pages = 0, max_pages = 0;  // max_pages: of a sequence
  };
  /// A prefix that is kept: `length` tokens, 0: none. Its rings are in place `slot` of those for prefixes.
  struct Prefix {
    std::int64_t length = 0, slot = -1;
    bool fresh = false;  // kept now: the rings belong into the slot
  };

  PageAllocator() = default;
  PageAllocator(std::int64_t batch, const NSAConfig& cfg, PoolSizes tokens, PoolSizes compressed,
                std::int64_t num_prefixes = 0);

  /// Pages for sequences that will have up to these lengths, one entry per sequence.
  Status reserve(std::span<const std::int64_t> lengths);
  /// The sequence goes on at `length`: pages that it would write to and shares are replaced by copies.
  Status rollback(std::int64_t sequence, std::int64_t length, PageCopies& copies);
  /// The child gets the parent's full pages before `length`, and pages of its own for the rest.
  Status fork(std::int64_t parent, std::int64_t child, std::int64_t length);
  void release(std::int64_t sequence);

  /// Keeps the full pages of the sequence's first tokens, whose ids these are, beyond its release. Nothing is kept
  /// where a page or a slot is missing.
  Prefix keep_prefix(std::int64_t sequence, std::span<const std::int32_t> tokens, PageCopies& copies);
  /// The sequence begins with the longest kept prefix of these tokens that leaves one over; nothing if there is none.
  Prefix match_prefix(std::int64_t sequence, std::span<const std::int32_t> tokens, PageCopies& copies);

  /// int32 (B, max_pages) of tokens, behind it (B, max_pages) of compressed tokens; -1: none. One copy uploads both.
  std::span<const std::int32_t> tables() const { return tables_; }

 private:
  struct Pool {
    const char* name = "";
    std::int64_t page_size = 16, max_pages = 0;
    std::size_t table = 0;  // where its table begins
    std::vector<std::int32_t> free;
    std::vector<std::int32_t> uses;  // of each page, by sequences and by kept prefixes

    std::int64_t pages_for(std::int64_t tokens) const { return (tokens + page_size - 1) / page_size; }
    std::int32_t take();
    void give_back(std::int32_t page);
  };
  struct Kept {
    std::shared_ptr<const std::vector<std::int32_t>> tokens;
    std::uint64_t hash = 0;
    std::int64_t slot = -1;
    std::vector<std::int32_t> pages, pages_c;
  };

  std::int32_t* row(const Pool& pool, std::int64_t sequence) {
    return tables_.data() + pool.table + sequence * pool.max_pages;
  }
  std::int64_t held(const Pool& pool, std::int64_t sequence);
  const std::vector<std::int32_t>& pages_of(const Kept& kept, const Pool& pool) const {
    return &pool == &tokens_ ? kept.pages : kept.pages_c;
  }
  bool evict(const Pool& pool);
  void drop(std::size_t kept);
  template <class Need>
  Status make_room(Pool& pool, std::int64_t sequence, Need need);
  Status extend(Pool& pool, std::int64_t sequence, std::int64_t tokens);
  Status own(Pool& pool, std::int64_t sequence, std::int64_t tokens, std::vector<PageCopies::Copy>& copies);
  void share(Pool& pool, std::int64_t sequence, std::span<const std::int32_t> pages);
  void release(Pool& pool, std::int64_t sequence);
  template <class Change>
  Status all_or_nothing(Change change);
  std::vector<std::uint64_t> hashes_of(std::span<const std::int32_t> tokens) const;

  std::int64_t batch_ = 0;
  NSAConfig cfg_;
  Pool tokens_, compressed_;
  std::vector<std::int32_t> tables_;
  std::vector<Kept> kept_;  // the least recently used first
  std::vector<std::int64_t> free_slots_;
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

  /// Keeps the sequence's first tokens, whose ids these are, up to the last full page, beyond its release. `kept`: how
  /// many; 0 where that ends more than kRollback below the longest the sequence has been, or nothing is free for it.
  Status keep_prefix(std::int64_t sequence, std::span<const std::int32_t> tokens, std::int64_t& kept);

  /// The empty sequence begins with the longest kept prefix of these tokens that leaves at least one of them to
  /// compute. `length`: of that prefix, which the sequence then has; 0: none.
  Status match_prefix(std::int64_t sequence, std::span<const std::int32_t> tokens, std::int64_t& length);

  const KVCacheOptions& options() const { return options_; }

 private:
  struct Store {  // of tokens, or of compressed tokens
    std::int64_t page_size = 0, num_pages = 0, max_pages = 0;
    std::vector<std::byte> keys, values;
  };

  Store make_store(std::int64_t capacity, std::int64_t num_pages) const;
  static void copy_pages(Store& store, const std::vector<PageCopies::Copy>& copies);
  void copy_pages(const PageCopies& copies);
  void copy_rings(std::int64_t from, std::int64_t to);
  void upload();
  Status check_sequence(const char* what, std::int64_t sequence) const;
  Status check_going_back(const char* what, std::int64_t sequence, std::int64_t length);

  KVCacheOptions options_;
  PageAllocator allocator_;
  Store tokens_, compressed_;
  std::vector<std::int32_t> tables_;                      // as PageAllocator has them
  std::vector<std::byte> k_swa_, v_swa_, k_cmp_, v_cmp_;  // rings of the sequences, then of the kept prefixes
  std::vector<std::int32_t> seqlens_;
  std::vector<std::int64_t> longest_;  // since the sequence was empty; then of the kept prefixes
  std::int32_t overflow_ = 0;
};

}  // namespace nsa
