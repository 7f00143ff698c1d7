// A thread block for each sequence: of a step's time their latency counts.
#include "lm/generate/step_kernels.h"

#include <cuda_fp16.h>

#include <cmath>

#include "lm/layers/columns.cuh"

namespace nsa::lm::fused {
namespace {

constexpr int kInputThreads = 256;

__global__ void __launch_bounds__(kInputThreads) begin_step(const __grid_constant__ StepInputsArgs args) {
  launch_dependents();  // whose weights may come: all that is ahead of this kernel has ended
  const auto row = static_cast<std::int64_t>(blockIdx.x);
  const std::int64_t position = args.positions[row], slot = min(position, args.capacity - 1);
  const float* const embedding = args.embedding + args.tokens[row] * args.width;
  for (int c = static_cast<int>(threadIdx.x); c < args.width; c += kInputThreads)
    args.x[row * args.width + c] = embedding[c];
  for (int c = static_cast<int>(threadIdx.x); c < args.half; c += kInputThreads) {
    args.rotation_cos[row * args.half + c] = args.cos[slot * args.half + c];
    args.rotation_sin[row * args.half + c] = args.sin[slot * args.half + c];
  }
  __syncthreads();  // all have read the position
  if (threadIdx.x > 0) return;
  const std::int64_t length = position + args.num_new[row];
  args.positions[row] = length;
  if (!args.first_slots) return;
  args.slots[row] = slot + args.first_slots[row];
  args.lengths[row] = static_cast<int>(length);
}

/// The two highest of some columns; of equals the lower column comes first.
struct Highest {
  float first, second;
  int column;
  bool finite;
};
__device__ Highest merge(const Highest& a, const Highest& b) {
  const bool a_first = a.first > b.first || (a.first == b.first && a.column < b.column);
  const Highest &high = a_first ? a : b, &low = a_first ? b : a;
  return {high.first, fmaxf(high.second, low.first), high.column, a.finite && b.finite};
}
__device__ Highest merge_lanes(Highest x) {
  for (int step = 16; step > 0; step /= 2) {
    const auto other = [step](auto value) { return __shfl_xor_sync(0xffffffffu, value, step); };
    x = merge(x, {other(x.first), other(x.second), other(x.column), other(static_cast<int>(x.finite)) != 0});
  }
  return x;
}

constexpr int kRowThreads = 1024;

template <class T>
__global__ void __launch_bounds__(kRowThreads) most_likely_of_rows(const MostLikelyArgs args) {
  __shared__ Highest parts[kRowThreads / 32];
  griddepcontrol_wait();
  const T* const logits = static_cast<const T*>(args.logits) + blockIdx.x * args.row;
  Highest mine{-INFINITY, -INFINITY, args.columns, true};
  for (int column = static_cast<int>(threadIdx.x); column < args.columns; column += kRowThreads) {
    const auto logit = static_cast<float>(logits[column]);
    mine = merge(mine, {logit, -INFINITY, column, isfinite(logit)});
  }
  mine = merge_lanes(mine);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  mine = merge_lanes(parts[threadIdx.x]);
  if (threadIdx.x > 0) return;
  double* const out = args.out + blockIdx.x;
  out[0] = mine.column;
  out[args.rows] = static_cast<double>(mine.first) - static_cast<double>(mine.second);
  out[2 * args.rows] = mine.finite ? 1 : 0;
  args.tokens[blockIdx.x] = mine.column;
}

}  // namespace

int step_inputs(const StepInputsArgs& args, void* stream) {
  if (args.rows == 0) return cudaSuccess;
  return launch(begin_step, static_cast<unsigned>(args.rows), kInputThreads, 0, stream, false, args);
}

int most_likely(const MostLikelyArgs& args, void* stream) {
  if (args.rows == 0) return cudaSuccess;
  auto* const kernel = args.type == LogitType::kFloat  ? most_likely_of_rows<float>
                       : args.type == LogitType::kBf16 ? most_likely_of_rows<__nv_bfloat16>
                                                       : most_likely_of_rows<__half>;
  return launch(kernel, static_cast<unsigned>(args.rows), kRowThreads, 0, stream, true, args);
}

}  // namespace nsa::lm::fused
