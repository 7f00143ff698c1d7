// The memory of a cache: in host memory, or a device's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "nsa/kv_cache.h"

namespace nsa {

/// Parts of memory, each an allocation of its own. A device's is changed in the order of the stream: the host waits in
/// read() alone, and at the end until what it has written was taken.
class CacheMemory {
 public:
  struct Copy {
    const std::byte* from;
    std::byte* to;
    std::size_t bytes;
  };

  CacheMemory(const CacheMemory&) = delete;
  virtual ~CacheMemory() = default;

  /// One more part, all zero.
  virtual Status add(std::size_t bytes) = 0;
  /// Writes of up to so many bytes will come.
  virtual Status expect_writes(std::size_t bytes) = 0;
  /// Whether it may be changed now.
  virtual Status changeable() = 0;
  /// `from` is the caller's again when it returns.
  virtual Status write(std::byte* to, const std::byte* from, std::size_t bytes) = 0;
  /// Copies that do not overlap; then *number = value, unless it is null.
  virtual Status edit(std::span<const Copy> copies, std::int32_t* number, std::int32_t value) = 0;
  virtual Status read(std::byte* to, const std::byte* from, std::size_t bytes) = 0;
  /// The same parts with the same contents.
  virtual Status clone(std::unique_ptr<CacheMemory>& made) = 0;

  std::byte* part(std::size_t i) const { return parts_[i].data; }
  std::size_t size(std::size_t i) const { return parts_[i].size; }

 protected:
  struct Part {
    std::byte* data;
    std::size_t size;
  };

  explicit CacheMemory(KVCacheAllocator allocator) : allocator_(std::move(allocator)) {}
  /// An allocation of this size, and its return.
  Status take(std::size_t bytes, void* stream);
  void give_back(void* stream);

  KVCacheAllocator allocator_;
  std::vector<Part> parts_;
};

/// Without an allocator that of C++.
std::unique_ptr<CacheMemory> make_host_memory(KVCacheAllocator allocator);

}  // namespace nsa
