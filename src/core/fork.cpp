// A fork copies what two sequences cannot share: bytes, whatever the type.
#include <algorithm>
#include <string>
#include <unordered_set>

#include "core/backend.h"
#include "core/cache_step.h"
#include "core/validation/check.h"

namespace nsa {
namespace {

/// Pages that the child does not share must be there, and no others'; a shared page must be full, as the child will
/// write behind it. `all` is what the parent has.
Status check_pages(const ForkParams& params, const PagesNeeded& needed, const PagesNeeded& all) {
  const auto entry = [&](std::int64_t row, std::int64_t p) {
    return p < needed.table.size(1) ? table_entry(needed.table, row, p) : -1;
  };
  std::unordered_set<std::int64_t> named;  // the parent's pages and those before p of the child
  for (std::int64_t p = all.first_page(); p < all.end_page(); ++p) named.insert(entry(params.parent, p));
  for (std::int64_t p = needed.first_page(); p < needed.end_page(); ++p) {
    const std::int64_t page = entry(params.child, p);
    const auto where = [&] {
      return std::string("cache.") + needed.table_name + "[" + std::to_string(params.child) + ", " + std::to_string(p) +
             "]: ";
    };
    if (page < 0) return Status::out_of_capacity(where() + "no page for the child's tokens");
    if (entry(params.parent, p) < 0) return Status::invalid_argument(where() + "the parent has no such page");
    if (page == entry(params.parent, p)) {
      if ((p + 1) * needed.page_size > needed.end)
        return Status::invalid_argument(where() + "shared with the parent, but not full at the shared length");
    } else if (!named.insert(page).second) {
      return Status::invalid_argument(where() + "page " + std::to_string(page) + " is copied to, but named twice");
    }
  }
  return {};
}

}  // namespace

Status fork_in_host_memory(const ForkParams& params) {
  const KVCacheView& cache = params.cache;
  const NSAConfig& cfg = params.cfg;
  const std::int64_t length = params.length;
  const std::int64_t parent_length = int32_at(cache.cache_seqlens, params.parent);
  const auto needed = pages_needed(cache, cfg, length, length), all = pages_needed(cache, cfg, length, parent_length);
  for (std::size_t i = 0; i < needed.size(); ++i)
    if (Status s = check_pages(params, needed[i], all[i]); !s.ok()) return s;
  const CachedRows from(cache, cfg, params.parent), to(cache, cfg, params.child);
  const auto copy = [&](TokenRows CachedRows::*rows, const TensorView& tokens, std::int64_t begin, std::int64_t end) {
    for (std::int64_t next; begin < end; begin = next) {
      next = std::min(end, begin + (from.*rows).run(begin));
      if ((from.*rows).at(begin, 0) == (to.*rows).at(begin, 0)) continue;  // shared
      copy_tokens(from.*rows, to.*rows, begin, next, tokens.size(2), tokens.size(3));
    }
  };
  // Of a ring all that it holds, for a rollback; of pages what goes on from here needs.
  const auto begin_in = [&](const TensorView& table, const TensorView& ring, std::int64_t needed) {
    return table.defined() ? needed : std::max<std::int64_t>(0, parent_length - ring.size(1));
  };
  copy(&CachedRows::k_slc, cache.k_slc, 0, length);
  copy(&CachedRows::v_slc, cache.v_slc, 0, length);
  copy(&CachedRows::k_c, cache.k_c, 0, cfg.num_compressed(length));  // blocks with i * d + l <= length
  copy(&CachedRows::v_c, cache.v_c, 0, cfg.num_compressed(length));
  const std::int64_t window = begin_in(cache.block_table_swa, cache.k_swa_ring, window_begin(cfg, length));
  copy(&CachedRows::k_swa, cache.k_swa_ring, window, length);
  copy(&CachedRows::v_swa, cache.v_swa_ring, window, length);
  const std::int64_t raw = begin_in(cache.block_table_cmp, cache.k_cmp_ring, open_block_begin(cfg, length));
  copy(&CachedRows::k_cmp, cache.k_cmp_ring, raw, length);
  copy(&CachedRows::v_cmp, cache.v_cmp_ring, raw, length);
  if (cache.advance)
    cache.cache_seqlens.as<std::int32_t>()[params.child * cache.cache_seqlens.stride[0]] =
        static_cast<std::int32_t>(length);
  return {};
}

}  // namespace nsa
