// Where a call on a device runs: on the caller's stream, in the caller's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

struct CUstream_st;  // what cudaStream_t points to

namespace nsa {

/// Device memory of one call. Without memory it only measures what the call would take.
class Arena {
 public:
  Arena() = default;
  Arena(void* memory, std::size_t size) : memory_(static_cast<char*>(memory)), size_(size), measuring_(false) {}

  /// `count` elements, aligned to 256 bytes; null when measuring or beyond the workspace.
  template <class T>
  T* take(std::int64_t count) {
    const std::size_t at = used_;
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return memory_ && used_ <= size_ ? reinterpret_cast<T*>(memory_ + at) : nullptr;
  }
  bool measuring() const { return measuring_; }
  bool enough() const { return used_ <= size_; }
  std::size_t used() const { return used_; }

 private:
  char* memory_ = nullptr;
  std::size_t size_ = 0, used_ = 0;
  bool measuring_ = true;
};

/// With a measuring arena nothing is launched, and arena.used() tells the bytes that a call needs.
struct Execution {
  CUstream_st* stream = nullptr;
  Arena arena;
  const std::function<void(const char*)>* on_stage = nullptr;  // as in Context

  /// All of this stage of nsa_attention has been launched.
  void stage_done(const char* name) const {
    if (on_stage && !arena.measuring()) (*on_stage)(name);
  }
};

}  // namespace nsa
