// Attention of one query, all heads of its group, to the blocks selected for it.
//
// A thread block of four warps takes one query and up to sixteen heads (the rows of a tensor-core tile); the warps
// share out the keys (key_steps.cuh).
#pragma once

#include "cuda/common/fallback.cuh"
#include "cuda/common/params.h"
#include "cuda/portable/key_steps.cuh"

namespace nsa::cuda::portable {

template <class T, int Dk, int Dv>
using SelectedForward = KeySteps<T, Dk, Dv, Dv>;

template <class T, int Dk, int Dv, class Args>
__global__ void __launch_bounds__(128, sizeof(T) == 4 ? 2 : 0) selected_forward(const __grid_constant__ Args args) {
  FallbackGrid<T, Args> block(args);
  if (!block.any()) return;
  do {
    using Shape = SelectedForward<T, Dk, Dv>;
    constexpr int kStepKeys = Shape::kStepKeys;
    extern __shared__ __align__(128) char memory[];
    int* list = reinterpret_cast<int*>(memory + Shape::kMemory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto& p = args.geometry;
    const int row_groups = (p.group + 15) / 16;
    const int kv_head = block.y() / row_groups, first_head = block.y() % row_groups * 16;
    const DeviceSequence seq = sequence_of(p, block.z());
    int query = block.x(), split = 0;
    if constexpr (kHasSplits<Args>)
      if (args.splits.num_splits > 0)
        query = block.x() / args.splits.num_splits, split = block.x() % args.splits.num_splits;
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
    if constexpr (kHasSplits<Args>) {
      if (args.splits.num_splits > 0) {
        first_block = min(split * args.splits.size, blocks);
        blocks = min(first_block + args.splits.size, blocks);
      }
    }

    OnlineSoftmax<Dv> state;
    const float scale = positive_scale(args.scale * key_scale(args.k, kv_head));
    const auto visible = [&](int, int key) { return key <= position; };
    for_key_steps<T, Shape>(args, seq, kv_head,
                            ListedSteps<kStepKeys>(list, args.block_size, first_block, blocks, warp), position,
                            seq.k_len, memory, [&](int key, char* keys, char* values) {
                              attend_key_step<T, Dk, Dv>(state, q, scale, key, keys, values,
                                                         key + kStepKeys > position + 1, visible, [](const auto&) {});
                            });
    merge_warps<Shape>(state, min(p.group - first_head, 16), memory,
                       [&](int r, int column, float x, float y, float max, float sum) {
                         const int h = kv_head * p.group + first_head + r;
                         if constexpr (kHasSplits<Args>) {
                           if (args.splits.num_splits > 0) {
                             const std::int64_t to = args.splits.at(p, split, seq.index, query, h);
                             *reinterpret_cast<float2*>(args.splits.o_accum + to * Dv + column) = make_float2(x, y);
                             if (column == 0)
                               args.splits.softmax[to] = make_float2(max, first_block < blocks ? sum : -1.0f);
                             return;
                           }
                         }
                         const float inverse = blocks > 0 ? 1 / sum : 0;
                         store_pair(args.o.template at<T>(seq.batch, query_row, h) + column, x * inverse, y * inverse);
                         if (column == 0)
                           args.lse.at(seq.batch, query_row, h) = blocks > 0 ? (max + log2f(sum)) * kLn2 : -INFINITY;
                       });
  } while (block.next());
}

}  // namespace nsa::cuda::portable
