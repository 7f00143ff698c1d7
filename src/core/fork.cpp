// A fork copies what two sequences cannot share: bytes, whatever the type.
#include <algorithm>
#include <string>

#include "core/backend.h"
#include "core/token_rows.h"
#include "core/validation/check.h"

namespace nsa {
namespace {

std::int32_t page_of(const TensorView& table, std::int64_t sequence, std::int64_t page) {
  return table.as<const std::int32_t>()[sequence * table.stride[0] + page * table.stride[1]];
}

/// Pages that the child does not share must be there; a shared page must be full, as the child will write behind it.
Status check_pages(const ForkParams& params, const char* name, const TensorView& table, std::int64_t page_size,
                   std::int64_t length) {
  for (std::int64_t p = 0; p * page_size < length; ++p) {
    const std::string where =
        std::string("cache.") + name + "[" + std::to_string(params.child) + ", " + std::to_string(p) + "]: ";
    if (p >= table.size(1) || page_of(table, params.child, p) < 0)
      return Status::out_of_capacity(where + "no page for the child's tokens");
    if (page_of(table, params.parent, p) < 0) return Status::invalid_argument(where + "the parent has no such page");
    if (page_of(table, params.child, p) == page_of(table, params.parent, p) && (p + 1) * page_size > length)
      return Status::invalid_argument(where + "shared with the parent, but not full at the shared length");
  }
  return {};
}

void copy_pages(const ForkParams& params, const TensorView& pages, const TensorView& table, std::int64_t length) {
  const TokenRows from = paged_rows(pages, table, params.parent), to = paged_rows(pages, table, params.child);
  const std::size_t bytes = static_cast<std::size_t>(pages.size(3)) * size_of(pages.dtype);
  for (std::int64_t begin = 0; begin < length; begin += pages.size(1)) {
    if (to.at(begin, 0) == from.at(begin, 0)) continue;
    copy_tokens(from, to, begin, std::min(begin + pages.size(1), length), pages.size(2), bytes);
  }
}

void copy_ring(const ForkParams& params, const TensorView& ring, std::int64_t parent_length) {
  copy_tokens(plain_rows(ring, params.parent), plain_rows(ring, params.child),
              std::max<std::int64_t>(0, parent_length - ring.size(1)), params.length, ring.size(2),
              static_cast<std::size_t>(ring.size(3)) * size_of(ring.dtype));
}

}  // namespace

Status fork_in_host_memory(const ForkParams& params) {
  const KVCacheView& cache = params.cache;
  const std::int64_t blocks = params.cfg.num_compressed(params.length);  // those with i*d + l <= length
  if (Status s = check_pages(params, "block_table", cache.block_table, cache.k_slc.size(1), params.length); !s.ok())
    return s;
  if (Status s = check_pages(params, "block_table_c", cache.block_table_c, cache.k_c.size(1), blocks); !s.ok())
    return s;
  for (const TensorView& pages : {cache.k_slc, cache.v_slc})
    copy_pages(params, pages, cache.block_table, params.length);
  for (const TensorView& pages : {cache.k_c, cache.v_c}) copy_pages(params, pages, cache.block_table_c, blocks);
  const std::int64_t parent_length = int32_at(cache.cache_seqlens, params.parent);
  for (const TensorView& ring : {cache.k_swa_ring, cache.v_swa_ring, cache.k_cmp_ring, cache.v_cmp_ring})
    copy_ring(params, ring, parent_length);
  cache.cache_seqlens.as<std::int32_t>()[params.child * cache.cache_seqlens.stride[0]] =
      static_cast<std::int32_t>(params.length);
  return {};
}

}  // namespace nsa
