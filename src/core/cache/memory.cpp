#include "core/cache/memory.h"

#include <cstring>
#include <new>
#include <string>
#include <utility>

namespace nsa {
namespace {

constexpr std::align_val_t kAlignment{256};

class HostMemory final : public CacheMemory {
 public:
  explicit HostMemory(KVCacheAllocator allocator) : CacheMemory(std::move(allocator)) {}
  ~HostMemory() override { give_back(nullptr); }

  Status add(std::size_t bytes) override {
    if (Status s = take(bytes, nullptr); !s.ok()) return s;
    std::memset(parts_.back().data, 0, bytes);
    return {};
  }
  Status expect_writes(std::size_t) override { return {}; }
  Status changeable() override { return {}; }
  Status write(std::byte* to, const std::byte* from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
    return {};
  }
  Status edit(std::span<const Copy> copies, std::int32_t* number, std::int32_t value) override {
    for (const Copy& copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
    if (number) *number = value;
    return {};
  }
  Status read(std::byte* to, const std::byte* from, std::size_t bytes) override { return write(to, from, bytes); }
  Status clone(std::unique_ptr<CacheMemory>& made) override {
    auto other = std::make_unique<HostMemory>(allocator_);
    for (const Part& part : parts_) {
      if (Status s = other->take(part.size, nullptr); !s.ok()) return s;
      std::memcpy(other->parts_.back().data, part.data, part.size);
    }
    made = std::move(other);
    return {};
  }
};

}  // namespace

Status CacheMemory::take(std::size_t bytes, void* stream) {
  void* data = allocator_.allocate(bytes, stream);
  if (!data) return Status::internal("KVCache: no memory for it: " + std::to_string(bytes) + " bytes");
  parts_.push_back({static_cast<std::byte*>(data), bytes});
  return {};
}

void CacheMemory::give_back(void* stream) {
  for (const Part& part : parts_) allocator_.release(part.data, part.size, stream);
  parts_.clear();
}

std::unique_ptr<CacheMemory> make_host_memory(KVCacheAllocator allocator) {
  if (!allocator.allocate) {
    allocator.allocate = [](std::size_t bytes, void*) { return ::operator new(bytes, kAlignment, std::nothrow); };
    allocator.release = [](void* data, std::size_t, void*) { ::operator delete(data, kAlignment); };
  }
  return std::make_unique<HostMemory>(std::move(allocator));
}

}  // namespace nsa
