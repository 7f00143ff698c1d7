// What the kernels of phi and of its gradients share: a ring of stages of 64 terms of a product, its reader and its
// writer, products of two warpgroups, tensor maps.
#pragma once

#include <algorithm>

#include "cuda/common/device.h"
#include "cuda/common/launch.cuh"
#include "cuda/sm90/common/epilogue.cuh"
#include "cuda/sm90/common/pipeline.cuh"
#include "cuda/sm90/common/tensor_map.h"
#include "cuda/sm90/common/wgmma.cuh"
#include "cuda/sm90/compress/compress.h"

namespace nsa::cuda::sm90::compress {

using sm90::make_tensor_map;

inline constexpr int kGroups = 2;  // computing warpgroups
inline constexpr int kThreads = (kGroups + 1) * 128;
inline constexpr int kPanelBytes = 64 * 128;  // 64 rows of 64 columns
inline constexpr int kReserved = 2048;        // barriers, and to align the tiles

enum class CompressBarrier {
  kBoth = 1,   // of both computing warpgroups, or, in another kernel:
  kGroup = 1,  // and 2, of each of them
};

/// The operands of a stage lie at `at` + stage * bytes.
template <int kStages>
struct Ring {
  std::uint64_t barriers[2 * kStages];
  int rows[kStages];  // of the four segments of a stage, a byte each

  __device__ __forceinline__ Pipeline<kStages> pipeline() const { return {shared_address(barriers)}; }
  /// Thread 0, before a __syncthreads. Every computing thread may have read or cleared rows of a stage.
  __device__ void init() const {
    pipeline().init(1, kGroups * 128);
    fence_mbarrier_init();
  }
};

/// A warp that has copies made.
template <int kStages>
struct RingWriter : PipelineState<kStages> {
  Ring<kStages>& ring;
  const int lane = threadIdx.x % 32;

  __device__ explicit RingWriter(Ring<kStages>& r) : ring(r) {}
  /// Waits for the next stage and returns the barrier for its copies.
  __device__ __forceinline__ std::uint32_t begin(int bytes, int rows = 0) {
    const std::uint32_t full = ring.pipeline().full(this->stage());
    if (lane == 0) {
      ring.pipeline().acquire(*this);
      ring.rows[this->stage()] = rows;
      mbarrier_arrive_expect_tx(full, bytes);
    }
    __syncwarp();
    return full;
  }
};

/// A computing warpgroup.
template <int kStages>
struct RingReader : PipelineState<kStages> {
  Ring<kStages>& ring;

  __device__ explicit RingReader(Ring<kStages>& r) : ring(r) {}
  __device__ __forceinline__ void wait_full() { ring.pipeline().wait_warp(*this); }
  __device__ __forceinline__ void consumer_release(int stage) { ring.pipeline().release(stage); }
  __device__ __forceinline__ void skip(int stages) {
    for (int i = 0; i < stages; ++i, this->advance()) {
      wait_full();
      consumer_release(this->stage());
    }
  }

  /// Sums over `steps` stages. ready(step, stage) sees a stage that has come; product(stage, k) issues its terms 16 k
  /// and on. A step's products are issued before the ones of the step before are waited for.
  template <class Ready, class Product>
  __device__ __forceinline__ void sum(int steps, const Ready& ready, const Product& product) {
    for (int step = 0; step < steps; ++step) {
      wait_full();
      ready(step, this->stage());
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) product(this->stage(), k);
      wgmma_commit();
      wgmma_wait<1>();
      if (step > 0) consumer_release(this->before().stage());
      this->advance();
    }
    wgmma_wait<0>();
    if (steps > 0) consumer_release(this->before().stage());
  }
};

/// Roles of the warps of a thread block: load() by one warp, compute() by the computing warpgroups.
template <int kComputeRegisters, class Load, class Compute>
__device__ __forceinline__ void in_roles(const Load& load, const Compute& compute) {
  if (warp_uniform(threadIdx.x / 32) < kGroups * 4) {
    warpgroup_reg_alloc<kComputeRegisters>();
    compute();
  } else {
    warpgroup_reg_dealloc<3 * 168 - kGroups * kComputeRegisters>();
    if (threadIdx.x < kGroups * 128 + 32) load();
  }
}

/// c += a * b, 16 terms: both operands in shared memory, b's N columns in panels of 64 rows.
template <class T, int N, bool kTransposedA>
__device__ __forceinline__ void multiply(float (&c)[N / 2], std::uint32_t a, std::uint32_t b) {
  constexpr int kFirst = N == 192 ? 128 : N;
  wgmma<T, kFirst, kTransposedA, true>(reinterpret_cast<float(&)[kFirst / 2]>(c[0]), full_descriptor(a),
                                       full_descriptor(b), 1);
  if constexpr (N > kFirst)
    wgmma<T, N - kFirst, kTransposedA, true>(reinterpret_cast<float(&)[(N - kFirst) / 2]>(c[kFirst / 2]),
                                             full_descriptor(a), full_descriptor(b + kFirst * 8), 1);
}
/// The same with a in registers.
template <class T, int N>
__device__ __forceinline__ void multiply(float (&c)[N / 2], const std::uint32_t* a, std::uint32_t b) {
  constexpr int kFirst = N == 192 ? 128 : N;
  wgmma<T, kFirst, true>(reinterpret_cast<float(&)[kFirst / 2]>(c[0]), a, full_descriptor(b), 1);
  if constexpr (N > kFirst)
    wgmma<T, N - kFirst, true>(reinterpret_cast<float(&)[(N - kFirst) / 2]>(c[kFirst / 2]), a,
                               full_descriptor(b + kFirst * 8), 1);
}

/// Every row of the sums c begins as a vector, of which pair(n) has columns n and n + 1.
template <int N, class Pair>
__device__ __forceinline__ void begin_sums(float (&c)[N], const Pair& pair) {
#pragma unroll
  for (int j = 0; j < N / 4; ++j) {
    const float2 x = pair(j * 8 + 2 * (threadIdx.x & 3));
    c[4 * j] = c[4 * j + 2] = x.x, c[4 * j + 1] = c[4 * j + 3] = x.y;
  }
#pragma unroll
  for (float& x : c) asm volatile("" : "+f"(x));  // in a register of its own before the products begin
}

/// Rows [first, last) of a panel become zeros. `thread` of `threads`.
__device__ __forceinline__ void clear_rows(std::uint32_t panel, int first, int last, int thread, int threads) {
  for (int i = first * 8 + thread; i < last * 8; i += threads)
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(panel + i * 16), "r"(0) : "memory");
}

/// Tokens a stride apart (make_step_tensor_map): those of most residues, and those of the residues that have one more.
struct TokenMaps {
  CUtensorMap most, rest;
  int residues;  // of `rest`

  /// The box of the tokens `token`, token + d, ... of a head.
  __device__ __forceinline__ void load(const Geometry& p, std::uint32_t to, int column, int token, int head, int batch,
                                       std::uint32_t barrier) const {
    const int step = token / p.kernel_stride, residue = token - step * p.kernel_stride;
    tma_load(to, residue < residues ? rest : most, column, residue, step, head, batch, barrier);
  }
};
inline cudaError_t make_tensor_maps(TokenMaps& maps, const CompressArgs& args, int box_rows) {
  const Geometry& g = args.geometry;
  const std::int64_t tokens = g.cu_q ? g.total_k : g.k_len;
  const auto make = [&](CUtensorMap& map, bool last) {
    return make_step_tensor_map(map, args.k, args.dim, g.kv_heads, tokens, tensor_batches(g), g.kernel_stride, box_rows,
                                last);
  };
  maps.residues = static_cast<int>(tokens % g.kernel_stride);
  const cudaError_t error = make(maps.most, false);
  return error == cudaSuccess ? make(maps.rest, true) : error;
}
/// Compressed rows; coordinates: column, head, row, batch.
inline cudaError_t make_tensor_map(CUtensorMap& map, const CompressArgs& args, const Strided& t, int columns,
                                   int box_rows) {
  const Geometry& g = args.geometry;
  return make_tensor_map(map, t, columns, g.kv_heads, args.compressed_per_batch, tensor_batches(g), 1, box_rows);
}

/// Boxes of all the rows of a tile, and of one of its segments.
struct TokenBoxes {
  TokenMaps all, segment;
};
struct RowBoxes {
  CUtensorMap all, segment;
};
inline cudaError_t make_boxes(TokenBoxes& boxes, const CompressArgs& args, int rows) {
  const cudaError_t error = make_tensor_maps(boxes.all, args, rows);
  return error == cudaSuccess ? make_tensor_maps(boxes.segment, args, CompressWork::kSegment) : error;
}
inline cudaError_t make_boxes(RowBoxes& boxes, const CompressArgs& args, const Strided& t, int columns, int rows) {
  const cudaError_t error = make_tensor_map(boxes.all, args, t, columns, rows);
  return error == cudaSuccess ? make_tensor_map(boxes.segment, args, t, columns, CompressWork::kSegment) : error;
}

/// The first lanes of a loading warp have a segment each. Where segments lie behind each other they come by one copy.
/// Empty ones may bring anything.
template <int kCount>
struct LaneSegments {
  static constexpr int kBytes = CompressWork::kSegment * 128;
  const int lane = threadIdx.x % 32;
  CompressSegment mine{};
  bool tokens_follow, rows_follow;

  __device__ __forceinline__ LaneSegments(const CompressSegment& segment, int stride) {
    if (lane < kCount) mine = segment;
    const bool same = mine.batch == __shfl_sync(0xffffffffu, mine.batch, 0);
    const int tokens = mine.token - __shfl_sync(0xffffffffu, mine.token, 0);
    const int rows = mine.row - __shfl_sync(0xffffffffu, mine.row, 0), before = lane * CompressWork::kSegment;
    tokens_follow = __all_sync(0xffffffffu, mine.rows == 0 || (same && tokens == before * stride));
    rows_follow = __all_sync(0xffffffffu, mine.rows == 0 || (same && rows == before));
  }
  /// Token `offset` of every block.
  __device__ __forceinline__ void load(const TokenBoxes& boxes, const Geometry& p, std::uint32_t to, int column,
                                       int offset, int head, std::uint32_t barrier) const {
    if (lane < (tokens_follow ? 1 : kCount))
      (tokens_follow ? boxes.all : boxes.segment)
          .load(p, to + lane * kBytes, column, mine.token + offset, head, mine.batch, barrier);
  }
  /// Compressed rows, or those `offset` behind them.
  __device__ __forceinline__ void load(const RowBoxes& boxes, std::uint32_t to, int column, int head,
                                       std::uint32_t barrier, int offset = 0) const {
    if (lane < (rows_follow ? 1 : kCount))
      tma_load(to + lane * kBytes, rows_follow ? boxes.all : boxes.segment, column, head, mine.row + offset, mine.batch,
               barrier);
  }
};

/// (P, rows, columns); coordinates: column, 0, row, set.
inline cudaError_t make_tensor_map(CUtensorMap& map, const CompressArgs& args, const Weights& w, int columns, int rows,
                                   int box_rows) {
  return make_tensor_map(map, {w.data, w.head, w.row, 0}, columns, 1, rows, args.shared ? 1 : args.geometry.kv_heads, 1,
                         box_rows);
}
/// The first error of several calls.
struct FirstError {
  cudaError_t error = cudaSuccess;
  void operator()(cudaError_t result) {
    if (error == cudaSuccess) error = result;
  }
};

}  // namespace nsa::cuda::sm90::compress
