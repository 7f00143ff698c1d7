// Skinny GEMM: loading the weight matrix takes nearly all the time. A thread block issues the loads of its whole share
// before griddepcontrol.wait, because weights depend on no kernel. The chain of kernels then has the latency of the
// activations only. The products run on the tensor cores: eight rows of the matrix are the columns of a tile, up to
// eight rows of activations its rows. The warps of a thread block split the depth and add their sums at the end.
#include "lm/layers/skinny_gemm_kernels.h"

#include <algorithm>

#include "lm/layers/rotary_copy.cuh"

namespace nsa::lm::fused {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kTileRows = 8;                      // rows of the matrix in a tile
constexpr int kWarpColumns = 128;                 // columns of a tile that a warp reads at a time
constexpr int kStep = kWarps * kWarpColumns;      // and all warps
constexpr int kChunks = kWarpColumns / kColumns;  // 16-byte vectors in that
constexpr int kMaxTiles = 3;  // tiles of a thread block, which then has one stage; or stages of its one tile
static_assert(kMaxRows <= kTileRows && kThreads == kRotaryThreads);

/// Thread blocks that share the columns of the matrix.
__host__ __device__ constexpr int groups_of(const SkinnyGemmArgs& args) {
  return (args.rows + kMaxRows - 1) / kMaxRows;
}

/// 16 bytes to shared memory; zeros unless `there`.
__device__ void copy16(uint4* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
__device__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int left>
__device__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}

/// sums (16, 8) += a (16, 16) b (8, 16)^T, of a the upper eight rows.
__device__ void multiply(float (&sums)[4], unsigned a0, unsigned a2, unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %6, %5, %6}, {%7, %8}, {%0, %1, %2, "
      "%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a2), "r"(0), "r"(b0), "r"(b1));
}

/// Elements from one row of activations to the next in shared memory: a phase of a load of 16 bytes reads two of them.
__host__ __device__ constexpr int row_stride(int depth) { return (depth + 63) / 64 * 64 + 32; }

/// Where a thread block keeps a chunk of a row of a tile: neighbours in different banks.
__device__ int slot(int row, int chunk) { return row * kChunks + (chunk ^ ((row & 1) << 2)); }

/// Writes `count` rows of the input to shared memory, each by the same share of the threads.
template <int most>
__device__ void prepare(const SkinnyGemmArgs& args, int first_row, int count, __nv_bfloat16* rows, float* parts) {
  constexpr int kTeam = kThreads / most, kStride = kTeam * kColumns;
  const int r = static_cast<int>(threadIdx.x) / kTeam, first = static_cast<int>(threadIdx.x) % kTeam * kColumns;
  const bool works = r < count;
  const std::int64_t in_row = first_row + r;
  __nv_bfloat16* const out = rows + r * row_stride(args.depth);
  if (args.input != RowInput::kNorm) {
    const auto bits = [](const void* from, std::int64_t element) {
      return *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(from) + element);
    };
    constexpr int kAtOnce = 2;  // loads that wait together
    for (int begin = first; works && begin < args.depth; begin += kAtOnce * kStride) {
      uint4 in[kAtOnce], other[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int c = begin + i * kStride;
        if (c >= args.depth) break;
        in[i] = bits(args.x, in_row * args.x_row + c);
        if (args.input == RowInput::kSwiglu) other[i] = bits(args.x, in_row * args.x_row + args.depth + c);
        if (args.input == RowInput::kSilu) other[i] = bits(args.bias, c);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int c = begin + i * kStride;
        if (c >= args.depth) break;
        Eight x = load(&in[i], 0);
        const Eight y = load(&other[i], 0);
        if (args.input == RowInput::kSwiglu) x = each([&](int j) { return silu(x.at[j]) * y.at[j]; });
        if (args.input == RowInput::kSilu) x = each([&](int j) { return silu(x.at[j] + y.at[j]); });
        store(out, c, x);
      }
    }
    return;
  }
  const std::int64_t at = in_row * args.depth;
  const auto sum = [&](int c) {
    Eight in = load(args.residual + at + c);
    if (!args.added) return in;
    const Eight added = load(args.added, at + c);
    return each([&](int i) { return in.at[i] + added.at[i]; });
  };
  const auto squares_of = [&](int c, const Eight& in) {
    if (args.added && blockIdx.x == 0) store(args.sum + at + c, in);
    float squares = 0;
    for (const float value : in.at) squares += value * value;
    return squares;
  };
  float squares = 0;
  Eight kept{}, weight{};  // of the first columns, which often are all
  if (works && first < args.depth) {
    kept = sum(first), weight = load(args.norm + first);
    squares = squares_of(first, kept);
  }
  for (int c = first + kStride; works && c < args.depth; c += kStride) squares += squares_of(c, sum(c));
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = 0;
  for (int i = 0; i < kTeam / 32; ++i) squares += parts[r * (kTeam / 32) + i];
  const float scale = rsqrtf(squares / static_cast<float>(args.depth) + args.eps);
  const auto normed = [&](const Eight& in, const Eight& by) {
    return each([&](int i) { return in.at[i] * scale * by.at[i]; });
  };
  if (works && first < args.depth) store(out, first, normed(kept, weight));
  for (int c = first + kStride; works && c < args.depth; c += kStride)
    store(out, c, normed(sum(c), load(args.norm + c)));
}

/// The output tile of a thread block: columns `block`, rows `group`.
template <int most, int kTiles>
__device__ void multiply_skinny(const SkinnyGemmArgs& args, int block, int group) {
  constexpr int kStages = kMaxTiles / kTiles, kBlockRows = kTiles * kTileRows;
  constexpr int kChains = kTiles == 1 ? 4 : 2;  // independent sums of a tile: the tensor cores' latency
  extern __shared__ uint4 memory[];
  __shared__ float parts[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int steps = (args.depth + kStep - 1) / kStep, stages = min(steps, kStages);
  uint4* const mine = memory + warp * stages * kBlockRows * kChunks;
  auto* const rows = reinterpret_cast<__nv_bfloat16*>(memory + kWarps * stages * kBlockRows * kChunks);
  const int first_row = block * kBlockRows;
  // The rows of activations of this thread block.
  const int first_input = most == kMaxRows ? group * kMaxRows : 0;
  const int count = most == kMaxRows ? min(args.rows - first_input, kMaxRows) : args.rows;

  // A lane copies the same columns of every second row.
  static_assert(kChunks == 16);
  const int copied = lane % kChunks * kColumns + warp * kWarpColumns;
  const auto* const from =
      static_cast<const __nv_bfloat16*>(args.matrix) + std::int64_t{first_row + lane / kChunks} * args.depth + copied;
  const auto read = [&](int step) {
    if (step < steps) {
#pragma unroll
      for (int i = 0; i < kBlockRows / 2; ++i) {
        const int row = i * 2 + lane / kChunks;
        const bool there = first_row + row < args.columns && step * kStep + copied < args.depth;
        copy16(mine + step % kStages * kBlockRows * kChunks + slot(row, lane % kChunks),
               from + step * kStep + i * 2 * args.depth, there);
      }
    }
    commit_copies();
  };
  launch_dependents();  // the next kernel's weights may come, too
#pragma unroll
  for (int i = 0; i < kStages; ++i) read(i);
  if (args.input == RowInput::kNorm) prefetch(args.norm, args.depth * std::int64_t{sizeof(float)});
  if (args.input == RowInput::kSilu) prefetch(args.bias, args.depth * std::int64_t{sizeof(__nv_bfloat16)});
  if (args.gate_bias) prefetch(args.gate_bias, args.columns * std::int64_t{sizeof(__nv_bfloat16)});
  griddepcontrol_wait();
  prepare<most>(args, first_input, count, rows, parts);
  __syncthreads();

  const int row = lane / 4, stride = row_stride(args.depth);
  float sums[kTiles][kChains][4] = {};
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    wait_copies<kStages - 1>();
    __syncwarp();
    const uint4* const stage = mine + step % kStages * kBlockRows * kChunks;
#pragma unroll
    for (int i = 0; i < kChunks / 4; ++i) {  // columns in an order of their own, the same in both factors
      const int chunk = i * 4 + lane % 4, at = step * kStep + warp * kWarpColumns + chunk * kColumns;
      uint4 x{};
      if (row < count && at < args.depth) x = *reinterpret_cast<const uint4*>(rows + row * stride + at);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const uint4 w = stage[t * kTileRows * kChunks + slot(row, chunk)];
        multiply(sums[t][2 * i % kChains], x.x, x.y, w.x, w.y);
        multiply(sums[t][(2 * i + 1) % kChains], x.z, x.w, w.z, w.w);
      }
    }
    if constexpr (kStages > 1) {
      __syncwarp();
      read(step + kStages);
    }
  }
  wait_copies<0>();
  __syncwarp();
  auto* const own = reinterpret_cast<float*>(mine);  // (rows, rows of the matrix)
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = 0;
#pragma unroll
      for (int chain = 0; chain < kChains; ++chain) sum += sums[t][chain][i];
      if (row < count) own[row * kBlockRows + t * kTileRows + lane % 4 * 2 + i] = sum;
    }
  }
  __syncthreads();
  static_assert(kMaxRows * kBlockRows <= kThreads);
  const int result = static_cast<int>(threadIdx.x), column = first_row + result % kBlockRows;
  if (result >= count * kBlockRows || column >= args.columns) return;
  float y = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i)
    y += reinterpret_cast<const float*>(memory + i * stages * kBlockRows * kChunks)[result];
  if (args.gate_bias) y = sigmoid(y + __bfloat162float(static_cast<const __nv_bfloat16*>(args.gate_bias)[column]));
  const std::int64_t to = std::int64_t{first_input + result / kBlockRows} * args.columns + column;
  static_cast<__nv_bfloat16*>(args.y)[to] = __float2bfloat16_rn(y);
}

constexpr int blocks_per_sm(int most) { return most <= 2 ? 4 : 2; }

template <int most, int kTiles>
__global__ void __launch_bounds__(kThreads, blocks_per_sm(most))
    skinny_gemm_kernel(const __grid_constant__ SkinnyGemmArgs args) {
  multiply_skinny<most, kTiles>(args, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y));
}

template <int most>
__global__ void __launch_bounds__(kThreads, blocks_per_sm(most))
    skinny_gemm_and_rotation(const __grid_constant__ SkinnyGemmArgs args, const __grid_constant__ RotaryCopyArgs copies,
                             const __grid_constant__ RotaryCopyGrid grid, unsigned gemm_blocks) {
  const unsigned blocks = gemm_blocks / static_cast<unsigned>(groups_of(args));
  if (blockIdx.x < gemm_blocks)
    return multiply_skinny<most, 1>(args, static_cast<int>(blockIdx.x % blocks), static_cast<int>(blockIdx.x / blocks));
  launch_dependents();
  griddepcontrol_wait();
  rotate_pairs(copies, grid, blockIdx.x - gemm_blocks);
}

template <int kTiles>
auto* kernel_of(int rows) {
  return rows == 1   ? skinny_gemm_kernel<1, kTiles>
         : rows == 2 ? skinny_gemm_kernel<2, kTiles>
         : rows <= 4 ? skinny_gemm_kernel<4, kTiles>
                     : skinny_gemm_kernel<kMaxRows, kTiles>;
}

auto* kernel_with_rotation_of(int rows) {
  return rows == 1   ? skinny_gemm_and_rotation<1>
         : rows == 2 ? skinny_gemm_and_rotation<2>
         : rows <= 4 ? skinny_gemm_and_rotation<4>
                     : skinny_gemm_and_rotation<kMaxRows>;
}

int column_blocks(const SkinnyGemmArgs& args, int block_rows) { return (args.columns + block_rows - 1) / block_rows; }

/// A kernel whose thread blocks have `block_rows` columns, in up to `most_stages` stages.
template <class... Params, class... More>
int launch_gemm(void (*kernel)(Params...), const SkinnyGemmArgs& args, int block_rows, int most_stages, dim3 blocks,
                void* stream, const More&... more) {
  const int stages = std::min((args.depth + kStep - 1) / kStep, most_stages);
  const int rows = std::min(args.rows, kMaxRows);
  const int memory = kWarps * stages * block_rows * kWarpColumns * 2 + rows * row_stride(args.depth) * 2;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory);
  // Thread blocks of several kernels share an SM.
  if (error == cudaSuccess)
    error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  return launch(kernel, blocks, kThreads, static_cast<std::size_t>(memory), stream, args.weights_ready, args, more...);
}

}  // namespace

int skinny_gemm(const SkinnyGemmArgs& args, void* stream) {
  int device = 0, sms = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  // Three tiles a thread block where one each would be more than two thread blocks on an SM.
  const bool several = args.depth <= kStep && args.columns > 2 * sms * kTileRows;
  const int block_rows = several ? kMaxTiles * kTileRows : kTileRows;
  auto* const kernel = several ? kernel_of<kMaxTiles>(args.rows) : kernel_of<1>(args.rows);
  const dim3 blocks(static_cast<unsigned>(column_blocks(args, block_rows)), static_cast<unsigned>(groups_of(args)));
  return launch_gemm(kernel, args, block_rows, several ? 1 : kMaxTiles, blocks, stream);
}

int skinny_gemm_and_rotary_copy(const SkinnyGemmArgs& args, const RotaryCopyArgs& copies, void* stream) {
  const RotaryCopyGrid grid(copies);
  const auto gemm_blocks = static_cast<unsigned>(column_blocks(args, kTileRows) * groups_of(args));
  return launch_gemm(kernel_with_rotation_of(args.rows), args, kTileRows, kMaxTiles,
                     dim3(gemm_blocks + grid.blocks(copies)), stream, copies, grid, gemm_blocks);
}

}  // namespace nsa::lm::fused
