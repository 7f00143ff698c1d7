// select_blocks for a decode step: its few queries walk the compressed keys in splits, by many thread blocks, then
// pick.
#pragma once

#include "cuda/portable/decode/splits.cuh"
#include "cuda/portable/decode/step_params.h"
#include "cuda/portable/select_blocks.cuh"

namespace nsa::cuda::portable {

/// Number of a query among those of all sequences and KV heads.
__device__ inline std::int64_t scratch_row(const Geometry& p, int b, int kv_head, int query) {
  return (static_cast<std::int64_t>(b) * p.kv_heads + kv_head) * p.q_len + query;
}

/// Grid x: split, y: KV head, z: (sequence, tile of queries).
template <class T, int Dk, class Args>
__global__ void __launch_bounds__(128, sizeof(T) == 4 || (!kHopper && Dk == 128) ? 2 : 3)
    score_splits(const __grid_constant__ Args args) {
  constexpr int kKeys = SelectShape<T, Dk>::kKeys;
  extern __shared__ __align__(128) char memory[];
  const StepGeometry& p = args.geometry;
  const int kv_head = blockIdx.y, b = blockIdx.z / args.tiles, first_query = blockIdx.z % args.tiles * args.queries;
  const DeviceSequence seq = sequence_of(p, b);
  if (first_query >= seq.q_len) return;
  const int queries = min(args.queries, seq.q_len - first_query);
  const int keys = scored_keys(args, seq.position(first_query + queries - 1));
  const int tiles = args.splits.size / kKeys, first_tile = blockIdx.x * tiles;
  const int last_tile = min(first_tile + tiles, (keys + kKeys - 1) / kKeys);
  if (first_tile >= last_tile) return;
  sum_probabilities<T, Dk>(args, seq, kv_head, first_query, queries, 0, keys, first_tile, last_tile,
                           args.scratch + scratch_row(p, b, kv_head, first_query) * args.scratch_keys, memory,
                           [&](bool sees_any, int query, int head) {
                             const MergedSoftmax<4> merged(
                                 sees_any ? splits_of(p, args.splits, 0, seq, query) : KeyRange{0, 0}, [&](int split) {
                                   return args.splits.softmax[args.splits.at(p, split, b, query, head)];
                                 });
                             return sees_any ? merged.lse() : INFINITY;
                           });
}

/// The same from the scores of at most kScoredRows rows. What it sums of keys that a query does not see is not used.
/// Grid x: kSumKeys keys, y: KV head, z: sequence.
inline constexpr int kSumThreads = 128, kSumKeys = 4 * kSumThreads;
template <class Args>
__global__ void __launch_bounds__(kSumThreads) sum_scores(const __grid_constant__ Args args) {
  __shared__ float lse[kScoredRows];
  const auto& p = args.geometry;
  const int kv_head = blockIdx.y, b = blockIdx.z, key = blockIdx.x * kSumKeys + 4 * threadIdx.x;
  const DeviceSequence seq = sequence_of(p, b);
  if (seq.q_len == 0) return;
  const int keys = scored_keys(args, seq.position(seq.q_len - 1));
  if (blockIdx.x * kSumKeys >= keys) return;
  constexpr int kLanes = kSumThreads / kScoredRows;
  const int r = threadIdx.x / kLanes, row_query = r / p.group, head = kv_head * p.group + r % p.group;
  const bool sees_any = row_query < seq.q_len && num_compressed(p, seq.position(row_query) + 1) > 0;
  const MergedSoftmax<kLanes> merged(
      sees_any ? splits_of(p, args.splits, 0, seq, row_query) : KeyRange{0, 0},
      [&](int split) { return args.splits.softmax[args.splits.at(p, split, b, row_query, head)]; });
  if (threadIdx.x % kLanes == 0) lse[r] = sees_any ? merged.lse() : INFINITY;
  __syncthreads();
  if (key >= keys) return;
  const float scale = positive_scale(args.scale * key_scale(args.k, kv_head));
  const std::int64_t first = scratch_row(p, b, kv_head, 0);
  for (int query = 0; query < seq.q_len; ++query) {
    float sum[4] = {};
#pragma unroll 8
    for (int i = query * p.group; i < (query + 1) * p.group; ++i) {
      const float4 s = *reinterpret_cast<const float4*>(args.scores + (first * p.group + i) * args.scratch_keys + key);
      sum[0] += exp2_fast(fmaf(s.x, scale, -lse[i]));
      sum[1] += exp2_fast(fmaf(s.y, scale, -lse[i]));
      sum[2] += exp2_fast(fmaf(s.z, scale, -lse[i]));
      sum[3] += exp2_fast(fmaf(s.w, scale, -lse[i]));
    }
    *reinterpret_cast<float4*>(args.scratch + (first + query) * args.scratch_keys + key) =
        make_float4(sum[0], sum[1], sum[2], sum[3]);
  }
}

/// A thread block per query, as nothing else is left to do; grid x: query, y: KV head, z: sequence.
inline constexpr int kTopKThreads = 512, kTopKMemory = 32 * 1024;  // bytes for the importances, if they fit
template <class Args>
__global__ void __launch_bounds__(kTopKThreads) top_k_step(const __grid_constant__ Args args) {
  const auto& p = args.geometry;
  const int query = blockIdx.x, kv_head = blockIdx.y, b = blockIdx.z;
  const DeviceSequence seq = sequence_of(p, b);
  if (query >= seq.q_len) return;
  const std::int64_t row = scratch_row(p, b, kv_head, query), rows = scratch_row(p, p.batches, 0, 0);
  __shared__ float near[kTopKMemory / sizeof(float)];
  float* importances = args.scratch_blocks * sizeof(float) <= kTopKMemory
                           ? near
                           : args.scratch + rows * args.scratch_keys + row * args.scratch_blocks;
  top_k_blocks<kTopKThreads>(args, seq, seq.position(query), kv_head, args.scratch + row * args.scratch_keys,
                             importances, args.indices.template at<int>(seq.batch, seq.q_begin + query, kv_head),
                             threadIdx.x);
}

}  // namespace nsa::cuda::portable
