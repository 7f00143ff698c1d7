// Memory of the kernels: aligned to cache lines, not initialised.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace nsa::cpu::NSA_ISA {

/// n values of a trivial type. Throws std::bad_alloc, so it is made outside of parallel regions; cpu/dispatch.cpp turns
/// the exception into a Status.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t n)
      : data_(static_cast<T*>(std::aligned_alloc(kAlignment, (n * sizeof(T) / kAlignment + 1) * kAlignment))) {
    if (!data_) throw std::bad_alloc();
  }

  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  T& operator[](std::size_t i) { return data_.get()[i]; }
  const T& operator[](std::size_t i) const { return data_.get()[i]; }

 private:
  static constexpr std::size_t kAlignment = 64;
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T[], Free> data_;
};

}  // namespace nsa::cpu::NSA_ISA
