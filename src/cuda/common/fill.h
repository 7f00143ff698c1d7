// Packed rows past the last sequence.
#pragma once

#include <initializer_list>

#include "cuda/common/views.h"
#include "nsa/config.h"

namespace nsa::cuda {

inline constexpr unsigned kMinusInfinity = 0xff800000u, kNoBlock = 0xffffffffu;

struct Filled {
  const TensorView& tensor;  // undefined: left out
  unsigned value;
};

/// Packed rows from cu's last offset on (with `compressed`: from the last compressed token of the sequences on) get
/// `value`. Nothing without offsets. One kernel for at most eight tensors.
Status fill(std::initializer_list<Filled> tensors, const TensorView& cu, const NSAConfig* compressed,
            cudaStream_t stream);

}  // namespace nsa::cuda
