// Attention of one query, all heads of its group, to the blocks selected for it.
//
// A thread block of four warps takes one query and up to sixteen heads (the rows of a tensor-core tile); the warps
// share out the keys (selected_units.cuh). The four partial softmaxes are merged at the end in a fixed order.
#pragma once

#include "cuda/portable/arguments.h"
#include "cuda/portable/redo.cuh"
#include "cuda/portable/selected_units.cuh"
#include "cuda/portable/softmax.cuh"

namespace nsa::cuda::portable {

template <class T, int Dk, int Dv>
using SelectedForward = SelectedUnits<T, Dk, Dv, Dv>;

template <class T, int Dk, int Dv, class Args>
__global__ void __launch_bounds__(128, sizeof(T) == 4 ? 2 : 0) selected_forward(const __grid_constant__ Args args) {
  Blocks<T, Args> block(args);
  if (!block.any()) return;
  do {
    using Shape = SelectedForward<T, Dk, Dv>;
    constexpr int kUnit = Shape::kUnit;
    extern __shared__ __align__(128) char memory[];
    __shared__ float partial_max[4][16], partial_sum[4][16];
    int* list = reinterpret_cast<int*>(memory + Shape::kMemory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto& p = args.geometry;
    const int row_groups = (p.group + 15) / 16;
    const int kv_head = block.y() / row_groups, first_head = block.y() % row_groups * 16;
    const DeviceSequence seq = sequence_of(p, block.z());
    int query = block.x(), part = 0;
    if constexpr (kHasParts<Args>)
      if (args.parts.count > 0) query = block.x() / args.parts.count, part = block.x() % args.parts.count;
    if (query >= seq.q_len) continue;
    const int position = seq.position(query);
    const std::int64_t query_row = seq.q_begin + query;

    bool valid[2];
    const T* q_row[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = first_head + lane / 4 + 8 * i;
      valid[i] = head < p.group;
      q_row[i] = valid[i] ? args.q.template at<T>(seq.batch, query_row, kv_head * p.group + head) : nullptr;
    }
    const RowFragments<T, Dk> q(q_row[0], q_row[1], lane, args.scale < 0);
    int first_block = 0, blocks = clean_list(args.indices.template at<int>(seq.batch, query_row, kv_head), args.topk,
                                             position, args.block_size, list);
    if constexpr (kHasParts<Args>) {
      if (args.parts.count > 0) {
        first_block = min(part * args.parts.size, blocks);
        blocks = min(first_block + args.parts.size, blocks);
      }
    }

    OnlineSoftmax<Dv> state;
    const float scale = positive_scale(args.scale);
    const auto attend = [&](int key, char* keys, char* values) {
      float s[kUnit / 8][4];
      Ring<T> ring;
      const Scores<T, Dk, kUnit / 8, decltype(q)> scores{q, shared_address(keys), lane};
      const Outputs<T, Dv, kUnit / 8> outputs{shared_address(values), lane};
      start(scores, ring);
      scores.run(s, ring, outputs);
      const bool partial = key + kUnit > position + 1;
      if (partial) {
#pragma unroll
        for (int n = 0; n < kUnit / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (key + n * 8 + 2 * (lane & 3) + i % 2 > position) s[n][i] = -INFINITY;
        }
      }
      state.update(s, scale);
      if (partial && __any_sync(0xffffffffu, has_nonfinite<T, Dv>(values, kUnit, lane, 32))) {
        add_nonfinite<T, Dv>(state.acc, s, values, 0, lane, [&](int, int j) { return key + j <= position; });
        __syncwarp();
        clear_nonfinite<T, Dv>(values, kUnit, lane, 32);
        __syncwarp();
        start(outputs, ring);
      }
      outputs.run(state.acc, s, ring);
    };
    for_units<T, Shape>(args, seq, kv_head, position, list, first_block, blocks, memory, attend);

    // Merge.
    __syncthreads();
    float* partials = reinterpret_cast<float*>(memory);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = lane / 4 + 8 * i;
      const float sum = row_sum(state.sum[i]);
      if (lane % 4 == 0) partial_max[warp][r] = state.max[i], partial_sum[warp][r] = sum;
      float* acc = partials + (warp * 16 + r) * Shape::kPartialPitch + 2 * (lane & 3);
#pragma unroll
      for (int n = 0; n < Dv / 8; ++n)
        *reinterpret_cast<float2*>(acc + n * 8) = make_float2(state.acc[n][2 * i], state.acc[n][2 * i + 1]);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < 16 * (Dv / 2); e += 128) {
      const int r = e / (Dv / 2), column = e % (Dv / 2) * 2, head = first_head + r;
      if (head >= p.group) continue;
      float m = -INFINITY;
#pragma unroll
      for (int w = 0; w < 4; ++w) m = fmaxf(m, partial_max[w][r]);
      const float base = m == -INFINITY ? 0 : m;
      float sum = 0, x = 0, y = 0;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float factor = exp2_fast(partial_max[w][r] - base);
        const float2 acc = *reinterpret_cast<const float2*>(partials + (w * 16 + r) * Shape::kPartialPitch + column);
        // A warp that saw nothing has sum 0 and acc 0; skipping it keeps 0 * inf out.
        if (factor != 0 || partial_sum[w][r] != 0)
          sum += partial_sum[w][r] * factor, x += acc.x * factor, y += acc.y * factor;
      }
      const int h = kv_head * p.group + head;
      if constexpr (kHasParts<Args>) {
        if (args.parts.count > 0) {
          const std::int64_t to = args.parts.at(p, part, seq.batch, query, h);
          *reinterpret_cast<float2*>(args.parts.acc + to * Dv + column) = make_float2(x, y);
          if (column == 0) args.parts.softmax[to] = make_float2(m, first_block < blocks ? sum : -1.0f);
          continue;
        }
      }
      const float inverse = blocks > 0 ? 1 / sum : 0;
      store_pair(args.o.template at<T>(seq.batch, query_row, h) + column, x * inverse, y * inverse);
      if (column == 0) args.lse.at(seq.batch, query_row, h) = blocks > 0 ? (m + log2f(sum)) * kLn2 : -INFINITY;
    }
  } while (block.next());
}

}  // namespace nsa::cuda::portable
