#include "cuda/common/fill.h"

#include <algorithm>

#include "cuda/common/launch.cuh"

namespace nsa::cuda {

namespace {

constexpr int kMaxTensors = 8;

/// Packed rows past the last sequence: o = 0, lse = -inf, indices = -1, gradients = 0.
struct FillArgs {
  struct Tensor {
    Strided rows;  // of 4-byte or 2-byte elements, (rows, heads, columns)
    int count = 0, heads = 0, columns = 0, element = 0;
    unsigned value = 0;
  };
  const int* cu = nullptr;
  int sequences = 0;
  bool compressed = false;  // the rows are compressed tokens of the sequences
  int kernel_size = 0, kernel_stride = 0;
  Tensor tensors[kMaxTensors];
};

/// Grid y: tensor.
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
  const FillArgs::Tensor& t = args.tensors[blockIdx.y];
  for (int row = max(begin, 0) + blockIdx.x; row < t.count; row += gridDim.x) {
    for (int i = threadIdx.x; i < t.heads * t.columns; i += blockDim.x) {
      const std::int64_t at = row * t.rows.row + i / t.columns * t.rows.head + i % t.columns;
      if (t.element == 4) {
        static_cast<unsigned*>(t.rows.data)[at] = t.value;
      } else {
        static_cast<unsigned short*>(t.rows.data)[at] = static_cast<unsigned short>(t.value);
      }
    }
  }
}

}  // namespace

Status fill(std::initializer_list<Filled> tensors, const TensorView& cu, const NSAConfig* compressed,
            cudaStream_t stream) {
  if (!cu.defined()) return {};
  FillArgs args;
  args.cu = cu.as<const int>();
  args.sequences = to_int(cu.size(0)) - 1;
  if (compressed) {
    args.compressed = true;
    args.kernel_size = compressed->kernel_size;
    args.kernel_stride = compressed->kernel_stride;
  }
  unsigned count = 0, rows = 0;
  for (const auto& [t, value] : tensors) {
    if (!t.defined() || t.numel() == 0) continue;
    FillArgs::Tensor& to = args.tensors[count++];
    to.element = to_int(static_cast<std::int64_t>(size_of(t.dtype)));
    to.value = value;
    if (t.rank == 2) {  // lse (H, total)
      to.rows = {t.data, 0, t.stride[1], t.stride[0]};
      to.count = to_int(t.size(1)), to.heads = to_int(t.size(0)), to.columns = 1;
    } else {
      to.rows = strided(t);
      to.count = to_int(t.size(0)), to.heads = to_int(t.size(1)), to.columns = to_int(t.size(2));
    }
    rows = std::max(rows, static_cast<unsigned>(to.count));
  }
  if (count == 0) return {};
  return status_of(launch(fill_tail, dim3(std::min(rows, 512u), count), 128, 0, stream, args), "fill_tail");
}

}  // namespace nsa::cuda
