// Gradients of attention, for a range of keys per query (window, compressed) and for selected blocks.
//
//   P = exp(scale * q k^T - lse), dP = g * dO V^T, dS = P * (dP - delta)
//   dQ = scale * dS K, dK = scale * dS^T Q, dV = (g * P)^T dO
//
// g is the gate of the branch (1 for a branch on its own) and delta = g * rowsum(dO * O). Two kernels: one owns
// query rows and walks keys (dQ), the other owns 64 keys and walks the query rows that see them (dK, dV). Every
// sum has a fixed order.
#pragma once

#include "cuda/common/block_list.cuh"
#include "cuda/common/params.h"
#include "cuda/common/softmax.cuh"

namespace nsa::cuda {

__device__ inline float gate_of(const BackwardArgs& args, int batch, std::int64_t row, int head) {
  return args.gate.data ? args.gate.at(batch, row, head) : 1;
}

/// A 16 x 8*N tile of (query row, key) pairs: scores s, and dp, which becomes dS.
template <int N>
__device__ inline void row_gradients(const float (&s)[N][4], float (&dp)[N][4], float scale, const float (&lse)[2],
                                     const float (&delta)[2], const float (&gate)[2]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      dp[n][i] = exp2_fast(fmaf(s[n][i], scale, -lse[i / 2])) * fmaf(gate[i / 2], dp[n][i], -delta[i / 2]);
  }
}
/// dS = 0 where not visible(i, column): row i (0, 1), column 8*n + 2*(lane%4) + j.
template <int N, class Visible>
__device__ inline void mask_rows(float (&dp)[N][4], int lane, const Visible& visible) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (!visible(i / 2, n * 8 + 2 * (lane & 3) + i % 2)) dp[n][i] = 0;
  }
}

/// A lane's part of a row of dQ: pairs of columns, eight apart from `column` on. value(n): the n-th pair, after the
/// scale. All of the sum so far is loaded before anything is stored; as the two may overlap for all that the compiler
/// knows, each load would wait for the store before it.
template <class T, int kPairs, class Value>
__device__ __forceinline__ void store_d_q(const BackwardArgs& args, int batch, std::int64_t row, int head, int column,
                                          const Value& value) {
  float2 sum[kPairs];
#pragma unroll
  for (int n = 0; n < kPairs; ++n) sum[n] = value(n);
  if (args.sum_from.data) {
    const float* from = args.sum_from.at<float>(batch, row, head) + column;
    float2 before[kPairs];
#pragma unroll
    for (int n = 0; n < kPairs; ++n) before[n] = *reinterpret_cast<const float2*>(from + 8 * n);
#pragma unroll
    for (int n = 0; n < kPairs; ++n) sum[n].x += before[n].x, sum[n].y += before[n].y;
  }
  const auto store = [&](auto* to) {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) store_pair(to + column + 8 * n, sum[n].x, sum[n].y);
  };
  if (args.sum_to.data) {
    store(args.sum_to.at<float>(batch, row, head));
  } else {
    store(args.d_q.at<T>(batch, row, head));
  }
}

/// This lane's two of sixteen query rows, in both backward kernels that own query rows.
struct QueryRows {
  bool valid[2];
  int head[2];
  int row[2];
  float lse[2], delta[2], gate[2];

  __device__ void read(const BackwardArgs& args, int batch, int i) {
    lse[i] = valid[i] ? args.lse.at(batch, row[i], head[i]) * kLog2e : 0;
    delta[i] = valid[i] ? args.delta.at(batch, row[i], head[i]) : 0;
    gate[i] = valid[i] ? gate_of(args, batch, row[i], head[i]) : 0;
  }
  template <class T>
  __device__ const T* at(const Strided& t, int batch, int i) const {
    return valid[i] ? t.at<T>(batch, row[i], head[i]) : nullptr;
  }
};

}  // namespace nsa::cuda
