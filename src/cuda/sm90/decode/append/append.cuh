// What a thread block does for its sequence: capacity, plan, new tokens to their pages and rings, φ where it is the
// mean.
#pragma once

#include "cuda/sm90/decode/append/config.cuh"

namespace nsa::cuda::sm90::decode {

/// The mean of the blocks that sequence b completes, all heads.
template <class T, bool kFloat8>
__device__ __forceinline__ void compress_mean(const AppendCompressArgs& args, int i, const StepRequest& request,
                                              int b) {
  const StepGeometry& p = args.geometry;
  const CompressSide& side = args.sides[i];
  const int half = side.dim / 2;
  for (int e = threadIdx.x; e < request.completed * p.kv_heads * half; e += kThreads) {
    const int channel = e % half, head = e / half % p.kv_heads, block = request.first + e / half / p.kv_heads;
    float sum[2] = {};
#pragma unroll 4
    for (int r = 0; r < p.kernel_size; ++r) {
      const int token = block * p.kernel_stride + r;
      const T* const from = token >= request.before
                                ? side.fresh.at<T>(b, request.q_begin + token - request.before, head)
                                : reinterpret_cast<const T*>(side.raw.at(b, token, head));
      sum[0] += to_float(from[channel]), sum[1] += to_float(from[channel + half]);
    }
    const auto l = static_cast<float>(p.kernel_size);
    const T pair[2] = {from_float<T>(sum[0] / l), from_float<T>(sum[1] / l)};
    store_pair_of_token<kFloat8>(args, i, pair, b, block, head, channel);
  }
}

/// Packed rows that no query of a possible request has, before step_attend writes the others: no output, no blocks.
template <class T>
__device__ __forceinline__ void clear_rows(const AppendCompressArgs& args, const StepRequest& request, int b) {
  const StepGeometry& p = args.geometry;
  // Those behind all sequences and those in front, by all thread blocks in turn; then the sequence's own.
#pragma unroll 1
  for (int i = request.possible ? 1 : 2; i >= 0; --i) {
    const int begin = i == 2 ? max(request.q_begin, 0) : b + (i == 1 ? max(p.starts[p.batches], 0) : 0);
    const int end = i == 2 ? p.starts[b + 1] : i == 1 ? p.rows : p.starts[0];
#pragma unroll 1
    for (int row = begin; row < min(end, p.rows); row += i == 2 ? 1 : p.batches) {
#pragma unroll 1
      for (int at = threadIdx.x; at < p.heads * args.value_dim / 2; at += kThreads) {
        const int head = at / (args.value_dim / 2), pair = at - head * (args.value_dim / 2);
        store_pair(args.o.at<T>(0, row, head) + 2 * pair, 0, 0);
      }
      if (args.indices.data)
#pragma unroll 1
        for (int at = threadIdx.x; at < p.kv_heads * args.topk; at += kThreads) {
          const int head = at / args.topk;
          args.indices.at<int>(0, row, head)[at - head * args.topk] = -1;
        }
    }
  }
}

template <class T, bool kFloat8>
__device__ __forceinline__ void append(const AppendCompressArgs& args, int b) {
  const StepGeometry& p = args.geometry;
  const StepRequest request(p, args.lengths, args.num_new, args.positions, b);
  // The six kinds of tokens side by side, so that their copies do not wait for each other, in 16-byte vectors; the
  // first ones are read before the capacity is known.
  const int rows = request.possible ? request.added * p.kv_heads : 0,
            most = max(args.appends[0].vectors, args.appends[1].vectors);
  const int vectors = 6 * rows * most;
  struct Item {
    int kind, token, head, vector;
  };
  const auto item_of = [&](int e) {
    const int kind = e / (rows * most), i = e - kind * rows * most, row = i / most, token = row / p.kv_heads;
    return Item{kind, token, row - token * p.kv_heads, i - row * most};
  };
  const auto read = [&](const Item& at) {
    const Append& a = args.appends[at.kind];
    return at.vector < a.vectors
               ? reinterpret_cast<const uint4*>(a.fresh.at<char>(b, request.q_begin + at.token, at.head))[at.vector]
               : uint4{};
  };
  const auto write = [&](const Item& at, const uint4& x) {
    const Append& a = args.appends[at.kind];
    if (at.vector >= a.vectors) return;
    char* const to = a.to.at(b, request.before + at.token, at.head);
    if constexpr (kFloat8) {
      if (a.scales.data) {
        reinterpret_cast<uint2*>(to)[at.vector] = to_float8<T>(x, a.scales[at.head]);
        return;
      }
    }
    reinterpret_cast<uint4*>(to)[at.vector] = x;
  };
  constexpr int kEarly = 2;
  uint4 early[kEarly];
#pragma unroll
  for (int i = 0; i < kEarly; ++i) {
    const int e = threadIdx.x + i * kThreads;
    if (e < vectors) early[i] = read(item_of(e));
  }
  const bool fits = has_capacity(args, request, b);
  if (threadIdx.x == 0) write_plan(args, request, b, fits);
  if (p.starts) clear_rows<T>(args, request, b);
  if (!fits) return;
#pragma unroll
  for (int i = 0; i < kEarly; ++i) {
    const int e = threadIdx.x + i * kThreads;
    if (e < vectors) write(item_of(e), early[i]);
  }
#pragma unroll(kFloat8 ? 1 : 4)  // a division is many instructions
  for (int e = threadIdx.x + kEarly * kThreads; e < vectors; e += kThreads) {
    const Item at = item_of(e);
    write(at, read(at));
  }
  for (int i = 0; i < 2; ++i)
    if (args.sides[i].clusters == 0) compress_mean<T, kFloat8>(args, i, request, b);
}

}  // namespace nsa::cuda::sm90::decode
