// Copies of strided views in host memory.
#pragma once

#include <cstddef>
#include <vector>

#include "nsa/tensor.h"

namespace nsa {

/// The elements in row-major order.
std::vector<std::byte> gather(const TensorView& view);

/// A copy without gaps and the view of it.
struct ContiguousCopy {
  explicit ContiguousCopy(const TensorView& source);

  std::vector<std::byte> storage;
  TensorView view;
};

}  // namespace nsa
