// Sums and softmaxes of one branch together: of the warps of a tile, then of the thread blocks of a cluster.
#pragma once

#include "cuda/common/softmax.cuh"
#include "cuda/sm90/decode/attend/config.cuh"

namespace nsa::cuda::sm90::decode {

/// What a warp has of its tile after a merge: tiles of eight columns.
template <class S>
using OwnSums = float[S::kOwnColumns][4];

/// Merges what the warps of each tile have of a branch, in their own key tiles of the ring, which no thread
/// reads or fills: each warp gets its columns, relative to the maximum that goes to `softmaxes`, which all of the
/// cluster may read. has_keys: whether the thread block has any of the branch's keys, else it skips its barriers.
template <class S, int Dv>
__device__ __forceinline__ void merge_warps(const StepWarp<S>& w, float2* softmaxes, const OnlineSoftmax<Dv>& state,
                                            OwnSums<S>& sums, bool wants_values, bool has_keys) {
  if (S::kWindowLast && !has_keys) {
    if (w.split == 0 && w.lane < kTileRows) softmaxes[w.tile * kTileRows + w.lane] = make_float2(-INFINITY, 0);
#pragma unroll
    for (int n = 0; n < S::kOwnColumns; ++n) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0;
    return;
  }
  if (wants_values) {
    auto* const mine = reinterpret_cast<float4*>(step_memory + w.warp * S::kWarpRing) + w.lane;
#pragma unroll
    for (int n = 0; n < S::kColumns; ++n)
      mine[n * 32] = make_float4(state.acc[n][0], state.acc[n][1], state.acc[n][2], state.acc[n][3]);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sum = row_sum(state.sum[i]);
    if ((w.lane & 3) == 0) w.rows.warps[w.warp][w.lane / 4 + 8 * i] = make_float2(state.max[i], sum);
  }
  __syncthreads();
  float factor[2][S::kSplits];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = w.lane / 4 + 8 * i;
    float largest = -INFINITY, sum = 0;
#pragma unroll
    for (int of = 0; of < S::kSplits; ++of) largest = fmaxf(largest, w.rows.warps[w.tile * S::kSplits + of][r].x);
#pragma unroll
    for (int of = 0; of < S::kSplits; ++of) {
      const float2 of_warp = w.rows.warps[w.tile * S::kSplits + of][r];
      factor[i][of] = exp2_fast(of_warp.x - (largest == -INFINITY ? 0 : largest));
      sum += of_warp.y * factor[i][of];
    }
    if (w.split == 0 && (w.lane & 3) == 0) softmaxes[w.tile * kTileRows + r] = make_float2(largest, sum);
  }
#pragma unroll
  for (int n = 0; n < S::kOwnColumns; ++n) {
    sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0;
    if (!wants_values) continue;
#pragma unroll
    for (int of = 0; of < S::kSplits; ++of) {
      const float4 x = reinterpret_cast<const float4*>(
          step_memory + (w.tile * S::kSplits + of) * S::kWarpRing)[(w.split * S::kOwnColumns + n) * 32 + w.lane];
      sums[n][0] += x.x * factor[0][of], sums[n][1] += x.y * factor[0][of];
      sums[n][2] += x.z * factor[1][of], sums[n][3] += x.w * factor[1][of];
    }
  }
  __syncthreads();
}

/// Merges the softmaxes that the thread blocks of the cluster have of a row, by as many neighbouring lanes, one for
/// each: the total goes to `all`. Returns the factor of the sums that the lane's thread block has.
template <int kRanks>
__device__ __forceinline__ float merge_ranks(const float2& softmax, float2& all, int lane) {
  const float2 of_rank = load_rank<kRanks>(&softmax, lane % kRanks);
  float largest = of_rank.x;
#pragma unroll
  for (int offset = 1; offset < kRanks; offset *= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  const float base = largest == -INFINITY ? 0 : largest, factor = exp2_fast(of_rank.x - base);
  float sum = of_rank.y * factor;
#pragma unroll
  for (int offset = 1; offset < kRanks; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  const float inverse = sum == 0 ? 0 : __frcp_rn(sum);
  if (lane % kRanks == 0) all = make_float2(base, inverse);
  return factor * inverse;
}

/// Merges the softmaxes of the branches before the selection: totals of the cluster.
template <class S>
__device__ __forceinline__ void merge_softmaxes(RowMemory<S>& rows, int lane) {
#pragma unroll 1
  for (int e = threadIdx.x / S::kRanks; e < (kBranches - S::kLateBranches) * S::kRows; e += S::kThreads / S::kRanks) {
    const BranchIndex of = e < S::kRows ? kCompressed : kWindow;
    merge_ranks<S::kRanks>(rows.branches[of][e % S::kRows], rows.totals[of][e % S::kRows], lane);
  }
}

/// The same of compressed keys for heads that are another cluster's.
template <class S>
__device__ __forceinline__ void merge_softmaxes(OtherRows<S>& rows, int lane) {
#pragma unroll 1
  for (int e = threadIdx.x / S::kRanks; e < S::kRows; e += S::kThreads / S::kRanks)
    merge_ranks<S::kRanks>(rows.own[e], rows.totals[e], lane);
}

/// The sums of compressed keys, times their gate and over the total of their softmax, and, where it comes before the
/// selection, the window's with them.
template <class S>
__device__ __forceinline__ void add_window(const StepWarp<S>& w, OwnSums<S>& known, const OwnSums<S>& own) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = w.tile * kTileRows + w.lane / 4 + 8 * i;
    const auto share = [&](BranchIndex of) {
      const float2 all = w.rows.totals[of][r];
      return w.rows.gates[of][r] * (exp2_fast(w.rows.branches[of][r].x - all.x) * all.y);
    };
    const float by_compressed = share(kCompressed), by_window = S::kWindowLast ? 0 : share(kWindow);
#pragma unroll
    for (int n = 0; n < S::kOwnColumns; ++n) {
      known[n][2 * i] *= by_compressed, known[n][2 * i + 1] *= by_compressed;
      if (S::kWindowLast) continue;
      known[n][2 * i] += own[n][2 * i] * by_window, known[n][2 * i + 1] += own[n][2 * i + 1] * by_window;
    }
  }
}

}  // namespace nsa::cuda::sm90::decode
