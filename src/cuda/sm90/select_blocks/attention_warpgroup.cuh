// A computing warpgroup of compressed_select.cu: attention of its four warp tiles to the compressed keys, and what
// their importances are made of.
#pragma once

#include "cuda/sm90/common/epilogue.cuh"
#include "cuda/sm90/select_blocks/shared_memory.cuh"

namespace nsa::cuda::sm90::select_blocks {

/// The softmax of the two rows of a lane, with the lane's weighted sums for the scratch, of kSummed strides each.
template <int Dk, int kSummed>
struct ScoringSoftmax : SoftmaxReference {
  static constexpr int kSums = 16 / kSummed;
  static constexpr bool kAddsWeighted = kSummed != 2;             // there, beside keys of 192, ptxas would spill
  static constexpr bool kSkipsRests = kSummed == 4 && Dk <= 128;  // the same: a branch where l = d

  float total[2] = {0, 0};  // of the weighted sums, in which what goes over to the next tile is still missing; else of
                            // probabilities
  float last[2] = {0, 0};   // probability of the lane's last key in the tile before

  /// Key 0 .. 15 of the lane's keys of row i among its scores.
  __device__ static constexpr int at(int i, int key) { return 4 * (key % 8) + 2 * i + key / 8; }

  __device__ __forceinline__ bool update(float (&s)[kKeys / 2], float scale, const KeyWeights& weights,
                                         float (&sums)[2][kSums], int lane) {
    float maxima[2];
    row_maxima<kKeys>(s, scale, maxima);
    const bool grown = follow(maxima, [&](int i) { total[i] *= factor[i], last[i] *= factor[i]; });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int key = 0; key < 16; ++key) s[at(i, key)] = exp2_fast(fmaf(s[at(i, key)], scale, shift(i)));
#pragma unroll
      for (int n = 0; n < kSums; ++n) {
        const int first = n * kSummed, end = first + kSummed - 1;
        sums[i][n] = s[at(i, end)];
        if constexpr (kSummed > 1) {
          float whole = s[at(i, first)];
#pragma unroll
          for (int key = first + 1; key < end; ++key) whole += s[at(i, key)];
          sums[i][n] = fmaf(weights.whole, whole, sums[i][n]);
        }
      }
      if (!kSkipsRests || weights.rest > 0) {
#pragma unroll
        for (int n = 1; n < kSums; ++n) sums[i][n] += weights.rest * s[at(i, n * kSummed - 1)];
        // The key before the lane's first one is the last one of the lane before, for the first lane in the tile
        // before.
        const float own = s[at(i, 15)];
        const float before = (lane & 3) == 3 ? last[i] : own;
        sums[i][0] += weights.rest * __shfl_sync(0xffffffffu, before, (lane & 28) | ((lane + 3) & 3));
        asm volatile("mov.b32 %0, %1;" : "=f"(last[i]) : "f"(own));  // out of the accumulator, else wgmma waits (C7511)
      }
#pragma unroll
      for (int n = 0; n < (kAddsWeighted ? kSums : 16); n += 4) {
        const auto x = [&](int m) { return kAddsWeighted ? sums[i][n + m] : s[at(i, n + m)]; };
        total[i] += (x(0) + x(1)) + (x(2) + x(3));
      }
    }
    return grown;
  }

  /// Of probabilities of row i; all lanes of the warp.
  __device__ __forceinline__ float sum(int i, const KeyWeights& weights, int lane) const {
    if constexpr (!kAddsWeighted) return row_sum(total[i]);
    return (1 / weights.whole) * row_sum(total[i] + ((lane & 3) == 3 ? weights.rest * last[i] : 0));
  }
};

/// A computing warpgroup.
template <class T, int Dk, int Dv, class Tiles, class Blocks>
__device__ __forceinline__ void attend(const CompressedSelectArgs& args, const FastDivmod& by_stride,
                                       SelectBarriers& barriers, std::uint32_t queries, std::uint32_t keys,
                                       std::uint32_t values, int group) {
  using L = SelectLayout<Dk, Dv>;
  using Softmax = ScoringSoftmax<Dk, Blocks::kSummed>;
  const Geometry& p = args.range.geometry;
  const Tiles& warp_tiles = warp_tiles_of<Tiles>(args);
  const int lane = threadIdx.x % 32, own = warp_uniform(threadIdx.x / 32);  // own: warp tile of the tile
  const float scale = positive_scale(args.range.scale);
  const std::uint32_t q = descriptor(queries + group * L::kQueryBytes, 16);
  KeyValueRings<Dk, Dv, kKeys, L::kStages, kMaxStages> rings(barriers, keys, values);
  PipelineState<kBuffers> buffer;
  stagger_warpgroups(group, 2500);

  for (std::uint32_t phase = 0;; phase ^= 1) {
    const volatile GroupTile& tile = barriers.tiles[group][phase];
    mbarrier_wait_warp(barriers.queries().full(group), phase);
    if (tile.queries < 0) break;
    // Keys that a row sees; none if it is not there, so that a NaN in its place goes nowhere.
    const auto seen_by = [&](int row) {
      const int query = warp_tiles.first_query(own) + warp_tiles.query_of(row);
      return query < tile.queries ? num_compressed(p, by_stride, tile.position + query + 1) : 0;
    };
    const auto seen_by_all = [&] { return min(seen_by(0), seen_by(warp_tiles.rows() - 1)); };
    int visible = seen_by_all();  // of these keys, those from the next tile on
    ScratchWriter<Blocks::kTiles> scratch(scratch_of<Blocks>(args, buffer.stage(), own), lane);
    const auto mask = [&](float(&s)[kKeys / 2]) {
      if (args.range.scale < 0) {
#pragma unroll
        for (float& x : s) x = -x;
      }
      if (visible < kKeys) {
        constexpr bool kAlike = std::is_same_v<Tiles, WarpTilesOfSixteen>;  // all rows
        const int before = kAlike ? 0 : seen_by_all() - visible;            // keys of the tiles before
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int seen = (kAlike ? visible : seen_by(lane / 4 + 8 * i) - before) - 16 * (lane & 3);
#pragma unroll
          for (int key = 0; key < 16; ++key)
            if (key >= seen) s[Softmax::at(i, key)] = -INFINITY;
        }
      }
      visible -= kKeys;
    };
    Softmax softmax;
    const auto update = [&](float(&s)[kKeys / 2]) {
      float sums[2][Softmax::kSums];
      mask(s);
      const bool grown = softmax.update(s, scale, Blocks::weights(args), sums, lane);
      scratch.write(sums, softmax.max);
      return grown;
    };

    float o[Dv / 2];
#pragma unroll
    for (float& x : o) x = 0;
    mbarrier_wait_warp(shared_address(&barriers.scratch_empty[buffer.stage()][own]), buffer.phase() ^ 1);
    const int left = tile.end;
    if (left > 0) {
      float s[kKeys / 2];
      std::uint32_t probabilities[kKeys / 4];
      attention_mainloop<T>(rings, q, left, o, softmax.factor, s, probabilities, update,
                            [&] { barriers.queries().release(group); });
    } else {
      barriers.queries().release(group);
    }
    rings.skip(tile.key_tiles - tile.end);

    float inverse[2], lse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = softmax.sum(i, Blocks::weights(args), lane);
      const bool any = seen_by(lane / 4 + 8 * i) > 0;
      inverse[i] = any ? __fdividef(1, sum) : 0;
      lse[i] = any ? softmax.max[i] + log2f(sum) : -INFINITY;
    }
    __syncwarp();  // the scratch
    if ((lane & 3) == 0) {
      *reinterpret_cast<float2*>(reinterpret_cast<char*>(barriers.minus_lse[buffer.stage()][own]) + lane / 4 % 4 * 16 +
                                 lane / 16 * 8) = make_float2(lane / 4 < warp_tiles.rows() ? -lse[0] : -INFINITY,
                                                              lane / 4 + 8 < warp_tiles.rows() ? -lse[1] : -INFINITY);
      mbarrier_arrive(shared_address(&barriers.scratch_full[buffer.stage()][own]));
    }
    buffer.advance();

#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane / 4 + 8 * i, query = warp_tiles.query_of(row);
      const int at = warp_tiles.first_query(own) + query,
                head = tile.head + warp_tiles.first_head(own) + row - query * warp_tiles.heads;
      const bool valid = row < warp_tiles.rows() && at < tile.queries;
      T* to = args.range.o.template at<T>(tile.batch, tile.row + at, head);
      store_row(to, o, i, inverse[i], valid, lane);
      if (valid && lane % 4 == 0) {
        args.range.lse.at(tile.batch, tile.row + at, head) = lse[i] * kLn2;
        if (lse[i] != lse[i]) *args.flag = 1;
      }
    }
  }
}

}  // namespace nsa::cuda::sm90::select_blocks
