// Copies of strided views in host memory.
#pragma once

#include <cstddef>
#include <vector>

#include "nsa/status.h"
#include "nsa/tensor.h"

namespace nsa {

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
  explicit ContiguousCopy(const TensorView& source);

  std::vector<std::byte> storage;
  TensorView view;
};

}  // namespace nsa
