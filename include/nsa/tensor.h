// Plain, non-owning tensor views: what every operation takes and fills.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace nsa {

enum class DType : std::int8_t {
  kFloat32,
  kBFloat16,
  kFloat16,
  kFloat64,     // the reference backend only
  kInt32,       // indices, lengths and tables
  kFloat8E4M3,  // what a cache of decode, prefill and fork may store, and nothing else
};

/// Bytes of one element.
std::size_t size_of(DType dtype);
/// "float32", "bfloat16", ... "float8_e4m3fn"
const char* name_of(DType dtype);

enum class DeviceType : std::int8_t { kCPU, kCUDA };

struct Device {
  DeviceType type = DeviceType::kCPU;
  int index = 0;
  bool operator==(const Device&) const = default;
};

/// A strided view of up to four dimensions. It owns nothing; operations write only to views they document as outputs.
/// An optional tensor that is absent is a default-constructed view (rank 0, defined() == false); a tensor without
/// elements has rank > 0 and may have any data pointer.
struct TensorView {
  static constexpr int kMaxRank = 4;

  void* data = nullptr;
  DType dtype = DType::kFloat32;
  Device device;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> stride{};  // in elements; 0 broadcasts an input

  /// A row-major view without gaps.
  static TensorView contiguous(void* data, DType dtype, std::initializer_list<std::int64_t> shape, Device device = {});
  /// The same of constant memory, for inputs alone: an operation would write to it as to any output.
  static TensorView input(const void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                          Device device = {}) {
    return contiguous(const_cast<void*>(data), dtype, shape, device);
  }

  bool defined() const { return rank > 0; }
  std::int64_t size(int dim) const { return shape[static_cast<std::size_t>(dim < 0 ? dim + rank : dim)]; }
  std::int64_t numel() const;
  bool is_contiguous() const;
  /// "bfloat16 (2, 512, 16, 128)"
  std::string describe() const;

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

}  // namespace nsa
