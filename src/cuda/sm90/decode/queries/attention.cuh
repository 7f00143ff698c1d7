// What a computing warp does with the tiles of a branch: attention, and importances of selection blocks from the
// compressed keys, once their softmax is known.
#pragma once

#include "cuda/sm90/common/forward_pipeline.cuh"
#include "cuda/sm90/decode/queries/kv_loader.cuh"

namespace nsa::cuda::sm90::decode {

/// The scores of a warp's query with tiles of keys, which its warpgroup multiplies.
template <class S, class T, int D>
struct TileScores {
  std::uint32_t ring;
  const Pipeline<S::kSlots>& barriers;
  SlotState<S::kSlots>& filled;
  const std::uint32_t (&q)[D / 16][4];
  float (&s)[S::kKeys / 2];
  int& begin;  // the first key that the query sees
  int lane;

  /// The next slot, once it is filled; before products read it: fence_async().
  __device__ __forceinline__ int take() {
    barriers.wait(filled);
    const int slot = filled.stage();
    filled.advance();
    return slot;
  }
  __device__ __forceinline__ void release(int slot) const {
    if (lane == 0) barriers.release(slot);
  }
  __device__ __forceinline__ void multiply_keys(int slot) const {
    const std::uint32_t k_tile = descriptor(ring + slot * S::kTile, 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
      wgmma<T, S::kKeys, false>(s, q[k], full_descriptor(k_tile + k / 4 * (S::kPanel / 16) + k % 4 * 2), k != 0);
    wgmma_commit();
  }
  /// Whether there are keys of the tile at `key` that the query does not see: it sees begin ... end - 1.
  __device__ __forceinline__ bool partly(int key, int end) const {
    return __any_sync(0xffffffffu, begin > key || end < key + S::kKeys) != 0;
  }
  __device__ __forceinline__ void mask(int key, int end) const {
    const int low = begin - key - 2 * (lane & 3), high = end - key - 2 * (lane & 3);
#pragma unroll
    for (int e = 0; e < S::kKeys / 4; ++e) {
      const int at = e / 2 * 8 + e % 2, i = e / 2 * 4 + e % 2;
      if (at < low || at >= high) s[i] = s[i + 2] = -INFINITY;
    }
  }
};

/// Adds the tiles of a branch to `sum` and `acc`: of the selected blocks, which their `owner` has, those whose entry
/// names the query `mine`; of the others the keys begin ... end - 1.
template <class S, class T, int D>
__device__ __forceinline__ void attend_tiles(TileScores<S, T, D>& scores, const BranchTiles& tiles, int branch,
                                             const BlockKeys& shape, int end, bool owner, int mine, float scale,
                                             SoftmaxReference& reference, float (&sum)[2], float (&acc)[D / 2]) {
  /// What the query sees of a tile.
  struct Seen {
    int key, end;
    bool partial;
  };
  const auto see = [&](int tile) {
    const int entry = branch == kSelected ? tiles.entry(tile) : 0, key = tiles.key_of(tile, entry, shape.log2_block);
    int seen = end;
    if (branch == kSelected) seen = owner && (entry >> (mine & 1) & 1) ? min(end, key + (1 << shape.log2_block)) : 0;
    return Seen{key, seen, scores.partly(key, seen)};
  };
  // Sums before it are to be scaled where it returns true.
  const auto softmax = [&](const Seen& seen) {
    if (seen.partial) scores.mask(seen.key, seen.end);
    float maxima[2];
    row_maxima<S::kKeys>(scores.s, scale, maxima);
    const bool grown = reference.follow(maxima, [&](int i) { sum[i] *= reference.factor[i]; });
    const float shifts[2] = {reference.shift(0), reference.shift(1)};
#pragma unroll
    for (int i = 0; i < S::kKeys / 2; ++i) {
      scores.s[i] = exp2_fast(fmaf(scores.s[i], scale, shifts[i / 2 % 2]));
      sum[i / 2 % 2] += scores.s[i];
    }
    return grown;
  };
  std::uint32_t probabilities[S::kKeys / 4];
  const int first_slot = scores.take();
  fence_async();
  scores.multiply_keys(first_slot);
  wgmma_wait<0>();
  scores.release(first_slot);
  softmax(see(0));
  pack_rows<T, S::kKeys>(probabilities, scores.s);
  const auto add_values = [&](int slot) {
    gemm_rs<T, D, S::kKeys>(acc, probabilities, descriptor(scores.ring + slot * S::kTile, S::kPanel));
  };
#pragma unroll 1
  for (int tile = 1; tile < tiles.count; ++tile) {
    const Seen seen = see(tile);
    const int values_slot = scores.take(), keys_slot = scores.take();
    fence_async();
    scores.multiply_keys(keys_slot);
    add_values(values_slot);
    wgmma_wait<1>();
    scores.release(keys_slot);
    const bool grown = softmax(seen);
    wgmma_wait<0>();
    scores.release(values_slot);
    if (grown) {
#pragma unroll
      for (int i = 0; i < D / 2; ++i) acc[i] *= reference.factor[i / 2 % 2];
    }
    pack_rows<T, S::kKeys>(probabilities, scores.s);
  }
  const int last_slot = scores.take();
  fence_async();
  add_values(last_slot);
  wgmma_wait<0>();
  scores.release(last_slot);
}

/// Of four numbers of each of four neighbouring lanes: the i-th lane has the sum of the i-th ones.
__device__ __forceinline__ float quad_sums(const float (&x)[4], int lane) {
  const auto add = [](bool upper, float low, float high, int distance) {
    return (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
  };
  return add(lane & 2, add(lane & 1, x[0], x[1], 1), add(lane & 1, x[2], x[3], 1), 2);
}

/// A second pass over the compressed keys: importances from their share of each head's softmax. logarithms: of the
/// rows' softmaxes, base 2. Probabilities are made larger by 2^14, so that float16 has them all.
template <class S, class T, int D>
__device__ __forceinline__ void weigh_tiles(TileScores<S, T, D>& scores, const BranchTiles& tiles,
                                            const BlockKeys& shape, int end, int group, float scale,
                                            const float (&logarithms)[2], const Importances& importances) {
  const int lane = lane_id();  // nothing of this is to be kept in registers before
  const BlockWeights first_blocks(shape, 0, lane), beyond(shape, 8, lane);
  const std::uint32_t weights[4] = {first_blocks.b[0], beyond.b[0], first_blocks.b[1], beyond.b[1]};
  const float shifts[2] = {14 - logarithms[0], 14 - logarithms[1]};
  const std::uint32_t counted[2] = {lane / 4 < group ? ~0u : 0, lane / 4 + 8 < group ? ~0u : 0};
  const auto next_scores = [&] {
    const int slot = scores.take();
    fence_async();
    scores.multiply_keys(slot);
    return slot;
  };
  if (tiles.count == 0) return;
  /// While the next tile's scores are computed, if there is one.
  const auto weigh_tile = [&](int tile, int& slot, auto has_next) {
    const int key = tiles.key_of(tile, 0, 0);
    const bool partial = scores.partly(key, end);
    wgmma_wait<0>();
    scores.release(slot);
    if (partial) scores.mask(key, end);
    std::uint32_t shares[S::kKeys / 4];
#pragma unroll
    for (int i = 0; i < S::kKeys / 2; ++i) scores.s[i] = exp2_fast(fmaf(scores.s[i], scale, shifts[i / 2 % 2]));
    pack_rows<Half, S::kKeys>(shares, scores.s);
    if constexpr (has_next) slot = next_scores();
#pragma unroll
    for (int i = 0; i < S::kKeys / 4; ++i) shares[i] &= counted[i % 2];
    // Of each key tile what its blocks have of the lane's rows, and what the next one's first block has; then lane
    // 4 r + u has block r of key tile u.
    static_assert(S::kKeys / kTileKeys == 4);
    float low[4], high[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      float of_blocks[4] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) mma(Half{}, of_blocks, weights, shares[4 * u + i], shares[4 * u + 2 + i]);
      low[u] = of_blocks[0] + of_blocks[1], high[u] = of_blocks[2] + of_blocks[3];
    }
    const int key_tile = key / kTileKeys + (lane & 3), block = lane / 4;
    const float of_block = quad_sums(low, lane), beyond_all = shape.blocks() == 8 ? quad_sums(high, lane) : of_block;
    if (key_tile * kTileKeys < end) {
      if (block < shape.blocks()) importances.blocks[(key_tile << shape.log2_blocks()) + block] = of_block;
      if (block == (shape.blocks() & 7)) importances.crossings[key_tile] = beyond_all;
    }
  };
  int slot = next_scores();
#pragma unroll 1
  for (int tile = 0; tile < tiles.count - 1; ++tile) weigh_tile(tile, slot, std::true_type{});
  weigh_tile(tiles.count - 1, slot, std::false_type{});
}

}  // namespace nsa::cuda::sm90::decode
