// The rotation of compressed keys: key i of a sequence turns by the angles at its block's first token, i*d.
#pragma once

#include "cuda/common/geometry.cuh"
#include "cuda/common/params.h"
#include "cuda/common/rotate.cuh"

namespace nsa::cuda::portable {

/// Grid x: compressed keys of a sequence, y: sequence.
template <class T>
__global__ void __launch_bounds__(256) rotate_compressed(const __grid_constant__ RotateArgs args) {
  const Geometry& p = args.geometry;
  const DeviceSequence s = sequence_of(p, blockIdx.y);
  const int c_begin = compressed_begin(p, blockIdx.y), blocks = num_compressed(p, s.k_len), half = args.key_dim / 2;
  for (int i = blockIdx.x; i < blocks; i += gridDim.x) {
    for (int e = threadIdx.x; e < p.kv_heads * half; e += blockDim.x) {
      const int column = e % half;
      T* at = args.keys.at<T>(s.batch, c_begin + i, e / half) + column;
      rotate_pair(args.rotation, static_cast<std::int64_t>(i) * p.kernel_stride, column, half, args.back, at, at);
    }
  }
}

}  // namespace nsa::cuda::portable
