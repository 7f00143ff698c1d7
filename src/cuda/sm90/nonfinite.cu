#include "cuda/sm90/nonfinite.h"

#include "cuda/portable/launch.cuh"

namespace nsa::cuda::sm90 {
namespace {

template <class T>
__device__ inline bool nonfinite_row(const Strided& t, std::int64_t row, int rows_per_batch, int head, int columns,
                                     int lane, int lanes) {
  const int batch = static_cast<int>(row / rows_per_batch);
  const auto* from =
      reinterpret_cast<const uint4*>(t.at<T>(batch, row - static_cast<std::int64_t>(batch) * rows_per_batch, head));
  std::uint32_t found = 0;
  for (int i = lane; i < columns / 8; i += lanes) {
    const uint4 w = from[i];
    found |= nonfinite_bits(T{}, w.x) | nonfinite_bits(T{}, w.y) | nonfinite_bits(T{}, w.z) | nonfinite_bits(T{}, w.w);
  }
  return found != 0;
}

template <class T>
__global__ void __launch_bounds__(256) look_for_nonfinite(const __grid_constant__ NonfiniteArgs args) {
  const std::int64_t thread = blockIdx.x * 256ll + threadIdx.x, threads = gridDim.x * 256ll;
  bool found = false;
#pragma unroll
  for (int k = 0; k < 6; ++k) {
    const Checked& c = args.tensors[k];
    if (!c.t.data) continue;
    const int pieces = c.columns / 64;  // eight lanes to 64 columns
    const std::int64_t all = c.rows * c.heads * pieces;
    for (std::int64_t i = thread / 8; i < all; i += threads / 8) {
      const std::int64_t line = i / pieces;
      Strided part = c.t;
      part.data = static_cast<T*>(part.data) + i % pieces * 64;
      found |= nonfinite_row<T>(part, line / c.heads, c.rows_per_batch, static_cast<int>(line % c.heads), 64,
                                static_cast<int>(thread % 8), 8);
    }
  }
  if (args.queries.t.data) {
    const Checked& c = args.queries;
    for (std::int64_t i = thread; i < c.rows * c.heads; i += threads) {
      const int head = static_cast<int>(i / c.rows);
      const std::int64_t row = i % c.rows;
      const int batch = static_cast<int>(row / c.rows_per_batch);
      const std::int64_t own = row - static_cast<std::int64_t>(batch) * c.rows_per_batch;
#pragma unroll
      for (int k = 0; k < 3; ++k) {
        if (!args.lse[k].data) continue;
        const float lse = args.lse[k].at(batch, own, head), delta = args.delta[k].at(batch, own, head);
        found |= !is_finite(delta) || !(lse < INFINITY);
        if (lse == -INFINITY) found |= nonfinite_row<T>(c.t, row, c.rows_per_batch, head, c.columns, 0, 1);
      }
    }
  }
  if (found) *args.flag = 1;
}

}  // namespace

cudaError_t find_nonfinite(DType dtype, const NonfiniteArgs& args, cudaStream_t stream) {
  if (const cudaError_t error = cudaMemsetAsync(args.flag, 0, sizeof(int), stream); error != cudaSuccess) return error;
  std::int64_t most = args.queries.rows * args.queries.heads;
  for (const Checked& c : args.tensors) most = std::max(most, c.rows * c.heads * c.columns / 8);
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(portable::tiles(most, 256), 132 * 8));
  if (dtype == DType::kBFloat16) return portable::launch(look_for_nonfinite<Bf16>, blocks, 256, 0, stream, args);
  return portable::launch(look_for_nonfinite<Half>, blocks, 256, 0, stream, args);
}

}  // namespace nsa::cuda::sm90
