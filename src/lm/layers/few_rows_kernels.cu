// Reading the matrix is the work: each warp streams rows of it, 16 bytes a lane, and multiplies them with the few rows
// of the other factor, which lie in shared memory. Weights depend on no kernel: they are on their way to the
// second-level cache before this one waits for the kernel ahead of it in the stream.
#include "lm/layers/few_rows_kernels.h"

#include "lm/layers/columns.cuh"

namespace nsa::lm::fused {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kAhead = 8;             // loads of a lane that are under way together
constexpr int kStep = 32 * kColumns;  // columns of the matrix that a warp reads at a time

__device__ void wait_for_launcher() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ uint4 load_weights(const FewRowsArgs& args, int row, int column) {
  if (row >= args.columns || column >= args.depth) return {};
  return __ldg(reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(args.matrix) +
                                              std::int64_t{row} * args.depth + column));
}

/// A row of the matrix into the second-level cache, by a warp.
__device__ void prefetch_weights(const FewRowsArgs& args, int row) {
  constexpr int kLine = 64;  // columns
  if (row >= args.columns) return;
  const auto* const from = static_cast<const __nv_bfloat16*>(args.matrix) + std::int64_t{row} * args.depth;
  for (int c = static_cast<int>(threadIdx.x) % 32 * kLine; c < args.depth; c += 32 * kLine) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + c) : "memory");
  }
}

/// Writes the rows of the input to shared memory.
__device__ void prepare(const FewRowsArgs& args, __nv_bfloat16* rows, float* parts) {
  const int first = static_cast<int>(threadIdx.x) * kColumns;
  for (int r = 0; r < args.rows; ++r) {
    __nv_bfloat16* const out = rows + r * args.depth;
    const std::int64_t x = r * args.x_row, at = std::int64_t{r} * args.depth;
    if (args.input != RowInput::kNorm) {
      for (int c = first; c < args.depth; c += kThreads * kColumns) {
        Eight in = load(args.x, x + c);
        if (args.input == RowInput::kSwiglu) {
          const Eight up = load(args.x, x + args.depth + c);
          in = each([&](int i) { return silu(in.at[i]) * up.at[i]; });
        } else if (args.input == RowInput::kSilu) {
          const Eight bias = load(args.bias, c);
          in = each([&](int i) { return silu(in.at[i] + bias.at[i]); });
        }
        store(out, c, in);
      }
      continue;
    }
    const auto sum = [&](int c) {
      Eight in = load(args.residual + at + c);
      if (!args.added) return in;
      const Eight added = load(args.added, at + c);
      return each([&](int i) { return in.at[i] + added.at[i]; });
    };
    float squares = 0;
    for (int c = first; c < args.depth; c += kThreads * kColumns) {
      const Eight in = sum(c);
      if (args.added && blockIdx.x == 0) store(args.sum + at + c, in);
      for (const float value : in.at) squares += value * value;
    }
    const float scale = rsqrtf(block_sum(squares, parts) / static_cast<float>(args.depth) + args.eps);
    for (int c = first; c < args.depth; c += kThreads * kColumns) {
      const Eight in = sum(c), weight = load(args.norm + c);
      store(out, c, each([&](int i) { return in.at[i] * scale * weight.at[i]; }));
    }
  }
}

template <int most>
__global__ void __launch_bounds__(kThreads) few_rows_product(const __grid_constant__ FewRowsArgs args) {
  extern __shared__ uint4 memory[];
  __shared__ float parts[kWarps];
  auto* const rows = reinterpret_cast<__nv_bfloat16*>(memory);
  const int lane = static_cast<int>(threadIdx.x) % 32 * kColumns;
  const int column = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  prefetch_weights(args, column);
  wait_for_launcher();
  uint4 weights[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) weights[i] = load_weights(args, column, i * kStep + lane);
  prepare(args, rows, parts);
  __syncthreads();
  launch_dependents();

  float sums[most] = {};
  for (int c = lane; c < args.depth; c += kAhead * kStep) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = c + i * kStep;
      const uint4 bits = weights[i];
      weights[i] = load_weights(args, column, at + kAhead * kStep);
      if (at >= args.depth) continue;
      const Eight w = load(&bits, 0);
#pragma unroll
      for (int r = 0; r < most; ++r) {
        if (r >= args.rows) break;
        const Eight x = load(rows, r * args.depth + at);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) sums[r] += w.at[j] * x.at[j];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < most; ++r) {
    for (int step = 16; step > 0; step /= 2) sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], step);
  }
  if (lane != 0 || column >= args.columns) return;
  for (int r = 0; r < most; ++r) {
    if (r >= args.rows) break;
    float y = sums[r];
    if (args.gate_bias) y = sigmoid(y + __bfloat162float(static_cast<const __nv_bfloat16*>(args.gate_bias)[column]));
    static_cast<__nv_bfloat16*>(args.y)[std::int64_t{r} * args.columns + column] = __float2bfloat16_rn(y);
  }
}

}  // namespace

int few_rows(const FewRowsArgs& args, void* stream) {
  int device = 0, major = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>((args.columns + kWarps - 1) / kWarps), config.blockDim = kThreads;
  config.dynamicSmemBytes = static_cast<std::size_t>(args.rows) * static_cast<std::size_t>(args.depth) * 2;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute, config.numAttrs = major >= 9 ? 1 : 0;
  auto* const kernel = args.rows == 1   ? few_rows_product<1>
                       : args.rows == 2 ? few_rows_product<2>
                       : args.rows <= 4 ? few_rows_product<4>
                                        : few_rows_product<kMostRows>;
  return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace nsa::lm::fused
