// The stores of a query's outputs.
#pragma once

#include "cuda/sm90/decode/attend/cluster_merge.cuh"
#include "cuda/sm90/decode/attend/config.cuh"

namespace nsa::cuda::sm90::decode {

/// Where the outputs of a query go.
template <class S, class T>
struct OutputRows {
  const StepAttendArgs& args;
  int b, row, kv_head;
  int first_head, num_heads;  // of the cluster
  int lane;
  bool fits;  // else they are zeros

  /// Eight columns of a tile that are the lane's: those of two of its rows.
  __device__ __forceinline__ void store(int tile, int column, const float (&o)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = tile * kTileRows + lane / 4 + 8 * i;
      if (head >= num_heads) continue;
      T* const to = args.o.template at<T>(b, row, kv_head * args.geometry.group + first_head + head);
      const float x = fits ? o[2 * i] : 0, y = fits ? o[2 * i + 1] : 0;
      if constexpr (S::kFloat8) {  // every other one of sixteen channels
        T* const mine = to + (column / 2 * 16 + column % 2 + 4 * (lane & 3));
        mine[0] = from_float<T>(x), mine[2] = from_float<T>(y);
      } else {
        store_pair(to + column * 8 + 2 * (lane & 3), x, y);
      }
    }
  }
};

/// Stores the outputs where one thread block has all keys of a query: each warp has all of its columns. `known` has the
/// other branches' share, `own` the sums of the selection.
template <class S, class T>
__device__ __forceinline__ void store_columns_of_warp(const StepWarp<S>& w, const OutputRows<S, T>& out,
                                                      const OwnSums<S>& known, const OwnSums<S>& own) {
  float share[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = w.tile * kTileRows + w.lane / 4 + 8 * i;
    const float sum = w.rows.branches[kSelected][r].y;
    share[i] = sum == 0 ? 0 : w.rows.gates[kSelected][r] * __frcp_rn(sum);
  }
#pragma unroll
  for (int n = 0; n < S::kOwnColumns; ++n) {
    const float o[4] = {known[n][0] + own[n][0] * share[0], known[n][1] + own[n][1] * share[0],
                        known[n][2] + own[n][2] * share[1], known[n][3] + own[n][3] * share[1]};
    out.store(w.tile, w.split * S::kOwnColumns + n, o);
  }
}

/// The same where a cluster shares out the keys: each thread block stores Dv / kRanks columns, of what all of them
/// have. The caller syncs before its memory ends.
template <class S, class T>
__device__ __forceinline__ void store_columns_of_rank(const StepWarp<S>& w, const OutputRows<S, T>& out,
                                                      const OwnSums<S>& known, const OwnSums<S>& own, int rank) {
  constexpr int kRanks = S::kRanks, kTiles = S::kTiles;
  auto* const known_outputs = reinterpret_cast<float4*>(step_memory);  // (tile, eight columns, lane)
  auto* const selected_outputs = known_outputs + kTiles * S::kColumns * 32;
  static_assert(2 * kTiles * S::kSums <= S::kRing);
#pragma unroll
  for (int n = 0; n < S::kOwnColumns; ++n) {
    const int at = (w.tile * S::kColumns + w.split * S::kOwnColumns + n) * 32 + w.lane;
    const float* const gates = w.rows.gates[kSelected] + w.tile * kTileRows + w.lane / 4;
    const float low = gates[0], high = gates[8];
    known_outputs[at] = make_float4(known[n][0], known[n][1], known[n][2], known[n][3]);
    selected_outputs[at] = make_float4(own[n][0] * low, own[n][1] * low, own[n][2] * high, own[n][3] * high);
  }
  S::sync();
  for (int r = threadIdx.x / kRanks; r < S::kRows; r += S::kThreads / kRanks)
    w.rows.factors[w.lane % kRanks][r] =
        merge_ranks<kRanks>(w.rows.branches[kSelected][r], w.rows.totals[kSelected][r], w.lane);
  __syncthreads();
  constexpr int kMine = S::kColumns / kRanks;  // tiles of eight columns that this thread block stores
#pragma unroll 1
  for (int e = w.warp; e < kTiles * kMine; e += S::kWarps) {
    const int of_tile = e / kMine, column = rank * kMine + e % kMine;
    const int at = (of_tile * S::kColumns + column) * 32 + w.lane;
    float o[4] = {};
    constexpr int kAtOnce = kRanks < 4 ? kRanks : 4;  // loads in flight
#pragma unroll
    for (int first = 0; first < kRanks; first += kAtOnce) {
      float4 of_known[kAtOnce], of_own[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        of_known[i] = load_rank<kRanks>(known_outputs + at, first + i);
        of_own[i] = load_rank<kRanks>(selected_outputs + at, first + i);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float low = w.rows.factors[first + i][of_tile * kTileRows + w.lane / 4];
        const float high = w.rows.factors[first + i][of_tile * kTileRows + w.lane / 4 + 8];
        o[0] += of_known[i].x + of_own[i].x * low, o[1] += of_known[i].y + of_own[i].y * low;
        o[2] += of_known[i].z + of_own[i].z * high, o[3] += of_known[i].w + of_own[i].w * high;
      }
    }
    out.store(of_tile, column, o);
  }
}

/// No outputs of a query, and no blocks.
template <class S, class T, int Dv>
__device__ __forceinline__ void clear_query(const StepAttendArgs& args, int b, int query, int kv_head, int first_head,
                                            int num_heads, int rank, bool first_cluster) {
#pragma unroll 1
  for (int head = rank; head < num_heads; head += S::kRanks)
    for (int i = threadIdx.x; i < Dv / 2; i += S::kThreads)
      store_pair(args.o.template at<T>(b, query, kv_head * args.geometry.group + first_head + head) + i * 2, 0, 0);
  if (args.indices.data && rank == 0 && first_cluster)
#pragma unroll 1
    for (int i = threadIdx.x; i < args.topk; i += S::kThreads) args.indices.template at<int>(b, query, kv_head)[i] = -1;
}

}  // namespace nsa::cuda::sm90::decode
