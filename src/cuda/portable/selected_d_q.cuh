// dQ of one query over its selected blocks: thread blocks and warps as in selected_forward.cuh.
#pragma once

#include "cuda/common/attention_backward.cuh"
#include "cuda/common/fallback.cuh"
#include "cuda/common/params.h"
#include "cuda/portable/key_steps.cuh"

namespace nsa::cuda::portable {

template <class T, int Dk, int Dv>
struct SelectedDq : KeySteps<T, Dk, Dv, Dk> {
  // Q and dO, the same for all warps: in shared memory, so that three thread blocks have enough registers.
  static constexpr bool kShared = sizeof(T) == 2;
  static constexpr int kQ = KeySteps<T, Dk, Dv, Dk>::kMemory;
  static constexpr int kGradients = kQ + (kShared ? SharedFragments<T, Dk>::kBytes : 0);
  static constexpr int kMemory = kGradients + (kShared ? SharedFragments<T, Dv>::kBytes : 0);
  static constexpr int kBlocks = kShared && kHopper && Dk <= 128 ? 3 : 2;  // of an SM
};

template <class T, int Dk, int Dv>
__global__ void __launch_bounds__(128, SelectedDq<T, Dk, Dv>::kBlocks)
    selected_d_q(const __grid_constant__ BackwardArgs args) {
  FallbackGrid<T, BackwardArgs> block(args);
  if (!block.any()) return;
  do {
    using Shape = SelectedDq<T, Dk, Dv>;
    constexpr int kStepKeys = Shape::kStepKeys;
    extern __shared__ __align__(128) char memory[];
    int* list = reinterpret_cast<int*>(memory + Shape::kMemory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Geometry& p = args.geometry;
    const int row_groups = (p.group + 15) / 16;
    const int kv_head = block.y() / row_groups, first_head = block.y() % row_groups * 16;
    const DeviceSequence seq = sequence_of(p, block.z());
    const int query = block.x();
    if (query >= seq.q_len) continue;
    const int position = seq.position(query);
    const std::int64_t query_row = seq.q_begin + query;

    QueryRows mine;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = first_head + lane / 4 + 8 * i;
      mine.valid[i] = head < p.group;
      mine.head[i] = kv_head * p.group + head;
      mine.row[i] = query_row;
      mine.read(args, seq.batch, i);
    }
    const auto q = keep_fragments<Shape::kShared>(
        RowFragments<T, Dk>(mine.at<T>(args.q, seq.batch, 0), mine.at<T>(args.q, seq.batch, 1), lane),
        shared_address(memory) + Shape::kQ, lane, warp, 4);
    const auto d_o = keep_fragments<Shape::kShared>(
        RowFragments<T, Dv>(mine.at<T>(args.d_o, seq.batch, 0), mine.at<T>(args.d_o, seq.batch, 1), lane),
        shared_address(memory) + Shape::kGradients, lane, warp, 4);
    // Ends with a barrier.
    const int blocks =
        clean_list(args.indices.at<int>(seq.batch, query_row, kv_head), args.topk, position, args.block_size, list);

    float acc[Dk / 8][4] = {};
    const float scale = args.scale * kLog2e;
    const auto add_unit = [&](int key, char* keys, char* values) {
      float s[kStepKeys / 8][4], dp[kStepKeys / 8][4];
      Ring<T> ring;
      const Scores<T, Dk, kStepKeys / 8, decltype(q)> scores{q, shared_address(keys), lane};
      const Scores<T, Dv, kStepKeys / 8, decltype(d_o)> products{d_o, shared_address(values), lane};
      const Outputs<T, Dk, kStepKeys / 8> outputs{shared_address(keys), lane};
      start(scores, ring);
      scores.run(s, ring, products);
      products.run(dp, ring, outputs);
      const bool partial = key + kStepKeys > position + 1;
      row_gradients(s, dp, scale, mine.lse, mine.delta, mine.gate);
      if (partial) mask_rows(dp, lane, [&](int, int j) { return key + j <= position; });
      if (partial && __any_sync(0xffffffffu, has_nonfinite<T, Dk>(keys, kStepKeys, lane, 32))) {
        add_nonfinite<T, Dk>(acc, dp, keys, 0, lane, [&](int, int j) { return key + j <= position; });
        __syncwarp();
        clear_nonfinite<T, Dk>(keys, kStepKeys, lane, 32);
        __syncwarp();
        start(outputs, ring);
      }
      outputs.run(acc, dp, ring);
    };
    for_key_steps<T, Shape>(args, seq, kv_head, ListedSteps<kStepKeys>(list, args.block_size, 0, blocks, warp),
                            position, seq.k_len, memory, add_unit);

    // The sum over the warps, in their order.
    __syncthreads();
    float* partials = reinterpret_cast<float*>(memory);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float* to = partials + (warp * 16 + lane / 4 + 8 * i) * Shape::kPartialPitch + 2 * (lane & 3);
#pragma unroll
      for (int n = 0; n < Dk / 8; ++n)
        *reinterpret_cast<float2*>(to + n * 8) = make_float2(acc[n][2 * i], acc[n][2 * i + 1]);
    }
    __syncthreads();
    int batch = seq.batch;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
    if constexpr (sizeof(T) == 4 && Dk > 128) {  // it would spill during the loop
      asm volatile("mov.u32 %0, %%ctaid.z;" : "=r"(batch));
      if (p.cu_q) batch = 0;
    }
#endif
    for (int e = threadIdx.x; e < 16 * (Dk / 2); e += 128) {
      const int r = e / (Dk / 2), column = e % (Dk / 2) * 2;
      if (first_head + r >= p.group) continue;
      float x = 0, y = 0;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 part = *reinterpret_cast<const float2*>(partials + (w * 16 + r) * Shape::kPartialPitch + column);
        x += part.x, y += part.y;
      }
      store_d_q<T, 1>(args, batch, query_row, kv_head * p.group + first_head + r, column, [&](int) {
        return float2{x * args.scale, y * args.scale};
      });
    }
  } while (block.next());
}

}  // namespace nsa::cuda::portable
