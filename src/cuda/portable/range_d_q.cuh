// dQ for a range of keys per query: the sliding window and the compressed branch. The same walk as range_forward.cuh.
#pragma once

#include "cuda/portable/arguments.h"
#include "cuda/portable/attention_backward.cuh"
#include "cuda/portable/range_forward.cuh"
#include "cuda/portable/redo.cuh"

namespace nsa::cuda::portable {

template <class T, int Dk, int Dv>
struct RangeDq {
  static constexpr int kKeys = sizeof(T) == 2 ? 32 : Dk > 128 ? 8 : 16;
  static constexpr int kValues = Tile<T, Dk>::bytes(kKeys);
  static constexpr int kStage = kValues + Tile<T, Dv>::bytes(kKeys);
  static constexpr int kMemory = 2 * kStage;
};

template <class T, int Dk, int Dv>
__global__ void __launch_bounds__(128, 2) range_d_q(const __grid_constant__ BackwardArgs args) {
  Blocks<T, BackwardArgs> block(args);
  if (!block.any()) return;
  do {
    using Shape = RangeDq<T, Dk, Dv>;
    constexpr int kKeys = Shape::kKeys;
    extern __shared__ __align__(128) char memory[];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, kv_head = block.y();
    const Geometry& p = args.geometry;
    const DeviceSequence seq = sequence_of(p, block.z());
    const std::int64_t first_row = static_cast<std::int64_t>(block.columns() - 1 - block.x()) * kRangeRows;
    const std::int64_t rows = static_cast<std::int64_t>(seq.q_len) * p.group;
    if (first_row >= rows) continue;
    const int key_begin = args.window ? seq.k_begin : compressed_begin(p, block.z());
    const int key_count = args.window ? seq.k_len : num_compressed(p, seq.k_len);

    QueryRows mine;
    KeyRange range[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Row r = row_of(p, seq, kv_head, first_row + warp * 16 + lane / 4 + 8 * i);
      mine.valid[i] = r.valid;
      mine.head[i] = r.head;
      mine.row[i] = seq.q_begin + r.query;
      mine.read(args, seq.batch, i);
      range[i] = r.valid ? visible_keys(p, args.window, seq.position(r.query)) : KeyRange{0, 0};
    }
    const RowFragments<T, Dk, sizeof(T) == 2 && Dk <= 128> q(mine.at<T>(args.q, seq.batch, 0),
                                                             mine.at<T>(args.q, seq.batch, 1), lane);
    const RowFragments<T, Dv> d_o(mine.at<T>(args.d_o, seq.batch, 0), mine.at<T>(args.d_o, seq.batch, 1), lane);

    const std::int64_t last_row = min(first_row + kRangeRows, rows) - 1;
    const KeyRange head = visible_keys(p, args.window, seq.position(static_cast<int>(first_row / p.group)));
    const KeyRange tail = visible_keys(p, args.window, seq.position(static_cast<int>(last_row / p.group)));
    const int first_tile = head.first / kKeys, last_tile = (min(tail.last, key_count) + kKeys - 1) / kKeys;

    const RowStream<T, Dk, kKeys, 128> k(args.k.at<T>(seq.batch, key_begin, kv_head), args.k.row, thread);
    const RowStream<T, Dv, kKeys, 128> v(args.v.at<T>(seq.batch, key_begin, kv_head), args.v.row, thread);
    const auto load = [&](int tile) {
      const std::uint32_t stage = shared_address(memory) + tile % 2 * Shape::kStage;
      k.load(stage, tile * kKeys, key_count);
      v.load(stage + Shape::kValues, tile * kKeys, key_count);
      commit_copies();
    };

    float acc[Dk / 8][4] = {};
    const float scale = args.scale * kLog2e;
    if (first_tile < last_tile) load(first_tile);
    for (int tile = first_tile; tile < last_tile; ++tile) {
      if (tile + 1 < last_tile) {
        load(tile + 1);
        wait_copies<1>();
      } else {
        wait_copies<0>();
      }
      __syncthreads();
      char* keys = memory + tile % 2 * Shape::kStage;
      const int key = tile * kKeys;
      float s[kKeys / 8][4], dp[kKeys / 8][4];
      Ring<T> ring;
      const Scores<T, Dk, kKeys / 8, decltype(q)> scores{q, shared_address(keys), lane};
      const Scores<T, Dv, kKeys / 8, decltype(d_o)> products{d_o, shared_address(keys + Shape::kValues), lane};
      const Outputs<T, Dk, kKeys / 8> outputs{shared_address(keys), lane};
      start(scores, ring);
      scores.run(s, ring, products);
      products.run(dp, ring, outputs);
      const bool partial = key < tail.first || key + kKeys > head.last;
      row_gradients(s, dp, scale, mine.lse, mine.delta, mine.gate);
      const auto visible = [&](int i, int j) { return key + j >= range[i].first && key + j < range[i].last; };
      if (partial) mask_rows(dp, lane, visible);
      if (partial && __syncthreads_or(has_nonfinite<T, Dk>(keys, kKeys, thread, 128))) {
        add_nonfinite<T, Dk>(acc, dp, keys, 0, lane, visible);
        __syncthreads();
        clear_nonfinite<T, Dk>(keys, kKeys, thread, 128);
        __syncthreads();
        start(outputs, ring);
      }
      outputs.run(acc, dp, ring);
      __syncthreads();  // the stage is free
    }

#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!mine.valid[i]) continue;
#pragma unroll
      for (int n = 0; n < Dk / 8; ++n)
        store_d_q<T>(args, seq.batch, mine.row[i], mine.head[i], n * 8 + 2 * (lane & 3), acc[n][2 * i] * args.scale,
                     acc[n][2 * i + 1] * args.scale);
    }
  } while (block.next());
}

}  // namespace nsa::cuda::portable
