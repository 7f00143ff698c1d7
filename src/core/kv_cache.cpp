#include "nsa/kv_cache.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <initializer_list>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace nsa {
namespace {

std::int64_t round_up(std::int64_t n, std::int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/// Bytes of a tensor. Throws std::length_error when they cannot be counted.
std::size_t bytes_of(std::initializer_list<std::int64_t> shape, DType dtype) {
  auto bytes = static_cast<std::int64_t>(size_of(dtype));
  for (const std::int64_t n : shape)
    if (__builtin_mul_overflow(bytes, n, &bytes)) throw std::length_error("its size exceeds 2^63 bytes");
  return static_cast<std::size_t>(bytes);
}

/// The type of what attention reads.
DType stored_type(const KVCacheOptions& options) {
  return options.k_scale.empty() ? options.dtype : DType::kFloat8E4M3;
}

Status check_scales(const KVCacheOptions& options) {
  for (const auto& [name, scales] : {std::pair{"k_scale", &options.k_scale}, {"v_scale", &options.v_scale}}) {
    if (options.k_scale.empty() && options.v_scale.empty()) return {};
    if (static_cast<std::int64_t>(scales->size()) != options.num_kv_heads)
      return Status::invalid_argument(std::string(name) + ": " + std::to_string(scales->size()) +
                                      " numbers: must be one for each of " + std::to_string(options.num_kv_heads) +
                                      " KV heads");
    for (const float scale : *scales)
      if (!std::isfinite(scale) || scale <= 0)
        return Status::invalid_argument(std::string(name) + ": " + std::to_string(scale) +
                                        ": must be positive and finite");
  }
  return {};
}

Status check_options(const KVCacheOptions& options) {
  const auto fail = [](const char* name, std::int64_t value, const char* rule) {
    return Status::invalid_argument(std::string(name) + " = " + std::to_string(value) + ": must be " + rule);
  };
  if (Status s = options.cfg.validate(); !s.ok()) return s;
  for (const auto& [name, value] : {std::pair{"batch", options.batch},
                                    {"num_kv_heads", options.num_kv_heads},
                                    {"key_dim", options.key_dim},
                                    {"value_dim", options.value_dim}}) {
    if (value < 1) return fail(name, value, ">= 1");
    if (value > INT32_MAX) return fail(name, value, "below 2^31");
  }
  if (options.dtype == DType::kInt32) return Status::invalid_argument("dtype = int32: must be a floating-point type");
  if (options.dtype == DType::kFloat8E4M3)
    return Status::invalid_argument("dtype = float8_e4m3fn: must be the type of q; k_scale and v_scale store e4m3");
  if (Status s = check_scales(options); !s.ok()) return s;
  if (options.capacity < 1 || options.capacity > INT32_MAX)
    return fail("capacity", options.capacity, ">= 1 and below 2^31");
  if (options.page_size < 0 || options.page_size % 16 != 0)
    return fail("page_size", options.page_size, "a positive multiple of 16, or 0: contiguous");
  if (options.page_size > INT32_MAX) return fail("page_size", options.page_size, "below 2^31");
  if (options.num_pages < 0) return fail("num_pages", options.num_pages, ">= 0");
  if (options.num_pages > INT32_MAX) return fail("num_pages", options.num_pages, "below 2^31");
  if (options.num_prefixes < 0 || options.num_prefixes > INT32_MAX)
    return fail("num_prefixes", options.num_prefixes, ">= 0 and below 2^31");
  if (options.num_prefixes > 0 && options.page_size == 0)
    return fail("num_prefixes", options.num_prefixes, "0 without page_size");
  return {};
}

}  // namespace

PageAllocator::PageAllocator(std::int64_t batch, const NSAConfig& cfg, PoolSizes tokens, PoolSizes compressed,
                             std::int64_t num_prefixes)
    : batch_(batch), cfg_(cfg), free_slots_(static_cast<std::size_t>(num_prefixes)) {
  const auto make = [&](const char* name, const PoolSizes& sizes) {
    Pool pool{name, sizes.page_size, sizes.max_pages, tables_.size(), {}, {}};
    pool.free.resize(static_cast<std::size_t>(sizes.num_pages));
    std::iota(pool.free.rbegin(), pool.free.rend(), 0);  // page 0 first
    pool.uses.assign(pool.free.size(), 0);
    tables_.resize(tables_.size() + static_cast<std::size_t>(batch * sizes.max_pages), -1);
    return pool;
  };
  tokens_ = make("tokens", tokens), compressed_ = make("compressed tokens", compressed);
  std::iota(free_slots_.rbegin(), free_slots_.rend(), 0);
}

std::int32_t PageAllocator::Pool::take() {
  const std::int32_t page = free.back();
  free.pop_back();
  uses[static_cast<std::size_t>(page)] = 1;
  return page;
}

void PageAllocator::Pool::give_back(std::int32_t page) {
  if (--uses[static_cast<std::size_t>(page)] == 0) free.push_back(page);
}

std::int64_t PageAllocator::held(const Pool& pool, std::int64_t sequence) {
  const std::int32_t* pages = row(pool, sequence);
  return std::find(pages, pages + pool.max_pages, -1) - pages;
}

/// The change is made to a copy, which replaces this one if it was done.
template <class Change>
Status PageAllocator::all_or_nothing(Change change) {
  PageAllocator changed = *this;
  if (Status s = change(changed); !s.ok()) return s;
  *this = std::move(changed);
  return {};
}

/// Prefixes give way until there are as many free pages as `need()`, which may become less by that.
template <class Need>
Status PageAllocator::make_room(Pool& pool, std::int64_t sequence, Need need) {
  while (need() > static_cast<std::int64_t>(pool.free.size()))
    if (!evict(pool))
      return Status::out_of_capacity("KVCache: sequence " + std::to_string(sequence) + " needs " +
                                     std::to_string(need()) + " more pages of " + pool.name + ", " +
                                     std::to_string(pool.free.size()) + " are free");
  return {};
}

/// Drops the least recently used prefix that alone has a page of the pool; if none does, the least recently used one.
bool PageAllocator::evict(const Pool& pool) {
  if (kept_.empty()) return false;
  const auto gives = [&](const Kept& kept) {
    return std::ranges::any_of(pages_of(kept, pool),
                               [&](std::int32_t page) { return pool.uses[static_cast<std::size_t>(page)] == 1; });
  };
  const auto found = std::ranges::find_if(kept_, gives);
  drop(found == kept_.end() ? 0 : static_cast<std::size_t>(found - kept_.begin()));
  return true;
}

void PageAllocator::drop(std::size_t kept) {
  for (const std::int32_t page : kept_[kept].pages) tokens_.give_back(page);
  for (const std::int32_t page : kept_[kept].pages_c) compressed_.give_back(page);
  free_slots_.push_back(kept_[kept].slot);
  kept_.erase(kept_.begin() + static_cast<std::ptrdiff_t>(kept));
}

Status PageAllocator::extend(Pool& pool, std::int64_t sequence, std::int64_t tokens) {
  std::int64_t p = held(pool, sequence);
  const std::int64_t end = pool.pages_for(tokens);
  if (end > pool.max_pages)
    return Status::out_of_capacity("KVCache: sequence " + std::to_string(sequence) + " needs " + std::to_string(end) +
                                   " pages of " + pool.name + ", its table has " + std::to_string(pool.max_pages));
  if (Status s = make_room(pool, sequence, [&] { return end - p; }); !s.ok()) return s;
  for (; p < end; ++p) row(pool, sequence)[p] = pool.take();
  return {};
}

Status PageAllocator::reserve(std::span<const std::int64_t> lengths) {
  bool enough = true;
  for (std::int64_t b = 0; b < batch_; ++b) {
    const std::int64_t length = lengths[static_cast<std::size_t>(b)];
    enough = enough && held(tokens_, b) >= tokens_.pages_for(length) &&
             held(compressed_, b) >= compressed_.pages_for(cfg_.num_compressed(length));
  }
  if (enough) return {};
  return all_or_nothing([&](PageAllocator& tried) -> Status {
    for (std::int64_t b = 0; b < batch_; ++b) {
      const std::int64_t length = lengths[static_cast<std::size_t>(b)];
      if (Status s = tried.extend(tried.tokens_, b, length); !s.ok()) return s;
      if (Status s = tried.extend(tried.compressed_, b, cfg_.num_compressed(length)); !s.ok()) return s;
    }
    return {};
  });
}

Status PageAllocator::own(Pool& pool, std::int64_t sequence, std::int64_t tokens,
                          std::vector<PageCopies::Copy>& copies) {
  const std::span<std::int32_t> pages(row(pool, sequence), static_cast<std::size_t>(held(pool, sequence)));
  const auto written = pages.subspan(std::min(pages.size(), static_cast<std::size_t>(tokens / pool.page_size)));
  const auto shared = [&](std::int32_t page) { return pool.uses[static_cast<std::size_t>(page)] > 1; };
  if (Status s = make_room(pool, sequence, [&] { return std::ranges::count_if(written, shared); }); !s.ok()) return s;
  for (std::int32_t& page : written) {
    if (!shared(page)) continue;
    copies.push_back({page, pool.take()});
    pool.give_back(page);
    page = copies.back().to;
  }
  return {};
}

Status PageAllocator::rollback(std::int64_t sequence, std::int64_t length, PageCopies& copies) {
  copies = {};
  return all_or_nothing([&](PageAllocator& tried) -> Status {
    if (Status s = tried.own(tried.tokens_, sequence, length, copies.tokens); !s.ok()) return s;
    return tried.own(tried.compressed_, sequence, cfg_.num_compressed(length), copies.compressed);
  });
}

void PageAllocator::share(Pool& pool, std::int64_t sequence, std::span<const std::int32_t> pages) {
  for (const std::int32_t page : pages) ++pool.uses[static_cast<std::size_t>(page)];
  std::ranges::copy(pages, row(pool, sequence));
}

Status PageAllocator::fork(std::int64_t parent, std::int64_t child, std::int64_t length) {
  return all_or_nothing([&](PageAllocator& tried) -> Status {
    tried.release(child);
    const auto go_on = [&](Pool& pool, std::int64_t tokens) -> Status {
      const auto full = static_cast<std::size_t>(std::min(tokens / pool.page_size, tried.held(pool, parent)));
      tried.share(pool, child, {tried.row(pool, parent), full});
      return tried.extend(pool, child, tokens);
    };
    if (Status s = go_on(tried.tokens_, length); !s.ok()) return s;
    return go_on(tried.compressed_, cfg_.num_compressed(length));
  });
}

void PageAllocator::release(Pool& pool, std::int64_t sequence) {
  const std::span<std::int32_t> pages(row(pool, sequence), static_cast<std::size_t>(held(pool, sequence)));
  for (std::int32_t& page : pages) {
    pool.give_back(page);
    page = -1;
  }
}

void PageAllocator::release(std::int64_t sequence) {
  release(tokens_, sequence);
  release(compressed_, sequence);
}

/// Of the tokens up to the end of each full page.
std::vector<std::uint64_t> PageAllocator::hashes_of(std::span<const std::int32_t> tokens) const {
  std::vector<std::uint64_t> hashes;
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  const auto page_size = static_cast<std::size_t>(tokens_.page_size);
  for (std::size_t i = 0; i < tokens.size() / page_size * page_size; ++i) {
    hash = (hash ^ static_cast<std::uint32_t>(tokens[i])) * 0x100000001b3;
    if ((i + 1) % page_size == 0) hashes.push_back(hash);
  }
  return hashes;
}

PageAllocator::Prefix PageAllocator::keep_prefix(std::int64_t sequence, std::span<const std::int32_t> tokens,
                                                 PageCopies& copies) {
  copies = {};
  const std::vector<std::uint64_t> hashes = hashes_of(tokens);
  const auto count = static_cast<std::int64_t>(hashes.size());
  const std::int64_t length = count * tokens_.page_size, blocks = cfg_.num_compressed(length);
  if (count == 0 || held(tokens_, sequence) < count || held(compressed_, sequence) < compressed_.pages_for(blocks))
    return {};
  const auto prefix = tokens.first(static_cast<std::size_t>(length));
  const auto known = std::ranges::find_if(
      kept_, [&](const Kept& kept) { return kept.hash == hashes.back() && std::ranges::equal(*kept.tokens, prefix); });
  if (known != kept_.end()) {
    std::rotate(known, known + 1, kept_.end());
    return {length, kept_.back().slot};
  }
  if (free_slots_.empty() && kept_.empty()) return {};  // no prefixes at all
  const Status status = all_or_nothing([&](PageAllocator& tried) -> Status {
    if (tried.free_slots_.empty()) tried.drop(0);
    const std::int32_t *pages = tried.row(tried.tokens_, sequence), *pages_c = tried.row(tried.compressed_, sequence);
    const std::int64_t full = blocks / compressed_.page_size, part = compressed_.pages_for(blocks) - full;
    if (Status s = tried.make_room(tried.compressed_, sequence, [&] { return part; }); !s.ok()) return s;
    Kept kept{std::make_shared<const std::vector<std::int32_t>>(prefix.begin(), prefix.end()),
              hashes.back(),
              tried.free_slots_.back(),
              {pages, pages + count},
              {pages_c, pages_c + full}};
    tried.free_slots_.pop_back();
    for (const std::int32_t page : kept.pages) ++tried.tokens_.uses[static_cast<std::size_t>(page)];
    for (const std::int32_t page : kept.pages_c) ++tried.compressed_.uses[static_cast<std::size_t>(page)];
    if (part > 0) {  // the sequence goes on writing to this one
      kept.pages_c.push_back(tried.compressed_.take());
      copies.compressed.push_back({pages_c[full], kept.pages_c.back()});
    }
    tried.kept_.push_back(std::move(kept));
    return {};
  });
  return status.ok() ? Prefix{length, kept_.back().slot, true} : Prefix{};
}

PageAllocator::Prefix PageAllocator::match_prefix(std::int64_t sequence, std::span<const std::int32_t> tokens,
                                                  PageCopies& copies) {
  copies = {};
  if (tokens.empty()) return {};
  const std::vector<std::uint64_t> hashes = hashes_of(tokens.first(tokens.size() - 1));
  auto found = kept_.end();
  for (auto kept = kept_.begin(); kept != kept_.end(); ++kept) {
    const std::size_t count = kept->pages.size();
    if (count > hashes.size() || kept->hash != hashes[count - 1] ||
        !std::ranges::equal(*kept->tokens, tokens.first(kept->tokens->size())))
      continue;
    if (found == kept_.end() || count > found->pages.size()) found = kept;
  }
  if (found == kept_.end()) return {};
  std::rotate(found, found + 1, kept_.end());
  const Kept kept = kept_.back();
  const auto length = static_cast<std::int64_t>(kept.tokens->size());
  const std::int64_t blocks = cfg_.num_compressed(length);
  const Status status = all_or_nothing([&](PageAllocator& tried) -> Status {
    tried.release(sequence);
    tried.share(tried.tokens_, sequence, kept.pages);
    // Its last page in part is the sequence's too until it is copied, so that it does not give way itself.
    tried.share(tried.compressed_, sequence, kept.pages_c);
    return tried.own(tried.compressed_, sequence, blocks, copies.compressed);
  });
  return status.ok() ? Prefix{length, kept.slot} : Prefix{};
}

KVCache::Store KVCache::make_store(std::int64_t capacity, std::int64_t num_pages) const {
  Store store;
  const auto pages_for = [&](std::int64_t tokens) { return (tokens + store.page_size - 1) / store.page_size; };
  store.page_size = options_.page_size > 0 ? options_.page_size : round_up(std::max<std::int64_t>(capacity, 1), 16);
  store.max_pages = std::max<std::int64_t>(pages_for(capacity), 1);
  store.num_pages = num_pages > 0 ? num_pages : options_.batch * store.max_pages;
  if (store.num_pages > INT32_MAX) throw std::length_error("it has 2^31 pages or more");
  const auto bytes = [&](std::int64_t dim) {
    return bytes_of({store.num_pages, store.page_size, options_.num_kv_heads, dim}, stored_type(options_));
  };
  store.keys.resize(bytes(options_.key_dim));
  store.values.resize(bytes(options_.value_dim));
  return store;
}

Status KVCache::create(const KVCacheOptions& options, KVCache& cache) try {
  if (Status s = check_options(options); !s.ok()) return s;
  KVCache made;
  made.options_ = options;
  made.tokens_ = made.make_store(options.capacity, options.num_pages);
  // As many compressed tokens as the pages of raw ones can have, in the worst case a partly filled page for each
  // sequence and each kept prefix.
  const Store& tokens = made.tokens_;
  const std::int64_t most = options.cfg.num_compressed(options.capacity);
  const std::int64_t all = tokens.num_pages * tokens.page_size / options.cfg.kernel_stride;
  const std::int64_t rows = options.batch + options.num_prefixes;
  const std::int64_t per_sequence = (std::max<std::int64_t>(most, 1) + tokens.page_size - 1) / tokens.page_size;
  made.compressed_ =
      made.make_store(most, options.num_pages > 0      ? (all + tokens.page_size - 1) / tokens.page_size + rows
                            : options.num_prefixes > 0 ? options.batch * per_sequence + options.num_prefixes
                                                       : 0);
  const auto sizes = [](const Store& store) {
    return PageAllocator::PoolSizes{store.page_size, store.num_pages, store.max_pages};
  };
  made.allocator_ =
      PageAllocator(options.batch, options.cfg, sizes(made.tokens_), sizes(made.compressed_), options.num_prefixes);
  made.tables_.assign(made.allocator_.tables().begin(), made.allocator_.tables().end());
  const auto ring = [&](std::int64_t tokens, std::int64_t dim, DType dtype) {
    return std::vector<std::byte>(bytes_of({rows, tokens + kRollback, options.num_kv_heads, dim}, dtype));
  };
  made.k_swa_ = ring(options.cfg.window_size, options.key_dim, stored_type(options));
  made.v_swa_ = ring(options.cfg.window_size, options.value_dim, stored_type(options));
  made.k_cmp_ = ring(options.cfg.kernel_size, options.key_dim, options.dtype);
  made.v_cmp_ = ring(options.cfg.kernel_size, options.value_dim, options.dtype);
  made.seqlens_.assign(static_cast<std::size_t>(options.batch), 0);
  made.longest_.assign(static_cast<std::size_t>(rows), 0);
  cache = std::move(made);
  return {};
} catch (const std::exception& error) {
  return Status::internal(std::string("KVCache: no memory for it: ") + error.what());
}

KVCacheView KVCache::view() {
  const std::int64_t B = options_.batch, Hkv = options_.num_kv_heads, Dk = options_.key_dim, Dv = options_.value_dim;
  const auto pages_of = [&](Store& store, std::vector<std::byte>& data, std::int64_t dim) {
    return TensorView::contiguous(data.data(), stored_type(options_), {store.num_pages, store.page_size, Hkv, dim});
  };
  const auto ring_of = [&](std::vector<std::byte>& data, std::int64_t tokens, std::int64_t dim, DType dtype) {
    return TensorView::contiguous(data.data(), dtype, {B, tokens + kRollback, Hkv, dim});
  };
  KVCacheView view;
  view.k_slc = pages_of(tokens_, tokens_.keys, Dk);
  view.v_slc = pages_of(tokens_, tokens_.values, Dv);
  view.block_table = TensorView::contiguous(tables_.data(), DType::kInt32, {B, tokens_.max_pages});
  view.k_c = pages_of(compressed_, compressed_.keys, Dk);
  view.v_c = pages_of(compressed_, compressed_.values, Dv);
  view.block_table_c =
      TensorView::contiguous(tables_.data() + B * tokens_.max_pages, DType::kInt32, {B, compressed_.max_pages});
  view.k_swa_ring = ring_of(k_swa_, options_.cfg.window_size, Dk, stored_type(options_));
  view.v_swa_ring = ring_of(v_swa_, options_.cfg.window_size, Dv, stored_type(options_));
  view.k_cmp_ring = ring_of(k_cmp_, options_.cfg.kernel_size, Dk, options_.dtype);
  view.v_cmp_ring = ring_of(v_cmp_, options_.cfg.kernel_size, Dv, options_.dtype);
  if (!options_.k_scale.empty()) {
    view.k_scale = TensorView::contiguous(options_.k_scale.data(), DType::kFloat32, {Hkv});
    view.v_scale = TensorView::contiguous(options_.v_scale.data(), DType::kFloat32, {Hkv});
  }
  view.cache_seqlens = TensorView::contiguous(seqlens_.data(), DType::kInt32, {B});
  view.overflow = TensorView::contiguous(&overflow_, DType::kInt32, {1});
  return view;
}

void KVCache::upload() { std::ranges::copy(allocator_.tables(), tables_.begin()); }

Status KVCache::reserve(const std::vector<std::int64_t>& lengths) {
  if (static_cast<std::int64_t>(lengths.size()) != options_.batch)
    return Status::invalid_argument("reserve: " + std::to_string(lengths.size()) +
                                    " lengths: expected one for each of " + std::to_string(options_.batch) +
                                    " sequences");
  for (std::int64_t b = 0; b < options_.batch; ++b) {
    const std::int64_t length = lengths[static_cast<std::size_t>(b)];
    if (length > options_.capacity)
      return Status::out_of_capacity("reserve: sequence " + std::to_string(b) + ": " + std::to_string(length) +
                                     " tokens: the capacity is " + std::to_string(options_.capacity));
  }
  if (Status s = allocator_.reserve(lengths); !s.ok()) return s;
  upload();
  return {};
}

Status KVCache::check() {
  if (std::exchange(overflow_, 0) == 0) return {};
  return Status::out_of_capacity("a step found no room for a sequence: reserve() before each step");
}

Status KVCache::check_sequence(const char* what, std::int64_t sequence) const {
  if (sequence >= 0 && sequence < options_.batch) return {};
  return Status::invalid_argument(std::string(what) + ": sequence " + std::to_string(sequence) + ": there are " +
                                  std::to_string(options_.batch));
}

Status KVCache::check_going_back(const char* what, std::int64_t sequence, std::int64_t length) {
  if (Status s = check_sequence(what, sequence); !s.ok()) return s;
  const std::string name = std::string(what) + ": sequence " + std::to_string(sequence) + ": ";
  std::int64_t& longest = longest_[static_cast<std::size_t>(sequence)];
  longest = std::max(longest, this->length(sequence));
  if (length < 0 || length > this->length(sequence))
    return Status::invalid_argument(name + "length = " + std::to_string(length) + ": must be 0 ... its length, " +
                                    std::to_string(this->length(sequence)));
  if (longest - length > kRollback)
    return Status::invalid_argument(name + "length = " + std::to_string(length) + ": at most " +
                                    std::to_string(kRollback) + " below the longest it has been, " +
                                    std::to_string(longest));
  return {};
}

void KVCache::copy_pages(Store& store, const std::vector<PageCopies::Copy>& copies) {
  for (std::vector<std::byte>* data : {&store.keys, &store.values}) {
    const std::int64_t bytes = static_cast<std::int64_t>(data->size()) / store.num_pages;
    for (const auto [from, to] : copies) std::copy_n(data->begin() + from * bytes, bytes, data->begin() + to * bytes);
  }
}

void KVCache::copy_pages(const PageCopies& copies) {
  copy_pages(tokens_, copies.tokens);
  copy_pages(compressed_, copies.compressed);
}

/// Sequence b has place b, the prefix in slot s place B + s.
void KVCache::copy_rings(std::int64_t from, std::int64_t to) {
  const auto places = static_cast<std::int64_t>(longest_.size());
  for (std::vector<std::byte>* ring : {&k_swa_, &v_swa_, &k_cmp_, &v_cmp_}) {
    const std::int64_t bytes = static_cast<std::int64_t>(ring->size()) / places;
    std::copy_n(ring->begin() + from * bytes, bytes, ring->begin() + to * bytes);
  }
  longest_[static_cast<std::size_t>(to)] = longest_[static_cast<std::size_t>(from)];
}

Status KVCache::rollback(std::int64_t sequence, std::int64_t length) {
  if (Status s = check_going_back("rollback", sequence, length); !s.ok()) return s;
  PageCopies copies;
  if (Status s = allocator_.rollback(sequence, length, copies); !s.ok()) return s;
  copy_pages(copies);
  upload();
  seqlens_[static_cast<std::size_t>(sequence)] = static_cast<std::int32_t>(length);
  return {};
}

Status KVCache::fork(std::int64_t parent, std::int64_t child, std::int64_t length) {
  if (Status s = check_going_back("fork", parent, length); !s.ok()) return s;
  if (child < 0 || child >= options_.batch || child == parent || this->length(child) != 0)
    return Status::invalid_argument("fork: child = " + std::to_string(child) + ": must be an empty sequence");
  if (Status s = allocator_.fork(parent, child, length); !s.ok()) return s;
  upload();
  // Bytes are copied, so that every type goes through the backend that takes every type.
  const ForkParams params{.cache = view(), .cfg = options_.cfg, .parent = parent, .child = child, .length = length};
  if (Status s = nsa::fork(params, {.backend = Backend::kReference}); !s.ok()) return s;
  longest_[static_cast<std::size_t>(child)] = longest_[static_cast<std::size_t>(parent)];
  return {};
}

void KVCache::release(std::int64_t sequence) {
  allocator_.release(sequence);
  upload();
  seqlens_[static_cast<std::size_t>(sequence)] = 0;
  longest_[static_cast<std::size_t>(sequence)] = 0;
}

Status KVCache::keep_prefix(std::int64_t sequence, std::span<const std::int32_t> tokens, std::int64_t& kept) {
  kept = 0;
  if (Status s = check_sequence("keep_prefix", sequence); !s.ok()) return s;
  const auto count = static_cast<std::int64_t>(tokens.size());
  if (count > length(sequence))
    return Status::invalid_argument("keep_prefix: sequence " + std::to_string(sequence) + ": " + std::to_string(count) +
                                    " tokens: it has " + std::to_string(length(sequence)));
  std::int64_t& longest = longest_[static_cast<std::size_t>(sequence)];
  longest = std::max(longest, length(sequence));
  if (options_.page_size == 0 || longest - count / options_.page_size * options_.page_size > kRollback) return {};
  PageCopies copies;
  const PageAllocator::Prefix prefix = allocator_.keep_prefix(sequence, tokens, copies);
  if (prefix.fresh) {
    copy_pages(copies);
    copy_rings(sequence, options_.batch + prefix.slot);
  }
  kept = prefix.length;
  return {};
}

Status KVCache::match_prefix(std::int64_t sequence, std::span<const std::int32_t> tokens, std::int64_t& length) {
  length = 0;
  if (Status s = check_sequence("match_prefix", sequence); !s.ok()) return s;
  if (this->length(sequence) != 0)
    return Status::invalid_argument("match_prefix: sequence " + std::to_string(sequence) + ": must be empty");
  PageCopies copies;
  const PageAllocator::Prefix prefix = allocator_.match_prefix(sequence, tokens, copies);
  if (prefix.length == 0) return {};
  copy_pages(copies);
  copy_rings(options_.batch + prefix.slot, sequence);
  upload();
  seqlens_[static_cast<std::size_t>(sequence)] = static_cast<std::int32_t>(prefix.length);
  length = prefix.length;
  return {};
}

}  // namespace nsa
