// The queries of a cluster: by way of the ring to the registers of each warp.
#pragma once

#include <type_traits>

#include "cuda/common/softmax.cuh"
#include "cuda/common/tile.cuh"
#include "cuda/sm90/common/ptx.cuh"
#include "cuda/sm90/decode/attend/config.cuh"

namespace nsa::cuda::sm90::decode {

/// Fragments of queries from bfloat16 to float16, multiplied by a power of two so that the largest number of a tile has
/// the exponent 14 (NaN and infinities aside). Returns it. All warps that have the tile get the same.
template <int kSteps>
__device__ __forceinline__ float to_half_queries(std::uint32_t (&q)[kSteps][4]) {
  unsigned exponents = 0;  // two, one more than they are; 0 of what is not finite
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) exponents = __vmaxu2(exponents, ((q[k][i] & 0x7f807f80u) + 0x00800080u) & 0x7f807f80u);
  const unsigned of_lane = max(exponents & 0xffffu, exponents >> 16) >> 7;
  const unsigned largest = max(__reduce_max_sync(0xffffffffu, of_lane), 16u) - 1;
  const float factor = __uint_as_float((268 - largest) << 23);  // 2^(14 - (largest - 127))
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack(Bf16{}, q[k][i]);
      q[k][i] = pack(Half{}, x.x * factor, x.y * factor);
    }
  return factor;
}

/// The row of a sequence's query; one of another query where the step cannot serve it. Read again rather than kept.
__device__ __forceinline__ int row_of_query(const StepGeometry& p, int b, int query) {
  return p.starts ? min(max(p.starts[b] + query, 0), p.rows - 1) : query;
}

/// A thread that loads the queries of its cluster, and reads the fragments of its warp's tile.
template <class S>
struct QueryLoader {
  const StepAttendArgs& args;
  int b, query, kv_head;
  int lane, tile, split;
  std::uint32_t ring;
  char* fragments;  // of e4m3: where the lane's are in shared memory

  /// Begins the copies of the queries of a cluster to the ring.
  __device__ __forceinline__ void copy(int cluster_id) const {
    const StepGeometry& p = args.geometry;
    const int at = row_of_query(p, b, query);
#pragma unroll
    for (int i = threadIdx.x; i < S::kRows * (S::kKeyDim / 8); i += S::kThreads) {
      const int r = i / (S::kKeyDim / 8), chunk = i % (S::kKeyDim / 8), head = cluster_id * S::kRows + r;
      const typename S::Input* const from =
          args.q.template at<typename S::Input>(b, at, kv_head * p.group + min(head, p.group - 1));
      copy16(ring + r / kTileRows * Tile<typename S::Input, S::kKeyDim>::bytes(kTileRows) +
                 Tile<typename S::Input, S::kKeyDim>::at(r % kTileRows, chunk / 8 * 128, chunk % 8 * 16),
             from + chunk * 8, head < p.group);
    }
    commit_copies();
  }

  /// The fragments of what copy() has loaded, and the factor of their scores.
  __device__ __forceinline__ void read(QueryFragments<S>& q, float& scale) const {
    wait_copies<0>();
    __syncthreads();
    const std::uint32_t sign = args.scale < 0 ? 0x80008000u : 0;  // negative queries instead
    scale = args.scale;
    if constexpr (S::kFloat8) {
      // Four neighbouring channels of a row to a lane, as it has them of a key.
#pragma unroll
      for (int k = 0; k < S::kKeyDim / 16; ++k)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint2 x = *reinterpret_cast<const uint2*>(
              step_memory + tile * Tile<typename S::Input, S::kKeyDim>::bytes(kTileRows) +
              Tile<typename S::Input, S::kKeyDim>::at(lane / 4 + 8 * i, k * 32, lane % 4 * 8));
          q[k][i] = x.x ^ sign, q[k][2 + i] = x.y ^ sign;
        }
      scale *= args.key_scales[kv_head];
      if constexpr (!std::is_same_v<typename S::Input, Half>) scale /= to_half_queries(q);
    } else {
#pragma unroll
      for (int k = 0; k < S::kKeyDim / 16; ++k) {
        Tile<typename S::Input, S::kKeyDim>::load_a(
            q[k], ring + tile * Tile<typename S::Input, S::kKeyDim>::bytes(kTileRows), 0, k, lane);
#pragma unroll
        for (int i = 0; i < 4; ++i) q[k][i] ^= sign;
      }
    }
    scale = positive_scale(scale);
    // Of e4m3 in shared memory, each lane its own: four thread blocks have no registers for them.
    if (S::kFloat8 && split == 0) {
#pragma unroll
      for (int k = 0; k < S::kKeyDim / 16; ++k)
        *reinterpret_cast<uint4*>(fragments + k * 512) = make_uint4(q[k][0], q[k][1], q[k][2], q[k][3]);
    }
    __syncthreads();  // the ring is free
  }
};

/// Gates of the cluster's heads, with the scales of e4m3 values: a thread for each row.
template <class S, class T, class RowOf>
__device__ __forceinline__ void load_gates(const StepAttendArgs& args, RowMemory<S>& rows, int b, const RowOf& row,
                                           int kv_head, int first_head, int num_heads) {
  if (threadIdx.x >= S::kRows) return;
  const int at = row(), head = kv_head * args.geometry.group + first_head + static_cast<int>(threadIdx.x);
#pragma unroll
  for (int branch = 0; branch < kBranches; ++branch)
    rows.gates[branch][threadIdx.x] =
        static_cast<int>(threadIdx.x) < num_heads ? to_float(args.gates.template at<T>(b, at, head)[branch]) : 0;
  if constexpr (S::kFloat8)
#pragma unroll
    for (int branch = 0; branch < kBranches; ++branch) rows.gates[branch][threadIdx.x] *= args.value_scales[kv_head];
}

}  // namespace nsa::cuda::sm90::decode
