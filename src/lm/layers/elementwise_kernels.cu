// Everything here is limited by the memory's bandwidth: threads load and store 16 bytes of bfloat16 at a time. All are
// dependent launches, for the rows of a decode step.
#include "lm/layers/elementwise_kernels.h"

#include <algorithm>
#include <cmath>

#include "lm/layers/rotary_copy.cuh"

namespace nsa::lm::fused {
namespace {

constexpr int kThreads = 256;

__device__ std::int64_t own_index() { return std::int64_t{blockIdx.x} * kThreads + threadIdx.x; }

static_assert(kThreads == kRotaryThreads);

__global__ void __launch_bounds__(kThreads)
    rotate_heads(const __grid_constant__ RotaryCopyArgs args, const __grid_constant__ RotaryCopyGrid grid) {
  launch_dependents();
  griddepcontrol_wait();
  rotate_pairs(args, grid, blockIdx.x);
}

/// The derivative of silu.
__device__ float silu_slope(float x) {
  const float s = sigmoid(x);
  return s * (1 + x * (1 - s));
}

__global__ void __launch_bounds__(kThreads) swiglu_columns(const SwigluArgs args) {
  griddepcontrol_wait();
  const std::int64_t per_row = args.width / kColumns, row = own_index() / per_row;
  if (row >= args.rows) return;
  const std::int64_t column = own_index() % per_row * kColumns, from = row * 2 * args.width + column;
  const Eight gate = load(args.x, from), up = load(args.x, from + args.width);
  if (!args.d_y) {
    store(args.out, row * args.width + column, each([&](int i) { return silu(gate.at[i]) * up.at[i]; }));
    return;
  }
  const Eight d = load(args.d_y, row * args.width + column);
  store(args.out, from, each([&](int i) { return d.at[i] * up.at[i] * silu_slope(gate.at[i]); }));
  store(args.out, from + args.width, each([&](int i) { return d.at[i] * silu(gate.at[i]); }));
}

/// A thread block takes a row at a time, a thread `groups` groups of columns. f(group, column): this thread's.
template <int groups, class F>
__device__ void for_columns(std::int64_t width, const F& f) {
#pragma unroll
  for (int j = 0; j < groups; ++j) {
    const unsigned column = (j * blockDim.x + threadIdx.x) * kColumns;
    if (column < width) f(j, column);
  }
}

template <int groups>
__global__ void __launch_bounds__(kThreads) norm_rows(const NormArgs args) {
  prefetch(args.weight, args.width * std::int64_t{sizeof(float)});
  griddepcontrol_wait();
  __shared__ float parts[kThreads / 32];
  const float per_column = 1 / static_cast<float>(args.width);
  for (std::int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    Eight x[groups];
    float squares = 0;
    for_columns<groups>(args.width, [&](int j, unsigned column) {
      const std::int64_t at = row * args.width + column;
      x[j] = load(args.x + at);
      if (args.added) {
        const Eight added = load(args.added, at);
        x[j] = each([&](int i) { return x[j].at[i] + added.at[i]; });
        store(args.sum + at, x[j]);
      }
      for (const float value : x[j].at) squares += value * value;
    });
    const float scale = rsqrtf(block_sum(squares, parts) * per_column + args.eps);
    if (threadIdx.x == 0) args.scale[row] = scale;
    for_columns<groups>(args.width, [&](int j, unsigned column) {
      const Eight weight = load(args.weight + column);
      store(args.y, row * args.width + column, each([&](int i) { return x[j].at[i] * scale * weight.at[i]; }));
    });
  }
}

/// dx = s (w dy) - x s^3 mean(x w dy) + dsum, dw = sum over rows of dy x s, with s the row's scale.
template <int groups>
__global__ void __launch_bounds__(kThreads) norm_rows_backward(const NormArgs args) {
  griddepcontrol_wait();
  __shared__ float parts[kThreads / 32];
  const float per_column = 1 / static_cast<float>(args.width);
  Eight d_weight[groups] = {};
  for (std::int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    Eight x[groups], d[groups], d_sum[groups] = {};  // d: weight times the gradient
    const float scale = args.scale[row];
    float dot = 0;
    for_columns<groups>(args.width, [&](int j, unsigned column) {
      x[j] = load(args.x + row * args.width + column);
      d[j] = load(args.d_y, row * args.width + column);
      if (args.d_sum) d_sum[j] = load(args.d_sum + row * args.width + column);
      const Eight weight = load(args.weight + column);
      for (int i = 0; i < kColumns; ++i) {
        d_weight[j].at[i] += d[j].at[i] * x[j].at[i] * scale;
        d[j].at[i] *= weight.at[i];
        dot += x[j].at[i] * d[j].at[i];
      }
    });
    const float pull = block_sum(dot, parts) * scale * scale * scale * per_column;
    for_columns<groups>(args.width, [&](int j, unsigned column) {
      const std::int64_t at = row * args.width + column;
      const Eight d_x = each([&](int i) { return scale * d[j].at[i] - x[j].at[i] * pull + d_sum[j].at[i]; });
      store(args.d_x + at, d_x);
      if (args.d_added) store(args.d_added, at, d_x);
    });
  }
  for_columns<groups>(args.width, [&](int j, unsigned column) {
    store(args.d_weights + blockIdx.x * args.width + column, d_weight[j]);
  });
}

template <int groups>
__global__ void __launch_bounds__(kThreads) biased_silu_rows(const BiasedSiluArgs args) {
  griddepcontrol_wait();
  for (std::int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    for_columns<groups>(args.width, [&](int, unsigned column) {
      const Eight x = load(args.x, row * args.row + column), bias = load(args.bias, column);
      store(args.y, row * args.width + column, each([&](int i) { return silu(x.at[i] + bias.at[i]); }));
    });
  }
}

template <int groups>
__global__ void __launch_bounds__(kThreads) biased_silu_rows_backward(const BiasedSiluArgs args) {
  griddepcontrol_wait();
  Eight d_bias[groups] = {};
  for (std::int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    for_columns<groups>(args.width, [&](int j, unsigned column) {
      const Eight x = load(args.x, row * args.row + column), bias = load(args.bias, column);
      const Eight d_y = load(args.d_y, row * args.width + column);
      const Eight d_x = each([&](int i) { return d_y.at[i] * silu_slope(x.at[i] + bias.at[i]); });
      for (int i = 0; i < kColumns; ++i) d_bias[j].at[i] += d_x.at[i];
      store(args.d_x, row * args.width + column, d_x);
    });
  }
  for_columns<groups>(
      args.width, [&](int j, unsigned column) { store(args.d_biases + blockIdx.x * args.width + column, d_bias[j]); });
}

unsigned blocks_for(std::int64_t items) { return static_cast<unsigned>((items + kThreads - 1) / kThreads); }

/// Of a thread block that has a row at a time: no more than the row has columns for.
unsigned row_threads(std::int64_t width) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((width / kColumns + 31) / 32 * 32, 32, kThreads));
}

/// One group of columns a thread, where that is enough, lets more thread blocks share an SM.
constexpr std::int64_t kOneGroup = kThreads * kColumns;
constexpr int kMaxGroups = static_cast<int>(kWidest / kOneGroup);

template <class Args>
int launch_rows(const Args& args, void* stream, void (*narrow)(Args), void (*wide)(Args)) {
  if (args.rows == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(num_partials(args.rows, args.width));
  return launch(args.width <= kOneGroup ? narrow : wide, blocks, row_threads(args.width), 0, stream, true, args);
}

}  // namespace

int rotary_copy(const RotaryCopyArgs& args, void* stream) {
  if (args.rows == 0) return cudaSuccess;
  const RotaryCopyGrid grid(args);
  return launch(rotate_heads, grid.blocks(args), kThreads, 0, stream, true, args, grid);
}

int swiglu(const SwigluArgs& args, void* stream) {
  if (args.rows == 0) return cudaSuccess;
  return launch(swiglu_columns, blocks_for(args.rows * (args.width / kColumns)), kThreads, 0, stream, true, args);
}

// Enough for every SM, and the same number on every device.
std::int64_t num_partials(std::int64_t rows, std::int64_t width) {
  return std::min<std::int64_t>(rows, (1 << 17) / row_threads(width));
}

int norm(const NormArgs& args, void* stream) {
  return args.d_y ? launch_rows(args, stream, norm_rows_backward<1>, norm_rows_backward<kMaxGroups>)
                  : launch_rows(args, stream, norm_rows<1>, norm_rows<kMaxGroups>);
}

int biased_silu(const BiasedSiluArgs& args, void* stream) {
  return args.d_y ? launch_rows(args, stream, biased_silu_rows_backward<1>, biased_silu_rows_backward<kMaxGroups>)
                  : launch_rows(args, stream, biased_silu_rows<1>, biased_silu_rows<kMaxGroups>);
}

}  // namespace nsa::lm::fused
