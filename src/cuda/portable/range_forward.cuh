// Attention over a range of keys per query: the sliding window and the compressed branch.
//
// A block of four warps takes 64 rows (query, head) of one KV head, so that every key tile is loaded once for all heads
// of the group and for neighbouring queries. Q stays in registers; key and value tiles go through two stages of shared
// memory; softmax is online, in base 2.
#pragma once

#include "cuda/common/fallback.cuh"
#include "cuda/common/geometry.cuh"
#include "cuda/common/params.h"
#include "cuda/common/softmax.cuh"
#include "cuda/common/tile.cuh"

namespace nsa::cuda::portable {

inline constexpr int kRangeRows = 64;

/// Keys of a tile: two stages of keys and values within 99 KB, the shared memory of a block on consumer cards.
template <class T, int Dk, int Dv>
inline constexpr int kRangeKeys = sizeof(T) == 2 ? (Dk > 128 ? 32 : 64) : (Dk > 128 ? 16 : 32);

template <class T, int Dk, int Dv>
inline constexpr int kRangeStage = (Tile<T, Dk>::kPitch + Tile<T, Dv>::kPitch) * kRangeKeys<T, Dk, Dv>;

template <class T, int Dk, int Dv, class Args>
__global__ void __launch_bounds__(128, kHasSplits<Args> && sizeof(T) == 2 ? 2 : 0)
    range_forward(const __grid_constant__ Args args) {
  FallbackGrid<T, Args> block(args);
  if (!block.any()) return;
  do {
    constexpr int kKeys = kRangeKeys<T, Dk, Dv>, kStage = kRangeStage<T, Dk, Dv>;
    constexpr int kValues = Tile<T, Dk>::bytes(kKeys);  // where a stage's values begin
    extern __shared__ __align__(128) char memory[];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, kv_head = block.y();
    const auto& p = args.geometry;
    const DeviceSequence seq = sequence_of(p, block.z());
    const int row_tile = block.columns() - 1 - block.x();  // the longest rows first
    const std::int64_t first_row = static_cast<std::int64_t>(row_tile) * kRangeRows;
    const std::int64_t rows = static_cast<std::int64_t>(seq.q_len) * p.group;
    if (first_row >= rows) continue;
    const int key_begin = args.window ? seq.k_begin : compressed_begin(p, block.z());
    const int key_count = args.window ? seq.k_len : num_compressed(p, seq.k_len);

    Row row[2];
    KeyRange range[2];
    const T* q_row[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row[i] = row_of(p, seq, kv_head, first_row + warp * 16 + lane / 4 + 8 * i);
      range[i] = row[i].valid ? visible_keys(p, args.window, seq.position(row[i].query)) : KeyRange{0, 0};
      q_row[i] = row[i].valid ? args.q.template at<T>(seq.batch, seq.q_begin + row[i].query, row[i].head) : nullptr;
    }
    // Before Hopper the pages of a cache take the registers.
    constexpr bool kKept = sizeof(T) == 2 && !(!kHopper && kHasSplits<Args> && Dk == 128);
    const RowFragments<T, Dk, kKept> q(q_row[0], q_row[1], lane, args.scale < 0);

    // Keys of the block: those of its first row up to those of its last; all of its rows see [all_first, all_last).
    const std::int64_t last_row = min(first_row + kRangeRows, rows) - 1;
    const KeyRange head = visible_keys(p, args.window, seq.position(static_cast<int>(first_row / p.group)));
    const KeyRange tail = visible_keys(p, args.window, seq.position(static_cast<int>(last_row / p.group)));
    const int first_tile = head.first / kKeys, last_tile = (min(tail.last, key_count) + kKeys - 1) / kKeys;

    const auto keys = key_stream<T, Dk, kKeys, 128>(args.k, seq, key_begin, kv_head, thread);
    const auto values = key_stream<T, Dv, kKeys, 128>(args.v, seq, key_begin, kv_head, thread);
    const auto load = [&](int tile) {
      const std::uint32_t stage = shared_address(memory) + tile % 2 * kStage;
      keys.load(stage, tile * kKeys, key_count);
      values.load(stage + kValues, tile * kKeys, key_count);
      commit_copies();
    };

    OnlineSoftmax<Dv> state;
    const float scale = positive_scale(args.scale * key_scale(args.k, kv_head));
    if (first_tile < last_tile) load(first_tile);
    for (int tile = first_tile; tile < last_tile; ++tile) {
      if (tile + 1 < last_tile) {
        load(tile + 1);
        wait_copies<1>();
      } else {
        wait_copies<0>();
      }
      __syncthreads();
      char* stage = memory + tile % 2 * kStage;
      const int key = tile * kKeys;
      float s[kKeys / 8][4];
      Ring<T> ring;
      const Scores<T, Dk, kKeys / 8, decltype(q)> scores{q, shared_address(stage), lane};
      const Outputs<T, Dv, kKeys / 8> outputs{shared_address(stage + kValues), lane};
      start(scores, ring);
      scores.run(s, ring, outputs);
      const bool partial = key < tail.first || key + kKeys > head.last;
      if (partial) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int column = key + n * 8 + 2 * (lane & 3) + i % 2;
            if (column < range[i / 2].first || column >= range[i / 2].last) s[n][i] = -INFINITY;
          }
        }
      }
      state.update(s, scale);
      if (partial && __syncthreads_or(has_nonfinite<T, Dv>(stage + kValues, kKeys, thread, 128))) {
        add_nonfinite<T, Dv>(state.acc, s, stage + kValues, 0, lane,
                             [&](int i, int j) { return key + j >= range[i].first && key + j < range[i].last; });
        __syncthreads();
        clear_nonfinite<T, Dv>(stage + kValues, kKeys, thread, 128);
        __syncthreads();
        start(outputs, ring);
      }
      outputs.run(state.acc, s, ring);
      __syncthreads();  // the stage is free
    }

#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = row_sum(state.sum[i]);
      if (!row[i].valid) continue;
      const bool any = range[i].first < range[i].last;
      const float inverse = any ? 1 / sum : 0;
      T* o = args.o.template at<T>(seq.batch, seq.q_begin + row[i].query, row[i].head) + 2 * (lane & 3);
#pragma unroll
      for (int n = 0; n < Dv / 8; ++n)
        store_pair(o + n * 8, state.acc[n][2 * i] * inverse, state.acc[n][2 * i + 1] * inverse);
      if (lane % 4 == 0)
        args.lse.at(seq.batch, seq.q_begin + row[i].query, row[i].head) =
            any ? (state.max[i] + log2f(sum)) * kLn2 : -INFINITY;
    }
  } while (block.next());
}

}  // namespace nsa::cuda::portable
