// Some rows of a packed call as a packed call of its own.
#pragma once

#include <cuda_runtime.h>

#include "cuda/common/geometry.cuh"

namespace nsa::cuda {

/// The query rows first ... first + count - 1 of a packed call. Sequences keep their numbers; those without a row here
/// are empty, and of a sequence that goes on behind there are the keys that its queries here see.
struct CutSequences {
  int first = 0, count = 0;
  int *cu_q = nullptr, *cu_k = nullptr;  // (batches + 1): from row `first` on; keys as before
  int* cuts = nullptr;                   // (batches): SelectedWindows::kBefore, kAfter
};

cudaError_t cut_sequences(const Geometry& whole, const CutSequences& cut, cudaStream_t stream);

}  // namespace nsa::cuda
