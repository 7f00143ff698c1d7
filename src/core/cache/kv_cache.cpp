#include "nsa/kv_cache.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <initializer_list>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/backend.h"
#include "core/cache/memory.h"
#include "core/text.h"

namespace nsa {
namespace {

constexpr std::int64_t ceil_div(std::int64_t n, std::int64_t size) { return (n + size - 1) / size; }
constexpr std::int64_t round_up(std::int64_t n, std::int64_t multiple) { return ceil_div(n, multiple) * multiple; }

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
    for (const float scale : *scales) {
      const auto refuse = [name = name, scale](const char* rule) {
        return Status::invalid_argument(text_of(name, ": ", scale, ": must be ", rule));
      };
      if (!std::isfinite(scale) || scale <= 0) return refuse("positive and finite");
      if (scale < std::numeric_limits<float>::min()) return refuse("at least 2^-126");
    }
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
  for (const auto& [name, value] :
       {std::pair{"cfg.window_size", options.cfg.window_size}, {"cfg.kernel_size", options.cfg.kernel_size}})
    if (value > INT32_MAX - kRollback) return fail(name, value, "below 2^31 - 32 in a cache");
  if (options.dtype == DType::kInt32 || size_of(options.dtype) == 0)
    return Status::invalid_argument(std::string("dtype = ") + name_of(options.dtype) +
                                    ": must be a floating-point type");
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
  if (!options.allocator.allocate != !options.allocator.release)
    return Status::invalid_argument(std::string("allocator: no ") +
                                    (options.allocator.allocate ? "release" : "allocate") +
                                    ": must have both functions, or none");
  if (options.device.type == DeviceType::kCUDA)
    return supports(Backend::kCUDA, {options.dtype, options.device, options.key_dim, options.value_dim});
  return options.stream ? Status::invalid_argument("stream: must be null in host memory") : Status();
}

/// Where the numbers of a cache are in their part, in int32: tables, lengths, overflow, scales.
struct State {
  State(const KVCacheOptions& options, std::int64_t pages_of_a_sequence)
      : lengths(round_up(options.batch * pages_of_a_sequence, 64)),
        overflow(lengths + options.batch),
        k_scale(round_up(overflow + 1, 64)),
        v_scale(round_up(k_scale + options.num_kv_heads, 64)),
        size(v_scale + options.num_kv_heads) {}
  std::int64_t lengths, overflow, k_scale, v_scale, size;
};

}  // namespace

KVCache::Memory::Memory() = default;
KVCache::Memory::Memory(std::unique_ptr<CacheMemory> memory) : memory_(std::move(memory)) {}
KVCache::Memory::Memory(const Memory& other) {
  if (other.memory_ && !other.memory_->clone(memory_).ok()) throw std::bad_alloc();
}
KVCache::Memory::Memory(Memory&&) noexcept = default;
KVCache::Memory& KVCache::Memory::operator=(Memory other) noexcept {
  std::swap(memory_, other.memory_);
  return *this;
}
KVCache::Memory::~Memory() = default;

Status KVCache::add(Rows& rows, std::int64_t count, std::int64_t tokens, std::int64_t dim, DType dtype) {
  rows = {parts_++, count, tokens, dim, dtype};
  return memory_->add(bytes_of({count, tokens, options_.num_kv_heads, dim}, dtype));
}

/// Memory for the options, and what it holds at first.
Status KVCache::make() {
  const KVCacheOptions& o = options_;
  const std::int64_t page_size = o.page_size > 0 ? o.page_size : round_up(o.capacity, 16);
  max_pages_ = ceil_div(o.capacity, page_size);
  const std::int64_t pages = o.num_pages > 0 ? o.num_pages : o.batch * max_pages_;
  if (pages > INT32_MAX) throw std::length_error("it has 2^31 pages or more");
  const std::int64_t most = std::max<std::int64_t>(o.cfg.num_compressed(o.capacity), 1);
  std::int64_t page_size_c = round_up(most, 16);
  if (o.page_size > 0) page_size_c = std::min(page_size_c, round_up(ceil_div(page_size, o.cfg.kernel_stride), 16));
  max_pages_c_ = ceil_div(most, page_size_c);
  // As many compressed tokens as the pages of raw ones can have, in the worst case a partly filled page for each
  // sequence and each cached prefix.
  std::int64_t pages_c = o.batch * max_pages_c_ + o.num_prefixes;
  if (o.num_pages > 0)
    pages_c = ceil_div(ceil_div(pages * page_size, o.cfg.kernel_stride), page_size_c) + o.batch + o.num_prefixes;
  if (pages_c > INT32_MAX) throw std::length_error("it has 2^31 pages or more");
  const std::int64_t places = o.batch + o.num_prefixes;
  for (const std::size_t i : {0, 1}) {
    const std::int64_t dim = i == 0 ? o.key_dim : o.value_dim;
    if (Status s = add(tokens_[i], pages, page_size, dim, stored_type(o)); !s.ok()) return s;
    if (Status s = add(compressed_[i], pages_c, page_size_c, dim, stored_type(o)); !s.ok()) return s;
    if (Status s = add(window_[i], places, o.cfg.window_size + kRollback, dim, stored_type(o)); !s.ok()) return s;
    if (Status s = add(raw_[i], places, o.cfg.kernel_size + kRollback, dim, o.dtype); !s.ok()) return s;
  }
  allocator_ = PageAllocator(o.batch, o.cfg, {page_size, pages, max_pages_}, {page_size_c, pages_c, max_pages_c_},
                             o.num_prefixes);
  uploaded_.assign(allocator_.tables().size(), 0);
  lengths_.assign(static_cast<std::size_t>(o.batch), 0);
  longest_.assign(static_cast<std::size_t>(places), 0);

  const State at(o, max_pages_ + max_pages_c_);
  state_ = parts_++;
  if (Status s = memory_->add(bytes_of({at.size}, DType::kInt32)); !s.ok()) return s;
  if (Status s = memory_->expect_writes(uploaded_.size() * sizeof(std::int32_t)); !s.ok()) return s;
  if (Status s = upload(); !s.ok()) return s;
  for (const auto& [where, scales] : {std::pair{at.k_scale, &o.k_scale}, {at.v_scale, &o.v_scale}}) {
    if (scales->empty()) continue;
    if (Status s = memory_->write(reinterpret_cast<std::byte*>(numbers(where)),
                                  reinterpret_cast<const std::byte*>(scales->data()), scales->size() * sizeof(float));
        !s.ok())
      return s;
  }
  if (!on_device() || o.batch == 1) return {};
  std::size_t workspace = 0;
  const ForkParams fork{.cache = view(), .cfg = o.cfg, .parent = 0, .child = 1, .length = 0};
  if (Status s = workspace_size(fork, workspace, {.backend = Backend::kCUDA}); !s.ok()) return s;
  return memory_->add(workspace);  // part parts_
}

Status KVCache::create(const KVCacheOptions& options, KVCache& cache) try {
  if (Status s = check_options(options); !s.ok()) return s;
  KVCache made;
  made.options_ = options;
  std::unique_ptr<CacheMemory> memory;
  if (made.on_device()) {
    if (Status s = cuda::make_cache_memory(options, memory); !s.ok()) return s;
  } else {
    memory = make_host_memory(options.allocator);
  }
  made.memory_ = Memory(std::move(memory));
  if (Status s = made.make(); !s.ok()) return s;
  cache = std::move(made);
  return {};
} catch (const std::exception& error) {
  return Status::internal(std::string("KVCache: no memory for it: ") + error.what());
}

TensorView KVCache::rows_of(const Rows& rows, std::int64_t count) const {
  return TensorView::contiguous(memory_->part(rows.part), rows.dtype,
                                {count, rows.tokens, options_.num_kv_heads, rows.dim}, options_.device);
}

std::int32_t* KVCache::numbers(std::int64_t at) const {
  return reinterpret_cast<std::int32_t*>(memory_->part(state_)) + at;
}

KVCacheView KVCache::view() {
  if (!memory_) return {};
  const std::int64_t B = options_.batch, Hkv = options_.num_kv_heads;
  const State at(options_, max_pages_ + max_pages_c_);
  const auto of_state = [&](std::int64_t where, DType dtype, std::initializer_list<std::int64_t> shape) {
    return TensorView::contiguous(numbers(where), dtype, shape, options_.device);
  };
  KVCacheView view;
  view.k_slc = rows_of(tokens_[0], tokens_[0].count), view.v_slc = rows_of(tokens_[1], tokens_[1].count);
  view.k_c = rows_of(compressed_[0], compressed_[0].count), view.v_c = rows_of(compressed_[1], compressed_[1].count);
  view.k_swa_ring = rows_of(window_[0], B), view.v_swa_ring = rows_of(window_[1], B);
  view.k_cmp_ring = rows_of(raw_[0], B), view.v_cmp_ring = rows_of(raw_[1], B);
  view.block_table = of_state(0, DType::kInt32, {B, max_pages_});
  view.block_table_c = of_state(B * max_pages_, DType::kInt32, {B, max_pages_c_});
  if (!options_.k_scale.empty()) {
    view.k_scale = of_state(at.k_scale, DType::kFloat32, {Hkv});
    view.v_scale = of_state(at.v_scale, DType::kFloat32, {Hkv});
  }
  view.cache_seqlens = of_state(at.lengths, DType::kInt32, {B});
  view.overflow = of_state(at.overflow, DType::kInt32, {1});
  return view;
}

/// The page numbers from the first to the last that has changed.
Status KVCache::upload() {
  const std::span<const std::int32_t> now = allocator_.tables();
  const auto first = std::mismatch(now.begin(), now.end(), uploaded_.begin()).first - now.begin();
  const auto last = std::mismatch(now.rbegin(), now.rend() - first, uploaded_.rbegin()).first.base() - now.begin();
  if (first == last) return {};
  const auto changed = now.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(last - first));
  if (Status s = memory_->write(reinterpret_cast<std::byte*>(numbers(first)),
                                reinterpret_cast<const std::byte*>(changed.data()), changed.size_bytes());
      !s.ok())
    return s;
  std::ranges::copy(changed, uploaded_.begin() + first);
  return {};
}

/// Copies pages and, from one slot to another, rings; writes the tables and the sequence's length. Sequence b has slot
/// b, the prefix in slot s slot B + s.
Status KVCache::change(const PageCopies& copies, const RingCopy& rings, std::int64_t sequence, std::int64_t length) {
  std::vector<CacheMemory::Copy> all;
  const auto copy = [&](const Rows& rows, std::int64_t from, std::int64_t to) {
    const std::size_t bytes = memory_->size(rows.part) / static_cast<std::size_t>(rows.count);
    std::byte* const data = memory_->part(rows.part);
    all.push_back({data + static_cast<std::size_t>(from) * bytes, data + static_cast<std::size_t>(to) * bytes, bytes});
  };
  for (const std::size_t i : {0, 1}) {
    for (const auto [from, to] : copies.tokens) copy(tokens_[i], from, to);
    for (const auto [from, to] : copies.compressed) copy(compressed_[i], from, to);
    if (rings.from == rings.to) continue;
    copy(window_[i], rings.from, rings.to), copy(raw_[i], rings.from, rings.to);
  }
  longest_[static_cast<std::size_t>(rings.to)] = longest_[static_cast<std::size_t>(rings.from)];
  if (Status s = upload(); !s.ok()) return s;
  if (sequence < 0) return memory_->edit(all, nullptr, 0);
  std::int32_t* const at = numbers(State(options_, max_pages_ + max_pages_c_).lengths) + sequence;
  lengths_[static_cast<std::size_t>(sequence)] = length;
  return memory_->edit(all, at, static_cast<std::int32_t>(length));
}

Status KVCache::check_made(const char* what) const {
  if (memory_) return {};
  return Status::invalid_argument(std::string(what) + ": a cache without memory: must be made by create");
}

Status KVCache::changeable() {
  if (!failed_.ok()) return std::exchange(failed_, {});
  return memory_->changeable();
}

std::int64_t KVCache::length(std::int64_t sequence) const {
  if (!check_sequence("length", sequence).ok()) return 0;
  if (on_device()) return lengths_[static_cast<std::size_t>(sequence)];
  return numbers(State(options_, max_pages_ + max_pages_c_).lengths)[sequence];
}

Status KVCache::check_counts(const char* what, const char* name, const std::vector<std::int64_t>& counts) const {
  if (Status s = check_made(what); !s.ok()) return s;
  if (static_cast<std::int64_t>(counts.size()) == options_.batch) return {};
  return Status::invalid_argument(std::string(what) + ": " + std::to_string(counts.size()) + " " + name +
                                  ": expected one for each of " + std::to_string(options_.batch) + " sequences");
}

Status KVCache::reserve(const std::vector<std::int64_t>& lengths) {
  if (Status s = check_counts("reserve", "lengths", lengths); !s.ok()) return s;
  for (std::int64_t b = 0; b < options_.batch; ++b) {
    const std::int64_t length = lengths[static_cast<std::size_t>(b)];
    if (length < 0)
      return Status::invalid_argument("reserve: sequence " + std::to_string(b) + ": " + std::to_string(length) +
                                      " tokens: must be >= 0");
    if (length > options_.capacity)
      return Status::out_of_capacity("reserve: sequence " + std::to_string(b) + ": " + std::to_string(length) +
                                     " tokens: the capacity is " + std::to_string(options_.capacity));
  }
  if (Status s = changeable(); !s.ok()) return s;
  if (allocator_.has_capacity(lengths)) return {};  // most steps
  if (Status s = allocator_.reserve(lengths); !s.ok()) return s;
  return upload();
}

Status KVCache::appended(const std::vector<std::int64_t>& num_new) {
  if (Status s = check_counts("appended", "numbers", num_new); !s.ok()) return s;
  if (!on_device()) return {};
  for (std::int64_t b = 0; b < options_.batch; ++b) {
    const std::int64_t count = num_new[static_cast<std::size_t>(b)];
    const std::string name = "appended: sequence " + std::to_string(b) + ": ";
    if (count < 0) return Status::invalid_argument(name + std::to_string(count) + " tokens: must be >= 0");
    if (count > 0 && !allocator_.has_capacity(b, length(b) + count))
      return Status::out_of_capacity(name + std::to_string(length(b) + count) +
                                     " tokens: it has no pages for them: reserve() before the step");
  }
  for (std::size_t b = 0; b < num_new.size(); ++b) lengths_[b] += num_new[b];
  return {};
}

Status KVCache::check() {
  if (Status s = check_made("check"); !s.ok()) return s;
  if (Status s = changeable(); !s.ok()) return s;
  const State at(options_, max_pages_ + max_pages_c_);
  std::vector<std::int32_t> found(static_cast<std::size_t>(options_.batch + 1));  // lengths, overflow
  if (Status s =
          memory_->read(reinterpret_cast<std::byte*>(found.data()),
                        reinterpret_cast<const std::byte*>(numbers(at.lengths)), found.size() * sizeof(std::int32_t));
      !s.ok())
    return s;
  lengths_.assign(found.begin(), found.end() - 1);
  if (found.back() == 0) return {};
  if (Status s = memory_->edit({}, numbers(at.overflow), 0); !s.ok()) return s;
  return Status::out_of_capacity("a step exceeded the capacity of a sequence: reserve() before each step");
}

Status KVCache::check_sequence(const char* what, std::int64_t sequence) const {
  if (Status s = check_made(what); !s.ok()) return s;
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
  return changeable();
}

Status KVCache::rollback(std::int64_t sequence, std::int64_t length) {
  if (Status s = check_going_back("rollback", sequence, length); !s.ok()) return s;
  PageCopies copies;
  if (Status s = allocator_.rollback(sequence, length, copies); !s.ok()) return s;
  return change(copies, {}, sequence, length);
}

Status KVCache::fork(std::int64_t parent, std::int64_t child, std::int64_t length) {
  if (Status s = check_going_back("fork", parent, length); !s.ok()) return s;
  if (child < 0 || child >= options_.batch || child == parent || this->length(child) != 0)
    return Status::invalid_argument("fork: child = " + std::to_string(child) + ": must be an empty sequence");
  if (Status s = allocator_.fork(parent, child, length); !s.ok()) return s;
  if (Status s = upload(); !s.ok()) return s;
  // Bytes are copied, so that in host memory every type goes through the backend that takes every type.
  Context context{.backend = Backend::kReference};
  if (on_device())
    context = {.backend = Backend::kCUDA,
               .stream = options_.stream,
               .workspace = memory_->part(parts_),
               .workspace_size = memory_->size(parts_)};
  const ForkParams params{.cache = view(), .cfg = options_.cfg, .parent = parent, .child = child, .length = length};
  if (Status s = nsa::fork(params, context); !s.ok()) return s;
  lengths_[static_cast<std::size_t>(child)] = length;
  longest_[static_cast<std::size_t>(child)] = longest_[static_cast<std::size_t>(parent)];
  return {};
}

void KVCache::release(std::int64_t sequence) {
  Status status = check_sequence("release", sequence);
  if (status.ok()) status = memory_->changeable();
  if (status.ok()) {
    allocator_.release(sequence);
    longest_[static_cast<std::size_t>(sequence)] = 0;
    status = change({}, {}, sequence, 0);
  }
  if (failed_.ok()) failed_ = status;
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
  if (Status s = changeable(); !s.ok()) return s;
  PageCopies copies;
  const PageAllocator::Prefix prefix = allocator_.keep_prefix(sequence, tokens, copies);
  if (prefix.fresh)
    if (Status s = change(copies, {sequence, options_.batch + prefix.slot}); !s.ok()) return s;
  kept = prefix.length;
  return {};
}

Status KVCache::match_prefix(std::int64_t sequence, std::span<const std::int32_t> tokens, std::int64_t& length) {
  length = 0;
  if (Status s = check_sequence("match_prefix", sequence); !s.ok()) return s;
  if (this->length(sequence) != 0)
    return Status::invalid_argument("match_prefix: sequence " + std::to_string(sequence) + ": must be empty");
  if (Status s = changeable(); !s.ok()) return s;
  PageCopies copies;
  const PageAllocator::Prefix prefix = allocator_.match_prefix(sequence, tokens, copies);
  if (prefix.length == 0) return {};
  if (Status s = change(copies, {options_.batch + prefix.slot, sequence}, sequence, prefix.length); !s.ok()) return s;
  length = prefix.length;
  return {};
}

}  // namespace nsa
