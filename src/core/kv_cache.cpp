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
  return {};
}

}  // namespace

PagePool::PagePool(std::int64_t num_pages) : free_(static_cast<std::size_t>(num_pages)), uses_(free_.size()) {
  std::iota(free_.rbegin(), free_.rend(), 0);  // page 0 first
}

std::int32_t PagePool::take() {
  const std::int32_t page = free_.back();
  free_.pop_back();
  uses_[static_cast<std::size_t>(page)] = 1;
  return page;
}

void PagePool::give_back(std::int32_t page) {
  if (--uses_[static_cast<std::size_t>(page)] == 0) free_.push_back(page);
}

KVCache::Pages KVCache::make_pages(std::int64_t capacity, std::int64_t page_size, std::int64_t num_pages) const {
  Pages pages;
  pages.page_size = page_size > 0 ? page_size : round_up(std::max<std::int64_t>(capacity, 1), 16);
  pages.max_pages = std::max<std::int64_t>(pages.pages_for(capacity), 1);
  pages.num_pages = num_pages > 0 ? num_pages : options_.batch * pages.max_pages;
  if (pages.num_pages > INT32_MAX) throw std::length_error("it has 2^31 pages or more");
  const auto bytes = [&](std::int64_t dim) {
    return bytes_of({pages.num_pages, pages.page_size, options_.num_kv_heads, dim}, stored_type(options_));
  };
  pages.keys.resize(bytes(options_.key_dim));
  pages.values.resize(bytes(options_.value_dim));
  pages.table.assign(static_cast<std::size_t>(options_.batch * pages.max_pages), -1);
  pages.pool = PagePool(pages.num_pages);
  return pages;
}

Status KVCache::create(const KVCacheOptions& options, KVCache& cache) try {
  if (Status s = check_options(options); !s.ok()) return s;
  KVCache made;
  made.options_ = options;
  made.tokens_ = made.make_pages(options.capacity, options.page_size, options.num_pages);
  // As many compressed tokens as the pages of raw ones can have, in the worst case a partly filled page per sequence.
  const std::int64_t most = options.cfg.num_compressed(options.capacity);
  const std::int64_t all = made.tokens_.num_pages * made.tokens_.page_size / options.cfg.kernel_stride;
  made.compressed_ =
      made.make_pages(most, options.page_size, options.num_pages > 0 ? made.tokens_.pages_for(all) + options.batch : 0);
  const auto ring = [&](std::int64_t tokens, std::int64_t dim, DType dtype) {
    return std::vector<std::byte>(bytes_of({options.batch, tokens + kRollback, options.num_kv_heads, dim}, dtype));
  };
  made.k_swa_ = ring(options.cfg.window_size, options.key_dim, stored_type(options));
  made.v_swa_ = ring(options.cfg.window_size, options.value_dim, stored_type(options));
  made.k_cmp_ = ring(options.cfg.kernel_size, options.key_dim, options.dtype);
  made.v_cmp_ = ring(options.cfg.kernel_size, options.value_dim, options.dtype);
  made.seqlens_.assign(static_cast<std::size_t>(options.batch), 0);
  made.longest_.assign(static_cast<std::size_t>(options.batch), 0);
  cache = std::move(made);
  return {};
} catch (const std::exception& error) {
  return Status::internal(std::string("KVCache: no memory for it: ") + error.what());
}

KVCacheView KVCache::view() {
  const std::int64_t B = options_.batch, Hkv = options_.num_kv_heads, Dk = options_.key_dim, Dv = options_.value_dim;
  const auto pages_of = [&](Pages& pages, std::vector<std::byte>& data, std::int64_t dim) {
    return TensorView::contiguous(data.data(), stored_type(options_), {pages.num_pages, pages.page_size, Hkv, dim});
  };
  const auto table_of = [&](Pages& pages) {
    return TensorView::contiguous(pages.table.data(), DType::kInt32, {B, pages.max_pages});
  };
  const auto ring_of = [&](std::vector<std::byte>& data, std::int64_t tokens, std::int64_t dim, DType dtype) {
    return TensorView::contiguous(data.data(), dtype, {B, tokens + kRollback, Hkv, dim});
  };
  KVCacheView view;
  view.k_slc = pages_of(tokens_, tokens_.keys, Dk);
  view.v_slc = pages_of(tokens_, tokens_.values, Dv);
  view.block_table = table_of(tokens_);
  view.k_c = pages_of(compressed_, compressed_.keys, Dk);
  view.v_c = pages_of(compressed_, compressed_.values, Dv);
  view.block_table_c = table_of(compressed_);
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

std::int64_t KVCache::missing(Pages& pages, std::int64_t sequence, std::int64_t tokens) {
  std::int64_t count = 0;
  for (std::int64_t p = 0; p < pages.pages_for(tokens); ++p) count += pages.page(sequence, p) < 0;
  return count;
}

void KVCache::extend(Pages& pages, std::int64_t sequence, std::int64_t tokens) {
  for (std::int64_t p = 0; p < pages.pages_for(tokens); ++p)
    if (pages.page(sequence, p) < 0) pages.page(sequence, p) = pages.pool.take();
}

Status KVCache::reserve(const std::vector<std::int64_t>& lengths) {
  if (static_cast<std::int64_t>(lengths.size()) != options_.batch)
    return Status::invalid_argument("reserve: " + std::to_string(lengths.size()) +
                                    " lengths: expected one for each of " + std::to_string(options_.batch) +
                                    " sequences");
  std::int64_t pages = 0, pages_c = 0;
  for (std::int64_t b = 0; b < options_.batch; ++b) {
    const std::int64_t length = lengths[static_cast<std::size_t>(b)];
    if (length > options_.capacity)
      return Status::out_of_capacity("reserve: sequence " + std::to_string(b) + ": " + std::to_string(length) +
                                     " tokens: the capacity is " + std::to_string(options_.capacity));
    pages += missing(tokens_, b, length);
    pages_c += missing(compressed_, b, options_.cfg.num_compressed(length));
  }
  if (pages > tokens_.pool.available() || pages_c > compressed_.pool.available())
    return Status::out_of_capacity("reserve: needs " + std::to_string(pages) + " pages of tokens and " +
                                   std::to_string(pages_c) + " of compressed tokens: free are " +
                                   std::to_string(tokens_.pool.available()) + " and " +
                                   std::to_string(compressed_.pool.available()));
  for (std::int64_t b = 0; b < options_.batch; ++b) {
    const std::int64_t length = lengths[static_cast<std::size_t>(b)];
    extend(tokens_, b, length);
    extend(compressed_, b, options_.cfg.num_compressed(length));
  }
  return {};
}

Status KVCache::check() {
  if (std::exchange(overflow_, 0) == 0) return {};
  return Status::out_of_capacity("a step found no room for a sequence: reserve() before each step");
}

Status KVCache::check_going_back(const char* what, std::int64_t sequence, std::int64_t length) {
  const std::string name = std::string(what) + ": sequence " + std::to_string(sequence) + ": ";
  if (sequence < 0 || sequence >= options_.batch)
    return Status::invalid_argument(name + "there are " + std::to_string(options_.batch));
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

std::int64_t KVCache::shared_from(Pages& pages, std::int64_t sequence, std::int64_t tokens) {
  std::int64_t count = 0;
  for (std::int64_t p = tokens / pages.page_size; p < pages.max_pages; ++p)
    count += pages.page(sequence, p) >= 0 && pages.pool.shared(pages.page(sequence, p));
  return count;
}

void KVCache::unshare(Pages& pages, std::int64_t sequence, std::int64_t tokens) {
  for (std::int64_t p = tokens / pages.page_size; p < pages.max_pages; ++p) {
    const std::int32_t from = pages.page(sequence, p);
    if (from < 0 || !pages.pool.shared(from)) continue;
    const std::int32_t to = pages.pool.take();
    for (std::vector<std::byte>* data : {&pages.keys, &pages.values}) {
      const std::int64_t bytes = static_cast<std::int64_t>(data->size()) / pages.num_pages;
      std::copy_n(data->begin() + from * bytes, bytes, data->begin() + to * bytes);
    }
    pages.pool.give_back(from);
    pages.page(sequence, p) = to;
  }
}

Status KVCache::rollback(std::int64_t sequence, std::int64_t length) {
  if (Status s = check_going_back("rollback", sequence, length); !s.ok()) return s;
  const std::int64_t blocks = options_.cfg.num_compressed(length);
  const auto room = [&](Pages& pages, const char* name, std::int64_t tokens) -> Status {
    const std::int64_t copies = shared_from(pages, sequence, tokens);
    if (copies <= pages.pool.available()) return {};
    return Status::out_of_capacity(std::string("rollback: needs ") + std::to_string(copies) + " pages of " + name +
                                   " in place of shared ones: free are " + std::to_string(pages.pool.available()));
  };
  if (Status s = room(tokens_, "tokens", length); !s.ok()) return s;
  if (Status s = room(compressed_, "compressed tokens", blocks); !s.ok()) return s;
  unshare(tokens_, sequence, length);
  unshare(compressed_, sequence, blocks);
  seqlens_[static_cast<std::size_t>(sequence)] = static_cast<std::int32_t>(length);
  return {};
}

void KVCache::share_full(Pages& pages, std::int64_t parent, std::int64_t child, std::int64_t tokens) {
  for (std::int64_t p = 0; (p + 1) * pages.page_size <= tokens; ++p) {
    pages.pool.share(pages.page(parent, p));
    pages.page(child, p) = pages.page(parent, p);
  }
}

Status KVCache::fork(std::int64_t parent, std::int64_t child, std::int64_t length) {
  if (Status s = check_going_back("fork", parent, length); !s.ok()) return s;
  if (child < 0 || child >= options_.batch || child == parent || this->length(child) != 0)
    return Status::invalid_argument("fork: child = " + std::to_string(child) + ": must be an empty sequence");
  const std::int64_t blocks = options_.cfg.num_compressed(length);
  const auto room = [&](Pages& pages, std::int64_t tokens) {  // pages that the child has reserved are free for it
    std::int64_t own = 0;
    for (std::int64_t p = 0; p < pages.max_pages; ++p) own += pages.page(child, p) >= 0;
    return tokens % pages.page_size == 0 || own + pages.pool.available() > 0;
  };
  if (!room(tokens_, length) || !room(compressed_, blocks))
    return Status::out_of_capacity("fork: no free page for the child's last tokens");
  release(child);
  share_full(tokens_, parent, child, length);
  share_full(compressed_, parent, child, blocks);
  extend(tokens_, child, length);
  extend(compressed_, child, blocks);
  // Bytes are copied, so that every type goes through the backend that takes every type.
  const ForkParams params{.cache = view(), .cfg = options_.cfg, .parent = parent, .child = child, .length = length};
  if (Status s = nsa::fork(params, {.backend = Backend::kReference}); !s.ok()) return s;
  longest_[static_cast<std::size_t>(child)] = longest_[static_cast<std::size_t>(parent)];
  return {};
}

void KVCache::release(Pages& pages, std::int64_t sequence) {
  for (std::int64_t p = 0; p < pages.max_pages; ++p) {
    if (pages.page(sequence, p) >= 0) pages.pool.give_back(pages.page(sequence, p));
    pages.page(sequence, p) = -1;
  }
}

void KVCache::release(std::int64_t sequence) {
  release(tokens_, sequence);
  release(compressed_, sequence);
  seqlens_[static_cast<std::size_t>(sequence)] = 0;
  longest_[static_cast<std::size_t>(sequence)] = 0;
}

}  // namespace nsa
