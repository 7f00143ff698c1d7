// Which pages the sequences and the cached prefixes of a cache have: numbers alone.
#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <utility>

#include "nsa/kv_cache.h"

namespace nsa {

PageAllocator::PageAllocator(std::int64_t batch, const NSAConfig& cfg, PoolSizes tokens, PoolSizes compressed,
                             std::int64_t num_prefixes)
    : batch_(batch), cfg_(cfg), free_slots_(static_cast<std::size_t>(num_prefixes)) {
  const auto make = [&](const char* name, const PoolSizes& sizes) {
    Pool pool{name, sizes.page_size, sizes.max_pages, tables_.size(), {}, {}, {}};
    pool.free.resize(static_cast<std::size_t>(sizes.num_pages));
    std::iota(pool.free.rbegin(), pool.free.rend(), 0);  // page 0 first
    pool.uses.assign(pool.free.size(), 0);
    pool.held.assign(static_cast<std::size_t>(batch), 0);
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
Status PageAllocator::evict_for(Pool& pool, std::int64_t sequence, Need need) {
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
  std::int64_t& p = pool.held[static_cast<std::size_t>(sequence)];
  const std::int64_t end = pool.pages_for(tokens);
  if (end > pool.max_pages)
    return Status::out_of_capacity("KVCache: sequence " + std::to_string(sequence) + " needs " + std::to_string(end) +
                                   " pages of " + pool.name + ", its table has " + std::to_string(pool.max_pages));
  if (Status s = evict_for(pool, sequence, [&] { return end - p; }); !s.ok()) return s;
  for (; p < end; ++p) row(pool, sequence)[p] = pool.take();
  return {};
}

Status PageAllocator::check(const char* what, std::int64_t sequence, std::int64_t length) const {
  if (has(sequence) && length >= 0) return {};
  const std::string name = std::string(what) + ": sequence " + std::to_string(sequence) + ": ";
  if (!has(sequence)) return Status::invalid_argument(name + "there are " + std::to_string(batch_));
  return Status::invalid_argument(name + std::to_string(length) + " tokens: must be >= 0");
}

bool PageAllocator::has_capacity(std::int64_t sequence, std::int64_t length) const {
  return has(sequence) && held(tokens_, sequence) >= tokens_.pages_for(length) &&
         held(compressed_, sequence) >= compressed_.pages_for(cfg_.num_compressed(length));
}

bool PageAllocator::has_capacity(std::span<const std::int64_t> lengths) const {
  if (std::ssize(lengths) != batch_) return false;
  for (std::int64_t b = 0; b < batch_; ++b)
    if (!has_capacity(b, lengths[static_cast<std::size_t>(b)])) return false;
  return true;
}

Status PageAllocator::reserve(std::span<const std::int64_t> lengths) {
  if (std::ssize(lengths) != batch_)
    return Status::invalid_argument("reserve: " + std::to_string(lengths.size()) +
                                    " lengths: expected one for each of " + std::to_string(batch_) + " sequences");
  for (std::int64_t b = 0; b < batch_; ++b)
    if (Status s = check("reserve", b, lengths[static_cast<std::size_t>(b)]); !s.ok()) return s;
  if (has_capacity(lengths)) return {};
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
  if (Status s = evict_for(pool, sequence, [&] { return std::ranges::count_if(written, shared); }); !s.ok()) return s;
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
  if (Status s = check("rollback", sequence, length); !s.ok()) return s;
  return all_or_nothing([&](PageAllocator& tried) -> Status {
    if (Status s = tried.own(tried.tokens_, sequence, length, copies.tokens); !s.ok()) return s;
    return tried.own(tried.compressed_, sequence, cfg_.num_compressed(length), copies.compressed);
  });
}

void PageAllocator::share(Pool& pool, std::int64_t sequence, std::span<const std::int32_t> pages) {
  for (const std::int32_t page : pages) ++pool.uses[static_cast<std::size_t>(page)];
  std::ranges::copy(pages, row(pool, sequence));
  pool.held[static_cast<std::size_t>(sequence)] = std::ssize(pages);
}

Status PageAllocator::fork(std::int64_t parent, std::int64_t child, std::int64_t length) {
  if (Status s = check("fork", parent, length); !s.ok()) return s;
  if (!has(child) || child == parent)
    return Status::invalid_argument("fork: child = " + std::to_string(child) + ": must be another of " +
                                    std::to_string(batch_) + " sequences");
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
  pool.held[static_cast<std::size_t>(sequence)] = 0;
}

void PageAllocator::release(std::int64_t sequence) {
  if (!has(sequence)) return;
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
  if (!has(sequence)) return {};
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
    if (Status s = tried.evict_for(tried.compressed_, sequence, [&] { return part; }); !s.ok()) return s;
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
  if (tokens.empty() || !has(sequence)) return {};
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

}  // namespace nsa
