// What append_compress is compiled for, its shared memory, and what both of its kinds of thread blocks use.
#pragma once

#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/common/pages.cuh"
#include "cuda/common/rotate.cuh"
#include "cuda/common/tile.cuh"
#include "cuda/sm90/decode/append/append_compress.h"

namespace nsa::cuda::sm90::decode {

inline constexpr int kThreads = 32 * kCompressWarps;
inline constexpr int kRows = 16 * kCompressTiles, kEntries = kRows - 1;  // rows 1 ... of a pass are completed blocks
inline constexpr int kSequences = 64;                                    // whose blocks are listed at a time
inline constexpr int kMaxCompleted = 16;                                 // of a sequence in a step
inline constexpr int kMaxGroups = 2;                                     // of sixteen hidden units, of a thread block
inline constexpr int kMaxPairs = 192 / 2 / kCompressRanks;               // of channels, of a thread block
inline constexpr int kMaxBiases = 16 * kMaxGroups;                       // of the first layer, of a thread block
inline constexpr int kTokenStage = kRows * kCompressStageRows * 2;       // bytes of raw tokens in a stage

/// A completed block: its sequence and its number; length before the step.
struct Entry {
  int sequence, block, before;
};

/// Dynamic shared memory: the ring of stages, overwritten by z and then by the second layer's sums.
struct CompressMemory {
  int ring, exchange;

  __host__ __device__ explicit CompressMemory(const CompressSide& side)
      : ring(side.clusters ? kCompressStages * (kCompressStageRows * side.hidden * 2 + kTokenStage) : 0),
        exchange(side.clusters ? kRows * (side.hidden + (side.mlp ? side.dim : 0)) * 4 : 0) {}
  int bytes() const { return std::max(ring, exchange); }
};

/// Chunk c of 16 bytes in row r of a stage of W1, whose rows are whole 128-byte lines.
__device__ __forceinline__ int weight_at(int r, int c, int row_bytes) {
  return r * row_bytes + ((c & ~7) | ((c ^ r) & 7)) * 16;
}
/// The same of raw tokens, whose rows are half lines.
__device__ __forceinline__ int token_at(int r, int c) { return r * 64 + ((c ^ (r >> 1)) & 3) * 16; }

/// The thread's number, of which compilers know that it is not negative.
__device__ __forceinline__ int thread_of_block() { return static_cast<int>(threadIdx.x % kThreads); }

/// The sum over kCompressRanks neighbouring lanes.
__device__ __forceinline__ float sum_of_ranks(float x) {
#pragma unroll
  for (int offset = kCompressRanks / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

/// Whether the sequence can take its new tokens: all of its pages exist. All threads of the thread block call it.
__device__ __forceinline__ bool has_capacity(const AppendCompressArgs& args, const StepRequest& request, int b) {
  return __syncthreads_and(request.possible && own_capacity(args, request, b));
}

/// A pair of channels (channel, channel + D / 2) of a compressed token to its page; of keys (side 0) turned.
template <bool kFloat8, class T>
__device__ __forceinline__ void store_pair_of_token(const AppendCompressArgs& args, int side, const T (&pair)[2], int b,
                                                    int block, int head, int channel) {
  T turned[2] = {pair[0], pair[1]};
  if (side == 0 && args.rotation.cos)
    rotate_pair(args.rotation, static_cast<std::int64_t>(block) * args.geometry.kernel_stride, channel, 1, false, pair,
                turned);
  const CompressSide& of = args.sides[side];
  const int half = of.dim / 2;
  if constexpr (kFloat8) {
    const std::uint32_t stored = to_float8(to_float(turned[0]), to_float(turned[1]), of.scales[head]);
    auto* const to = reinterpret_cast<unsigned char*>(of.out.at(b, block, head)) + channel;
    to[0] = static_cast<unsigned char>(stored), to[half] = static_cast<unsigned char>(stored >> 8);
  } else {
    T* const to = reinterpret_cast<T*>(of.out.at(b, block, head)) + channel;
    to[0] = turned[0], to[half] = turned[1];
  }
}

/// What the threads of a thread block share beside the dynamic memory.
template <class T>
struct CompressShared {
  unsigned short entries[kSequences * kMaxCompleted];  // kMaxCompleted times the sequence's slot, and which block
  int first[kSequences], before[kSequences];           // of the sequences: first block, length before the step
  int warp_counts[kCompressWarps];
  int fits[kRows * kTables / kCompressRanks];  // of some rows, in some tables; read by the cluster
  float biases[kMaxBiases + 2 * kMaxPairs];    // of both layers
  __align__(16) float sums[kRows * 16];
  __align__(16) T hidden[kRows * 16], w2[kMaxGroups][16 * 192];
};

}  // namespace nsa::cuda::sm90::decode
