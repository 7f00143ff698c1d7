// A KV cache that owns its memory, on the host or on a device, and the page allocator that it uses.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "nsa/decode.h"

namespace nsa {

/// Allocates a cache's memory: on its device, aligned to 256 bytes, in the order of `stream` (KVCacheOptions).
struct KVCacheAllocator {
  std::function<void*(std::size_t bytes, void* stream)> allocate;  // null: there is none
  std::function<void(void* data, std::size_t bytes, void* stream)> release;
};

struct KVCacheOptions {
  std::int64_t batch = 1;  // sequences
  std::int64_t num_kv_heads = 1;
  std::int64_t key_dim = 128, value_dim = 128;
  DType dtype = DType::kBFloat16;
  NSAConfig cfg;
  std::int64_t capacity = 0;   // tokens that one sequence may have
  std::int64_t page_size = 0;  // a positive multiple of 16; 0: contiguous, one page per sequence
  std::int64_t num_pages = 0;  // pages for all sequences together; 0: enough for every sequence at capacity
  // One scale per KV head. If given, what attention reads is stored in kFloat8E4M3 (KVCacheView), else in `dtype`.
  std::vector<float> k_scale, v_scale;
  std::int64_t num_prefixes = 0;  // prefixes cached at a time, each with its own rings; needs page_size
  Device device;
  void* stream = nullptr;      // cudaStream_t of `device`, on which the steps run, too
  KVCacheAllocator allocator;  // both functions, or none: C++ memory, or cudaMallocAsync
};

/// Pages to copy into other ones, before these are written.
struct PageCopies {
  struct Copy {
    std::int32_t from, to;
  };
  std::vector<Copy> tokens, compressed;
};

/// The pages of each sequence and of the cached prefixes. Tracks page numbers only. The owner of the memory copies
/// pages and rings, and uploads tables(). A shared page is full and never written. When pages run out, cached prefixes
/// are evicted, the least recently used first. A refused call changes nothing.
class PageAllocator {
 public:
  struct PoolSizes {
    std::int64_t page_size = 16, num_pages = 0, max_pages = 0;  // max_pages: of a sequence
  };
  /// A cached prefix: `length` tokens, 0: none. Its rings are in `slot` of those for prefixes.
  struct Prefix {
    std::int64_t length = 0, slot = -1;
    bool fresh = false;  // cached by this call: copy the rings into the slot
  };

  PageAllocator() = default;
  PageAllocator(std::int64_t batch, const NSAConfig& cfg, PoolSizes tokens, PoolSizes compressed,
                std::int64_t num_prefixes = 0);

  /// Reserves pages for sequences of up to these lengths, one entry per sequence.
  Status reserve(std::span<const std::int64_t> lengths);
  /// Whether there is such a sequence and it has the pages for this length.
  bool has_capacity(std::int64_t sequence, std::int64_t length) const;
  /// Whether every sequence has, so that reserve() has nothing to do.
  bool has_capacity(std::span<const std::int64_t> lengths) const;
  /// The sequence continues at `length`: shared pages that it would write to are replaced by copies.
  Status rollback(std::int64_t sequence, std::int64_t length, PageCopies& copies);
  /// The child gets the parent's full pages before `length`, and new pages for the rest.
  Status fork(std::int64_t parent, std::int64_t child, std::int64_t length);
  void release(std::int64_t sequence);

  /// Keeps the full pages of the sequence's first tokens, whose ids these are, beyond its release. Nothing is cached
  /// where a page or a slot is missing.
  Prefix keep_prefix(std::int64_t sequence, std::span<const std::int32_t> tokens, PageCopies& copies);
  /// The sequence begins with the longest cached prefix of these tokens that leaves one over; nothing if there is none.
  Prefix match_prefix(std::int64_t sequence, std::span<const std::int32_t> tokens, PageCopies& copies);

  /// int32 (B, max_pages) of tokens, behind it (B, max_pages) of compressed tokens; -1: none. One copy uploads both.
  std::span<const std::int32_t> tables() const { return tables_; }

 private:
  struct Pool {
    const char* name = "";
    std::int64_t page_size = 16, max_pages = 0;
    std::size_t table = 0;  // where its table begins
    std::vector<std::int32_t> free;
    std::vector<std::int32_t> uses;  // of each page, by sequences and by cached prefixes
    std::vector<std::int64_t> held;  // pages of each sequence

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
  static std::int64_t held(const Pool& pool, std::int64_t sequence) {
    return pool.held[static_cast<std::size_t>(sequence)];
  }
  const std::vector<std::int32_t>& pages_of(const Kept& kept, const Pool& pool) const {
    return &pool == &tokens_ ? kept.pages : kept.pages_c;
  }
  bool evict(const Pool& pool);
  void drop(std::size_t kept);
  template <class Need>
  Status evict_for(Pool& pool, std::int64_t sequence, Need need);
  Status extend(Pool& pool, std::int64_t sequence, std::int64_t tokens);
  Status own(Pool& pool, std::int64_t sequence, std::int64_t tokens, std::vector<PageCopies::Copy>& copies);
  void share(Pool& pool, std::int64_t sequence, std::span<const std::int32_t> pages);
  void release(Pool& pool, std::int64_t sequence);
  template <class Change>
  Status all_or_nothing(Change change);
  std::vector<std::uint64_t> hashes_of(std::span<const std::int32_t> tokens) const;
  bool has(std::int64_t sequence) const { return sequence >= 0 && sequence < batch_; }
  Status check(const char* what, std::int64_t sequence, std::int64_t length) const;

  std::int64_t batch_ = 0;
  NSAConfig cfg_;
  Pool tokens_, compressed_;
  std::vector<std::int32_t> tables_;
  std::vector<Kept> kept_;  // the least recently used first
  std::vector<std::int64_t> free_slots_;
};

class CacheMemory;

/// Every sequence starts empty. Call reserve() before a step, and check() after it or once in a while. A refused call
/// changes nothing.
///
/// On a device all calls use the stream of the options, as the steps should, and return at once. Changed page numbers
/// are one copy from pinned memory. Pages, rings and a sequence's length are one kernel. Only check() waits for the
/// stream, and the destructor for its uploads. Steps may be captured in a CUDA graph, and replays see what changed
/// between them. The cache's own calls may not: those that return a Status refuse capture. Steps advance the lengths on
/// the device; the host does not read them and counts what appended() got.
class KVCache {
 public:
  KVCache() = default;

  /// Invalid argument: the message names the option. Unsupported: why its device has no kernels for such a cache.
  /// Internal: out of memory.
  static Status create(const KVCacheOptions& options, KVCache& cache);

  /// The view for decode and prefill. Valid until the cache is moved or destroyed.
  KVCacheView view();

  /// Reserves pages for sequences of up to these lengths, one entry per sequence. Out of capacity: the message names a
  /// sequence, the pages that it needs and those that are free.
  Status reserve(const std::vector<std::int64_t>& lengths);

  /// Counts a launched step that appends so many tokens to each sequence, one entry per sequence. Out of capacity if a
  /// sequence has no pages for them. In host memory the step itself changes length(), and this does nothing.
  Status appended(const std::vector<std::int64_t>& num_new);

  /// Out of capacity if a step since the last check exceeded that of a sequence; forgets it then. On a device it waits
  /// for the stream, and length() is then what the device has.
  Status check();

  /// 0 for a sequence that the cache does not have.
  std::int64_t length(std::int64_t sequence) const;

  /// Discards the tokens from `length` on, at most kRollback below the longest the sequence has been.
  Status rollback(std::int64_t sequence, std::int64_t length);

  /// The empty sequence `child` continues `parent` at `length`, at most kRollback below the parent's longest. Full
  /// pages before it are shared, the rest is copied. On a device that has fewer tokens than the host was told the next
  /// check() finds no capacity for the child.
  Status fork(std::int64_t parent, std::int64_t child, std::int64_t length);

  /// Empties the sequence and frees its pages unless shared. The next call reports an error of it.
  void release(std::int64_t sequence);

  /// Keeps the sequence's first tokens, whose ids these are, up to the last full page, beyond its release. `kept`: how
  /// many; 0 where that ends more than kRollback below the longest the sequence has been, or nothing is free for it.
  Status keep_prefix(std::int64_t sequence, std::span<const std::int32_t> tokens, std::int64_t& kept);

  /// The empty sequence begins with the longest cached prefix of these tokens that leaves at least one of them to
  /// compute. `length`: of that prefix, which the sequence then has; 0: none.
  Status match_prefix(std::int64_t sequence, std::span<const std::int32_t> tokens, std::int64_t& length);

  const KVCacheOptions& options() const { return options_; }

 private:
  /// A copy has memory of its own; std::bad_alloc where there is none.
  class Memory {
   public:
    Memory();
    explicit Memory(std::unique_ptr<CacheMemory> memory);
    Memory(const Memory& other);
    Memory(Memory&&) noexcept;
    Memory& operator=(Memory other) noexcept;
    ~Memory();
    CacheMemory* operator->() const { return memory_.get(); }
    explicit operator bool() const { return memory_ != nullptr; }

   private:
    std::unique_ptr<CacheMemory> memory_;
  };
  /// A part of the memory: rows, of all KV heads, in pages or in rings.
  struct Rows {
    std::size_t part = 0;
    std::int64_t count = 0, tokens = 0, dim = 0;  // pages or rings, tokens in each, channels
    DType dtype = DType::kFloat32;
  };
  struct RingCopy {
    std::int64_t from = 0, to = 0;
  };

  Status make();
  Status add(Rows& rows, std::int64_t count, std::int64_t tokens, std::int64_t dim, DType dtype);
  TensorView rows_of(const Rows& rows, std::int64_t count) const;
  std::int32_t* numbers(std::int64_t at) const;  // of state_
  bool on_device() const { return options_.device.type == DeviceType::kCUDA; }
  Status upload();
  Status change(const PageCopies& copies, const RingCopy& rings, std::int64_t sequence = -1, std::int64_t length = 0);
  Status changeable();
  Status check_made(const char* what) const;
  Status check_counts(const char* what, const char* name, const std::vector<std::int64_t>& counts) const;
  Status check_sequence(const char* what, std::int64_t sequence) const;
  Status check_going_back(const char* what, std::int64_t sequence, std::int64_t length);

  KVCacheOptions options_;
  PageAllocator allocator_;
  Memory memory_;
  std::array<Rows, 2> tokens_, compressed_, window_, raw_;  // keys and values; rings: of the prefixes behind the others
  std::int64_t max_pages_ = 0, max_pages_c_ = 0;
  std::size_t parts_ = 0, state_ = 0;   // how many; the one with tables, lengths, overflow and scales
  std::vector<std::int32_t> uploaded_;  // the tables there
  std::vector<std::int64_t> lengths_;   // on a device: what the host was told
  std::vector<std::int64_t> longest_;   // since the sequence was empty; then of the cached prefixes
  Status failed_;                       // of a release
};

}  // namespace nsa
