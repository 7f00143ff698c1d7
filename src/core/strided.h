// Copies of strided views in host memory.
#pragma once

#include <cstddef>
#include <vector>

#include "nsa/status.h"
#include "nsa/tensor.h"

namespace nsa {

/// Whether both are the same elements of the same memory.
inline bool same_view(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.rank == b.rank && a.shape == b.shape && a.stride == b.stride;
}

/// The elements in row-major order.
std::vector<std::byte> gather(const TensorView& view);

/// Tensor on a device -> the same view, strides included, of a copy in host memory. Waits for the device.
class HostCopy {
 public:
  static Status make(const TensorView& source, HostCopy& copy);

  TensorView view;

 private:
  std::vector<std::byte> storage_;
};

/// A copy without gaps and the view of it.
struct ContiguousCopy {
  explicit ContiguousCopy(const TensorView& source) : ContiguousCopy(source, gather(source)) {}
  /// Of zeros.
  static ContiguousCopy zeros_like(const TensorView& source) {
    return {source, std::vector<std::byte>(static_cast<std::size_t>(source.numel()) * size_of(source.dtype))};
  }

  std::vector<std::byte> storage;
  TensorView view;

 private:
  ContiguousCopy(const TensorView& shape, std::vector<std::byte> elements);
};

}  // namespace nsa
