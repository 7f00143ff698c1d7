#include "cuda/sm90/common/row_terms.h"

#include "cuda/common/launch.cuh"

namespace nsa::cuda::sm90 {
namespace {

constexpr int kRows = 64;

/// Grid: tiles of 64 rows, lines, batches. Read along the rows, written along the heads.
__global__ void __launch_bounds__(128)
    write_row_terms(PerRow lse, PerRow delta, PerRow gate, bool delta_by_gate, RowTerms to) {
  __shared__ float tile[3][16][kRows + 1];
  const int first = static_cast<int>(blockIdx.x) * kRows, line = blockIdx.y, batch = blockIdx.z;
  for (int i = threadIdx.x; i < to.heads * kRows; i += 128) {
    const int head = i / kRows, row = i % kRows;
    const bool valid = first + row < to.rows;
    const auto value = [&](const PerRow& from) { return from.at(batch, first + row, line * to.heads + head); };
    const float own = valid ? value(lse) * -kLog2e : 0;
    tile[0][head][row] = own == INFINITY ? 0 : own;
    const float own_gate = !valid ? 0 : gate.data ? value(gate) : 1, own_delta = valid ? value(delta) : 0;
    tile[1][head][row] = !delta_by_gate ? own_delta : own_gate != 0 ? own_delta / own_gate : 0;
    tile[2][head][row] = own_gate;
  }
  __syncthreads();
  float* out = to.at(batch, line, first);
  const std::int64_t left = (static_cast<std::int64_t>(to.rows) - first) * to.heads + 64;
  for (int i = threadIdx.x; i < to.heads * kRows && i < left; i += 128)
#pragma unroll
    for (int array = 0; array < 3; ++array) out[array * to.array + i] = tile[array][i % to.heads][i / to.heads];
}

}  // namespace

cudaError_t make_row_terms(const BackwardArgs& args, cudaStream_t stream, bool delta_by_gate) {
  const RowTerms to(args.geometry, args.row_terms);
  // One row more than there are: its tile also writes zeros behind the last one.
  const auto tiles = static_cast<unsigned>(ceil_div(to.rows + 64, kRows));
  return launch(write_row_terms, dim3(tiles, to.lines, tensor_batches(args.geometry)), 128, 0, stream, args.lse,
                args.delta, args.gate, delta_by_gate, to);
}

}  // namespace nsa::cuda::sm90
