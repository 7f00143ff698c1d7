// Views of the public API as the arguments of kernels, and errors of CUDA as a Status.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "core/execution.h"
#include "cuda/common/geometry.cuh"
#include "nsa/status.h"
#include "nsa/tensor.h"

namespace nsa::cuda {

inline Status status_of(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return Status::internal(std::string(what) + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error));
}

inline Status out_of_workspace(const Arena& arena) {
  return Status::invalid_argument("workspace: too small, this call needs " + std::to_string(arena.used()) + " bytes");
}

inline Strided strided(const TensorView& t) {
  if (!t.defined()) return {};
  const bool batched = t.rank == 4;
  return {.data = t.data,
          .batch = batched ? t.stride[0] : 0,
          .row = t.stride[batched ? 1 : 0],
          .head = t.stride[batched ? 2 : 1]};
}

inline PerRow per_row(const TensorView& t) {
  if (!t.defined()) return {};
  const bool batched = t.rank == 3;
  return {.data = t.as<float>(),
          .batch = batched ? t.stride[0] : 0,
          .head = t.stride[batched ? 1 : 0],
          .row = t.stride[batched ? 2 : 1]};
}

inline int to_int(std::int64_t x) { return static_cast<int>(x); }

/// Batches and rows of a batch of a (B, S, ...) or (total, ...) tensor with `trailing` further dimensions.
struct Rows {
  int batches, rows;
};
inline Rows rows_of(const TensorView& t, int trailing) {
  return t.rank == trailing + 2 ? Rows{to_int(t.size(0)), to_int(t.size(1))} : Rows{1, to_int(t.size(0))};
}

}  // namespace nsa::cuda
