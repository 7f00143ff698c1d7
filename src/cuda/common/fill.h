// Packed rows past the last sequence.
#pragma once

#include "cuda/common/views.h"
#include "nsa/config.h"

namespace nsa::cuda {

/// Packed rows from cu's last offset on (with `compressed`: from the last compressed token of the sequences on) get
/// `value`. Nothing without offsets.
Status fill(const TensorView& t, const TensorView& cu, unsigned value, const NSAConfig* compressed,
            cudaStream_t stream);

}  // namespace nsa::cuda
