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
/// have. window: of S::kWindowLast, the window's sums. The caller syncs before its memory ends.
template <class S, class T>
__device__ __forceinline__ void store_columns_of_rank(const StepWarp<S>& w, const OutputRows<S, T>& out,
                                                      const OwnSums<S>& known, const OwnSums<S>& own,
                                                      const OwnSums<S>& window, int rank) {
  constexpr int kRanks = S::kRanks, kTiles = S::kTiles;
  constexpr int kLate = S::kLateBranches, kOfBranch = kTiles * S::kColumns * 32;
  auto* const outputs = reinterpret_cast<float4*>(step_memory);  // (known, selected, window; tile, eight columns, lane)
  static_assert((1 + kLate) * kTiles * S::kSums <= S::kRing);
  const auto late_branch = [](int late) { return late == 0 ? kSelected : kWindow; };
#pragma unroll
  for (int n = 0; n < S::kOwnColumns; ++n) {
    const int at = (w.tile * S::kColumns + w.split * S::kOwnColumns + n) * 32 + w.lane;
    outputs[at] = make_float4(known[n][0], known[n][1], known[n][2], known[n][3]);
#pragma unroll
    for (int late = 0; late < kLate; ++late) {
      const float* const gates = w.rows.gates[late_branch(late)] + w.tile * kTileRows + w.lane / 4;
      const float low = gates[0], high = gates[8];
      const float(&sums)[4] = late == 0 ? own[n] : window[n];
      outputs[(1 + late) * kOfBranch + at] = make_float4(sums[0] * low, sums[1] * low, sums[2] * high, sums[3] * high);
    }
  }
  S::sync();
  constexpr int kMine = S::kColumns / kRanks, kTasks = kTiles * kMine;  // tiles of eight columns of this thread block
  constexpr bool kEarly = !S::kFloat8;  // loads while softmaxes are merged, and as many at once: as registers allow
  constexpr int kAtOnce = kEarly || kRanks < 4 ? kRanks : 4;
  float4 of_known[kAtOnce], of_late[kLate][kAtOnce];
  const auto load = [&](int task, int first) {
    const int at = (task / kMine * S::kColumns + rank * kMine + task % kMine) * 32 + w.lane;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      of_known[i] = load_rank<kRanks>(outputs + at, first + i);
#pragma unroll
      for (int late = 0; late < kLate; ++late)
        of_late[late][i] = load_rank<kRanks>(outputs + (1 + late) * kOfBranch + at, first + i);
    }
  };
  int task = w.warp;
  if (kEarly && task < kTasks) load(task, 0);
#pragma unroll 1
  for (int e = threadIdx.x / kRanks; e < kLate * S::kRows; e += S::kThreads / kRanks) {
    const int late = e / S::kRows, r = e % S::kRows, branch = late_branch(late);
    w.rows.factors[late][w.lane % kRanks][r] =
        merge_ranks<kRanks>(w.rows.branches[branch][r], w.rows.totals[branch][r], w.lane);
  }
  __syncthreads();
#pragma unroll 1
  while (task < kTasks) {
    const int of_tile = task / kMine, column = rank * kMine + task % kMine;
    float o[4] = {};
#pragma unroll
    for (int first = 0; first < kRanks; first += kAtOnce) {
      if (!kEarly || first > 0) load(task, first);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float4 sum = of_known[i];
#pragma unroll
        for (int late = 0; late < kLate; ++late) {
          const float* const factors = w.rows.factors[late][first + i] + of_tile * kTileRows + w.lane / 4;
          const float low = factors[0], high = factors[8];
          const float4& x = of_late[late][i];
          sum.x += x.x * low, sum.y += x.y * low, sum.z += x.z * high, sum.w += x.w * high;
        }
        o[0] += sum.x, o[1] += sum.y, o[2] += sum.z, o[3] += sum.w;
      }
    }
    out.store(of_tile, column, o);
    task += S::kWarps;
    if (kEarly && kTasks > S::kWarps && task < kTasks) load(task, 0);
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
