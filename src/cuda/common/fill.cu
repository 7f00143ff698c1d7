#include "cuda/common/fill.h"

#include <algorithm>

#include "cuda/common/launch.cuh"

namespace nsa::cuda {

namespace {

/// Packed rows past the last sequence: o = 0, lse = -inf, indices = -1, gradients = 0. Also fills whole tensors.
struct FillArgs {
  const int* cu = nullptr;  // null: all rows
  int sequences = 0;
  bool compressed = false;  // the rows are compressed tokens of the sequences
  int kernel_size = 0, kernel_stride = 0;
  Strided rows;  // of 4-byte or 2-byte elements, (rows, heads, columns)
  int count = 0, heads = 0, columns = 0, element = 0;
  unsigned value = 0;
};

__global__ void __launch_bounds__(128) fill_tail(const __grid_constant__ FillArgs args) {
  __shared__ int begin;
  if (threadIdx.x == 0) begin = args.compressed ? 0 : args.cu[args.sequences];
  __syncthreads();
  if (args.compressed) {
    int mine = 0;
    for (int i = threadIdx.x; i < args.sequences; i += blockDim.x) {
      const int length = args.cu[i + 1] - args.cu[i];
      mine += length < args.kernel_size ? 0 : (length - args.kernel_size) / args.kernel_stride + 1;
    }
    if (mine) atomicAdd(&begin, mine);
    __syncthreads();
  }
  for (int row = max(begin, 0) + blockIdx.x; row < args.count; row += gridDim.x) {
    for (int i = threadIdx.x; i < args.heads * args.columns; i += blockDim.x) {
      const std::int64_t at = row * args.rows.row + i / args.columns * args.rows.head + i % args.columns;
      if (args.element == 4) {
        static_cast<unsigned*>(args.rows.data)[at] = args.value;
      } else {
        static_cast<unsigned short*>(args.rows.data)[at] = static_cast<unsigned short>(args.value);
      }
    }
  }
}

}  // namespace

Status fill(const TensorView& t, const TensorView& cu, unsigned value, const NSAConfig* compressed,
            cudaStream_t stream) {
  if (!t.defined() || !cu.defined() || t.numel() == 0) return {};
  FillArgs args;
  args.cu = cu.as<const int>();
  args.sequences = to_int(cu.size(0)) - 1;
  if (compressed) {
    args.compressed = true;
    args.kernel_size = compressed->kernel_size;
    args.kernel_stride = compressed->kernel_stride;
  }
  args.element = to_int(static_cast<std::int64_t>(size_of(t.dtype)));
  args.value = value;
  if (t.rank == 2) {  // lse (H, total)
    args.rows = {t.data, 0, t.stride[1], t.stride[0]};
    args.count = to_int(t.size(1));
    args.heads = to_int(t.size(0));
    args.columns = 1;
  } else {
    args.rows = strided(t);
    args.count = to_int(t.size(0));
    args.heads = to_int(t.size(1));
    args.columns = to_int(t.size(2));
  }
  return status_of(launch(fill_tail, static_cast<unsigned>(std::min(args.count, 512)), 128, 0, stream, args),
                   "fill_tail");
}

}  // namespace nsa::cuda
