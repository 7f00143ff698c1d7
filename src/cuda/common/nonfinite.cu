#include "cuda/common/nonfinite.h"

#include "cuda/common/launch.cuh"

namespace nsa::cuda {
namespace {

/// True if one of the eight elements from `from` on, sixteen bytes, is not finite.
template <class T>
__device__ inline bool nonfinite_vector(const T* from) {
  const uint4 w = *reinterpret_cast<const uint4*>(from);
  return (nonfinite_bits(T{}, w.x) | nonfinite_bits(T{}, w.y) | nonfinite_bits(T{}, w.z) | nonfinite_bits(T{}, w.w)) !=
         0;
}

/// True if an element of any head of the row is not finite. The warp reads the row together.
template <class T>
__device__ inline bool nonfinite_row(const Checked& c, unsigned row, unsigned lane) {
  const unsigned batch = row / c.rows_per_batch, own = row - batch * c.rows_per_batch, vectors = c.columns / 8;
  bool found = false;
#pragma unroll 2
  for (unsigned i = lane; i < c.heads * vectors; i += 32) {
    const unsigned head = i / vectors;
    found |= nonfinite_vector(c.t.at<T>(batch, own, head) + (i - head * vectors) * 8);
  }
  return found;
}

/// Rows and heads are counted in 32 bits, because 2^32 of them would take a terabyte.
template <class T>
__global__ void __launch_bounds__(256) scan_nonfinite(const __grid_constant__ NonfiniteArgs args) {
  const unsigned thread = blockIdx.x * 256 + threadIdx.x, threads = gridDim.x * 256;
  bool found = false;
#pragma unroll 1
  for (const Checked& c : args.tensors)
    if (c.t.data)
      for (unsigned row = thread / 32; row < c.rows; row += threads / 32)
        found |= nonfinite_row<T>(c, row, thread % 32);
  if (args.queries.t.data) {
    const Checked& c = args.queries;
    const auto rows = static_cast<unsigned>(c.rows);
    for (unsigned i = thread; i < rows * c.heads; i += threads) {
      const unsigned head = i / rows, row = i - head * rows, batch = row / c.rows_per_batch;
      const unsigned own = row - batch * c.rows_per_batch;
#pragma unroll
      for (int k = 0; k < kBranches; ++k) {
        if (!args.lse[k].data) continue;
        const float lse = args.lse[k].at(batch, own, head), delta = args.delta[k].at(batch, own, head);
        found |= !is_finite(delta) || !(lse < INFINITY);
        if (lse == -INFINITY)
          for (int j = 0; j < c.columns; j += 8) found |= nonfinite_vector(c.t.at<T>(batch, own, head) + j);
      }
    }
  }
  if (found) *args.flag = 1;
}

}  // namespace

cudaError_t find_nonfinite(DType dtype, const NonfiniteArgs& args, cudaStream_t stream) {
  if (const cudaError_t error = cudaMemsetAsync(args.flag, 0, sizeof(int), stream); error != cudaSuccess) return error;
  std::int64_t most = args.queries.rows * args.queries.heads;
  for (const Checked& c : args.tensors) most = std::max(most, c.rows * 32);
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(ceil_div(most, 256), 132 * 8));
  if (dtype == DType::kBFloat16) return launch(scan_nonfinite<Bf16>, blocks, 256, 0, stream, args);
  return launch(scan_nonfinite<Half>, blocks, 256, 0, stream, args);
}

}  // namespace nsa::cuda
