// What dK and dV need per query row, laid out as their kernels read it: the heads of a query tile next to each other.
#pragma once

#include <cuda_runtime.h>

#include "cuda/common/params.h"
#include "cuda/sm90/common/head_packing.cuh"

namespace nsa::cuda::sm90 {

/// Three arrays: -lse in base-2 units (0 for a row that sees nothing), delta or delta / gate (0 where the gate is),
/// gate. Each (batches, heads / tile heads, rows, tile heads) and some zeros at the end of its rows, so that whole
/// tiles can be read.
struct RowTerms {
  float* data = nullptr;
  int rows = 0, heads = 0, lines = 0;  // of a batch; of a tile; H / tile heads
  std::int64_t line = 0, array = 0;    // floats from one line to the next, from one array to the next

  RowTerms(const Geometry& g, float* memory)
      : data(memory),
        rows(static_cast<int>(query_rows(g))),
        heads(HeadPacking(g.group).heads),
        lines(g.heads / heads),
        line(rows * static_cast<std::int64_t>(heads) + 64),
        array(tensor_batches(g) * lines * line) {}

  std::int64_t floats() const { return 3 * array; }
  /// Of tile head 0 of a row.
  __device__ float* at(int batch, int number, int row) const {
    return data + (batch * lines + number) * line + static_cast<std::int64_t>(row) * heads;
  }
};

cudaError_t make_row_terms(const BackwardArgs& args, cudaStream_t stream, bool delta_by_gate = false);

}  // namespace nsa::cuda::sm90
