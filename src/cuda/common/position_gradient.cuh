// The gradient of the position embedding of phi, by both kernels of compress_backward.
#pragma once

#include "cuda/common/params.h"

namespace nsa::cuda {

/// d_pe[r][c] = W1[r*D + c] . d_z_sum, a warp each.
template <class T>
__global__ void __launch_bounds__(256) position_gradient(const __grid_constant__ CompressArgs args) {
  const int i = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32, set = blockIdx.y;
  if (i >= args.geometry.kernel_size * args.dim) return;
  float sum = 0;
  for (int n = lane; n < args.hidden; n += 32)
    sum += to_float(*args.w1.at<T>(set, i, n)) * args.d_z_sum[set * args.hidden + n];
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (lane == 0) *args.d_pe.at<T>(set, i / args.dim, i % args.dim) = from_float<T>(sum);
}

}  // namespace nsa::cuda
