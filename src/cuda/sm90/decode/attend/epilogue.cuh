// The stores of a query's outputs.
#pragma once

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
